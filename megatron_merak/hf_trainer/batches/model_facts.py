"""What a trainer reads off a model's class, its forward and its config, by transformers' own rules."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.utils import can_return_loss, find_labels
from transformers.utils.generic import is_flash_attention_requested

from .padding import IGNORED, Padding


@dataclass(frozen=True)
class ModelFacts:
    """label_names: inputs that are targets. return_loss: whether the forward makes a loss without labels. shifts:
    whether its loss predicts the next token, so that the first label of a row is no target. columns: the forward's
    parameters. main_input: what tokens are counted of. predictions: outputs that are predictions, "*" being all but
    those that "!name" names. flash: the model asks for flash attention, in whose place sdpa is captured.
    """

    label_names: tuple[str, ...]
    return_loss: bool
    shifts: bool
    columns: tuple[str, ...]
    main_input: str
    predictions: tuple[str, ...]
    flash: bool = False

    @classmethod
    def of(cls, model: nn.Module, args: TrainingArguments, predictions: str | None = None) -> "ModelFacts":
        """``predictions``: names joined by commas; None: all but what the config ignores at inference."""
        kind, config = type(model), getattr(model, "config", None)
        labels = tuple(find_labels(kind) if args.label_names is None else args.label_names)
        if predictions is None:
            default = ["cache", "past_key_values"]  # what releases of transformers from 5.24, and older ones, ignore
            ignored = [] if config is None else getattr(config, "keys_to_ignore_at_inference", default)
            predictions = ",".join(("*", *(f"!{name}" for name in ignored)))
        next_token = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss
        return cls(
            labels,
            bool(can_return_loss(kind)),
            next_token and not getattr(config, "is_encoder_decoder", False),
            tuple(inspect.signature(model.forward).parameters),
            getattr(model, "main_input_name", "input_ids"),
            tuple(name.strip() for name in predictions.split(",")),
            bool(getattr(config, "_attn_implementation", None)) and is_flash_attention_requested(config),
        )

    def without(self, outputs: Sequence[str]) -> "ModelFacts":
        """With all predictions but ``outputs``, in place of those that the config ignores."""
        if "*" in self.predictions:
            return replace(self, predictions=("*", *(f"!{name}" for name in outputs)))
        return replace(self, predictions=tuple(name for name in self.predictions if name not in outputs))

    @property
    def used_columns(self) -> tuple[str, ...]:
        """What of a sample the model or its collator can use."""
        return (*self.columns, "label", "label_ids", *self.label_names)

    def has_loss(self, batch: Mapping[str, object]) -> bool:
        """Whether the model makes a loss of this batch."""
        if self.label_names:
            return all(batch.get(name) is not None for name in self.label_names)
        return bool(batch.get("return_loss", self.return_loss))

    def labels(self, batch: Mapping[str, object]) -> Tensor | tuple | None:
        """The targets in the batch: one tensor, or a tuple where the model takes several."""
        if not self.has_loss(batch):
            return None
        labels = tuple(batch.get(name) for name in self.label_names)
        return labels[0] if len(labels) == 1 else labels

    def items(self, batch: Mapping[str, object]) -> Tensor | None:
        """The number of targets in the batch that the loss counts, [] int64; None where that is not known."""
        targets = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(targets, Tensor):
            return None
        if self.shifts and "shift_labels" not in batch:
            targets = targets[..., 1:]
        return targets.ne(IGNORED).sum()

    def tokens(self, batch: Mapping[str, object], pad_id: int | None, kind: str) -> int:
        """Elements of the main input, without padding if ``kind`` is "non_padding"."""
        tokens = batch.get(self.main_input)
        if not isinstance(tokens, Tensor):
            return 0
        if kind == "non_padding" and isinstance(mask := batch.get("attention_mask"), Tensor):
            return int(mask.sum())
        if kind == "non_padding" and pad_id is not None:
            return int(tokens.ne(pad_id).sum())
        return tokens.numel()


def padding_of(model: nn.Module, facts: ModelFacts, args: TrainingArguments, tokenizer: object) -> Padding:
    """How to pad the model's batches. A model that neither takes a mask nor looks back only is never padded."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = (getattr(holder, "pad_token_id", None) for holder in (tokenizer, text))
    pad_id = next((value for value in known if isinstance(value, int) and value >= 0), 0)
    mask = "attention_mask" in facts.columns
    if not mask and not facts.shifts:
        return Padding(None)
    limit = getattr(text, "max_position_embeddings", None)
    limit, decoder = limit if isinstance(limit, int) else None, bool(getattr(config, "is_encoder_decoder", False))
    return Padding(args.buckets, args.pad_to_multiple_of, pad_id, mask, limit, decoder)

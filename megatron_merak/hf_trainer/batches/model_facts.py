"""Facts that a trainer derives from a model's class, forward and config, by transformers' own
rules.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.utils import can_return_loss, find_labels
from transformers.utils.generic import is_flash_attention_requested

from ...graph.capture.inspected import inspected_model
from ..arguments.merak_arguments import MerakArguments
from .padding import IGNORED, Padding


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model.

    label_names: inputs that are targets.
    return_loss: whether the forward computes a loss without labels.
    shifts:      whether its loss predicts the next token, so that the first label of a row is no
                 target.
    columns:     parameters of the forward.
    main_input:  the entry whose tokens are counted.
    predictions: outputs that are predictions; "*": all but those named by "!name".
    flash:       whether the model requests flash attention; sdpa is captured in its place.
    """

    label_names: tuple[str, ...]
    return_loss: bool
    shifts: bool
    columns: tuple[str, ...]
    main_input: str
    predictions: tuple[str, ...]
    flash: bool = False

    @classmethod
    def of(
        cls, model: nn.Module, args: TrainingArguments, predictions: str | None = None
    ) -> "ModelFacts":
        """Return the facts about a model.

        predictions: names joined by commas; None: all but those that the config ignores at
                     inference.
        """
        inspected = inspected_model(model)
        kind = type(inspected)
        config = getattr(model, "config", None)
        labels = tuple(find_labels(kind) if args.label_names is None else args.label_names)
        if predictions is None:
            # what releases of transformers from 5.24, and older ones, ignore
            default = ["cache", "past_key_values"]
            ignored = (
                [] if config is None else getattr(config, "keys_to_ignore_at_inference", default)
            )
            predictions = ",".join(("*", *(f"!{name}" for name in ignored)))
        next_token = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "") is ForCausalLMLoss
        return cls(
            label_names=labels,
            return_loss=bool(can_return_loss(kind)),
            shifts=next_token and not getattr(config, "is_encoder_decoder", False),
            columns=tuple(inspect.signature(inspected.forward).parameters),
            main_input=getattr(model, "main_input_name", "input_ids"),
            predictions=tuple(name.strip() for name in predictions.split(",")),
            flash=bool(getattr(config, "_attn_implementation", None))
            and is_flash_attention_requested(config),
        )

    def without(self, outputs: Sequence[str]) -> "ModelFacts":
        """Return a copy in which all outputs but ``outputs`` are predictions."""
        if "*" in self.predictions:
            return replace(self, predictions=("*", *(f"!{name}" for name in outputs)))
        return replace(
            self, predictions=tuple(name for name in self.predictions if name not in outputs)
        )

    @property
    def used_columns(self) -> tuple[str, ...]:
        """Return the columns of a sample that the model or its collator can use."""
        return (*self.columns, "label", "label_ids", *self.label_names)

    def has_loss(self, batch: Mapping[str, object]) -> bool:
        """Whether the model computes a loss of this batch."""
        if self.label_names:
            return all(batch.get(name) is not None for name in self.label_names)
        return bool(batch.get("return_loss", self.return_loss))

    def labels(self, batch: Mapping[str, Any]) -> Tensor | tuple | None:
        """Return the targets of the batch: one tensor, or a tuple if the model takes several."""
        if not self.has_loss(batch):
            return None
        labels = tuple(batch.get(name) for name in self.label_names)
        return labels[0] if len(labels) == 1 else labels

    def items(self, batch: Mapping[str, object]) -> Tensor | None:
        """Return the number of targets that the loss counts, [] int64; None if unknown."""
        targets = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(targets, Tensor):
            return None
        if self.shifts and "shift_labels" not in batch:
            targets = targets[..., 1:]
        return targets.ne(IGNORED).sum()

    def tokens(self, batch: Mapping[str, object], pad_id: int | None, kind: str | bool) -> int:
        """Return the number of elements of the main input, without padding if ``kind`` is
        "non_padding".
        """
        tokens = batch.get(self.main_input)
        if not isinstance(tokens, Tensor):
            return 0
        if kind == "non_padding" and isinstance(mask := batch.get("attention_mask"), Tensor):
            return int(mask.sum())
        if kind == "non_padding" and pad_id is not None:
            return int(tokens.ne(pad_id).sum())
        return tokens.numel()


def padding_of(
    model: nn.Module, facts: ModelFacts, args: MerakArguments, tokenizer: object
) -> Padding:
    """Return how to pad the model's batches. A model that takes no mask and is not causal is never
    padded.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = (getattr(holder, "pad_token_id", None) for holder in (tokenizer, text))
    pad_id = next((value for value in known if isinstance(value, int) and value >= 0), 0)
    mask = "attention_mask" in facts.columns
    if not mask and not facts.shifts:
        return Padding(None)
    limit = getattr(text, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) else None
    decoder = bool(getattr(config, "is_encoder_decoder", False))
    return Padding(
        args.buckets, args.pad_to_multiple_of, pad_id, mask, limit=limit, decoder=decoder
    )

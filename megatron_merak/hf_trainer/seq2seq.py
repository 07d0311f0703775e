"""``transformers.Seq2SeqTrainer``: generated predictions, and metrics of them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GenerationConfig
from transformers.trainer_utils import PredictionOutput

from ..errors import ConfigError
from ..parallel.agree import together
from .arguments.keywords import checked
from .arguments.merak_arguments import MerakArguments
from .batches.exchange import from_rank
from .batches.order import Batch
from .batches.predictions import Evaluation, Round
from .trainer import MerakTrainer

_DEFAULT_LENGTH = 20  # of transformers, where a generation config has none


@dataclass
class MerakSeq2SeqArguments(MerakArguments):
    """The fields of ``Seq2SeqTrainingArguments``, added to ``MerakArguments``. Raises
    ConfigError.
    """

    sortish_sampler: bool = field(
        default=False, metadata={"help": "Not supported: see train_sampling_strategy."}
    )
    predict_with_generate: bool = field(
        default=False,
        metadata={"help": "Predictions are generated tokens, and compute_metrics gets these."},
    )
    generation_max_length: int | None = field(
        default=None,
        metadata={
            "help": "max_length of generated predictions (unset: that of the generation config)."
        },
    )
    generation_num_beams: int | None = field(
        default=None,
        metadata={
            "help": "num_beams of generated predictions (unset: that of the generation config)."
        },
    )
    generation_config: str | Path | GenerationConfig | None = field(
        default=None,
        metadata={
            "help": "A GenerationConfig, or the directory or file of one, in place of the model's."
        },
    )

    def __post_init__(self):
        if self.sortish_sampler:
            reason = "transformers.Trainer no longer has this sampler"
            raise ConfigError(
                "sortish_sampler", True, reason, "Set train_sampling_strategy='group_by_length'"
            )
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        config = values["generation_config"]
        return values | (
            {"generation_config": config.to_dict()} if isinstance(config, GenerationConfig) else {}
        )


MerakSeq2SeqArguments.__init__ = checked(MerakSeq2SeqArguments.__init__)  # type: ignore[method-assign]


@dataclass
class GeneratedEvaluation(Evaluation):
    """An evaluation whose predictions are generated, batch by batch, by all ranks together.

    generate:   returns tokens [rows, length], given the entries of a batch.
    lengthened: pads tokens or labels to one length.
    """

    generate: Callable[[Batch], Tensor] = field(default=lambda batch: batch["input_ids"])
    lengthened: Callable[[Tensor], Tensor] = field(default=lambda tokens: tokens)

    def _round(self, first: int, count: int, batches: list[Batch]) -> Round:
        """Ask for the losses; other outputs of the model are not needed."""
        return Evaluation._round(replace(self, loss_only=True), first, count, batches)

    def _forward(self, round_: Round) -> list[dict]:
        """Note the losses."""
        Evaluation._forward(replace(self, loss_only=True), round_)
        return []

    def _collected(self, place: int, round_: Round, outputs: list[dict]) -> dict:
        """Return predictions and labels of one batch of a round. Collective."""
        replica = place % self.batches.loading.replicas
        row = place // self.batches.loading.replicas
        owner = self.engine.output_rank(replica)
        tensors = None
        if self.rank == owner:
            tensors = {name: x for name, x in round_.batches[row].items() if isinstance(x, Tensor)}
        batch: Any = from_rank(owner, tensors, self.control)
        predictions = self.lengthened(self.generate(batch).cpu())
        labels: Any = self.facts.labels(batch)
        labels = None if labels is None else self.lengthened(labels)
        if self.preprocess is not None:
            predictions = self.preprocess(predictions, labels)
        inputs = batch[self.facts.main_input] if "inputs" in self.args.include_for_metrics else None
        return {"predictions": predictions, "labels": labels, "inputs": inputs}


class MerakSeq2SeqTrainer(MerakTrainer):
    """The drop-in replacement for ``transformers.Seq2SeqTrainer``; see ``MerakTrainer``.

    args: MerakSeq2SeqArguments. With ``predict_with_generate``, ``evaluate`` and ``predict`` take
          keywords of ``generate``, and predictions are tokens.
    """

    args: MerakSeq2SeqArguments

    def __init__(
        self,
        model: Any = None,
        args: MerakSeq2SeqArguments | None = None,
        *arguments: Any,
        **named: Any,
    ):
        if args is not None and not isinstance(args, MerakSeq2SeqArguments):
            reason = "it has no predict_with_generate"
            raise ConfigError("args", type(args).__name__, reason, "Make MerakSeq2SeqArguments")
        super().__init__(
            model,
            MerakSeq2SeqArguments("tmp_trainer") if args is None else args,
            *arguments,
            **named,
        )
        self._generating: dict[str, Any] | None = None  # keywords of generate, in an evaluation
        with together(self.mesh.control, "cpu"):
            if (config := self.args.generation_config) is not None:
                self.model.generation_config = _config(config)

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate like ``MerakTrainer``. gen_kwargs: keywords of ``generate``, overriding the
        arguments.
        """
        with self._as_given(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Dataset,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict like ``MerakTrainer``; predictions are tokens [samples, length], padded at the
        end.

        gen_kwargs: see ``evaluate``.
        """
        with self._as_given(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    @contextmanager
    def _as_given(self, gen_kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Generate with these keywords and the arguments; nested evaluations of several datasets
        keep those of the outer one.
        """
        before = self._generating
        settings = dict(gen_kwargs)
        if settings.get("max_length") is None and settings.get("max_new_tokens") is None:
            settings["max_length"] = self.args.generation_max_length
        if settings.get("num_beams") is None:
            settings["num_beams"] = self.args.generation_num_beams
        if before is None:
            self._generating = {
                name: value for name, value in settings.items() if value is not None
            }
        try:
            yield
        finally:
            self._generating = before

    def _evaluation(self, *arguments: Any) -> Evaluation:
        plain = super()._evaluation(*arguments)
        if not self.args.predict_with_generate or plain.loss_only:
            return plain
        fields = {name: getattr(plain, name) for name in Evaluation.__dataclass_fields__}
        return GeneratedEvaluation(**fields, generate=self._tokens, lengthened=self._lengthened)

    def _tokens(self, batch: Batch) -> Tensor:
        inputs = dict(batch)
        labels = batch.get("labels")
        started = inputs.get("decoder_input_ids")
        made = (
            isinstance(labels, Tensor)
            and isinstance(started, Tensor)
            and started.shape == labels.shape
        )
        if made:  # of the labels
            inputs = {
                name: x
                for name, x in inputs.items()
                if name not in ("decoder_input_ids", "decoder_attention_mask")
            }
        inputs.pop("labels", None)
        return self._generated(None, None, {**inputs, **(self._generating or {})})

    def _lengthened(self, tokens: Tensor) -> Tensor:
        """Pad to the largest length of the model's generation config, like transformers."""
        config = self.model.generation_config
        length = tokens.shape[-1]
        longest = config.max_length or _DEFAULT_LENGTH
        if length >= longest and config.max_new_tokens is not None:
            longest = config.max_new_tokens + 1
        if length >= longest:
            return tokens
        return torch.nn.functional.pad(tokens, (0, longest - length), value=self._pad_id())

    def _pad_id(self) -> int:
        known = self.processing_class
        if hasattr(known, "pad_token_id"):
            token = known.eos_token_id if known.pad_token_id is None else known.pad_token_id
        else:
            token = getattr(self.model.config, "pad_token_id", None)
        if token is None:
            reason = "generated predictions are padded to one length"
            raise ConfigError(
                "pad_token_id",
                None,
                reason,
                "Set it in the model's config, or give a processing_class",
            )
        return token


def _config(source: str | Path | GenerationConfig) -> GenerationConfig:
    """Return the generation config. Raises ConfigError if it cannot be read or contradicts
    itself.
    """
    try:
        if isinstance(source, GenerationConfig):
            config = copy.deepcopy(source)
        elif Path(source).is_file():
            config = GenerationConfig.from_pretrained(Path(source).parent, Path(source).name)
        else:
            config = GenerationConfig.from_pretrained(source)
        config.validate(strict=True)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        shown = "(given)" if isinstance(source, GenerationConfig) else str(source)
        raise ConfigError(
            "generation_config", shown, reason, "Correct it, or leave it out"
        ) from error
    return config

"""A TRL trainer whose model trains under a plan: data preparation, collators, losses and metrics are TRL's.

class Parallel(trl.SFTTrainer, _Adapter)      SFTTrainer.__init__ and log, its compute_loss, ...
      _Adapter(MerakTrainer, Trainer)         SFTTrainer's super() calls end here; none reaches Trainer
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import PredictionOutput

from ..errors import ConfigError
from ..extras import installed_by
from ..hf_trainer.arguments.merak_arguments import MerakArguments
from ..hf_trainer.batches.leaner import in_rows
from ..hf_trainer.batches.model_facts import ModelFacts
from ..hf_trainer.batches.order import Batch
from ..hf_trainer.batches.predictions import Evaluation, ReportedOutputs
from ..hf_trainer.own_loss import LossOfTrainer
from ..hf_trainer.trainer import MerakTrainer
from ..parallel.agree import gather_json
from ..parallel.attendance import attend
from .accelerator import Accelerator, over_replicas
from .loss import MICRO_BATCHES, REPORTS, LossOfTrl, base_model
from .scores import take_head

_REFUSED = {  # fields of TRL's configs -> (why, what to do)
    "activation_offloading": ("a plan decides it", "Set cpu_offloading_num_layers"),
    "precompute_ref_log_probs": (
        "the model runs under its plan only",
        "Leave it False: the reference runs beside it",
    ),
    "sync_ref_model": ("a reference model is frozen", "Leave it False"),
}
_TRAINERS = {  # -> what it gives to compute_metrics as labels
    trl.SFTTrainer: ("labels",),
    trl.DPOTrainer: ("input_ids",),
    trl.RewardTrainer: (),
}
REFERENCE = "merak_reference"
SERIES = "1.16."  # of TRL: its heads, losses and overrides are known


def parallelize(kind: type) -> type:
    """Return ``kind`` under a plan.

    kind: a TRL trainer or its config, or a class derived from one. A config gets the fields of
          ``MerakArguments`` too.

        Trainer, Config = parallelize(trl.SFTTrainer), parallelize(trl.SFTConfig)
        Trainer(model, Config("out", tensor_model_parallel_size=2), train_dataset=...).train()

    Raises ConfigError for other classes.
    """
    if not trl.__version__.startswith(SERIES):
        remedy = f"Install trl {SERIES}*: {installed_by('trl')}"
        raise ConfigError(
            "trl", trl.__version__, f"what its trainers do is known of {SERIES}* alone", remedy
        )
    if issubclass(kind, TrainingArguments):
        return _config(kind)
    base = next((each for each in kind.__mro__ if each in _TRAINERS), None)
    if base is None:
        names = ", ".join(each.__name__ for each in _TRAINERS)
        name = kind.__name__
        remedy = f"Use {names}, or MerakTrainer for a script of transformers"
        raise ConfigError("parallelize", name, "it is no trainer that can run under a plan", remedy)
    adapted = tuple(each for each in base.__mro__ if each.__module__.partition(".")[0] == "trl")

    class Parallel(kind, _Adapter):
        __doc__ = kind.__doc__

        def __init__(self, *args: Any, **kwargs: Any):
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, TrainingArguments):
                    _refuse(argument)  # before TRL makes a config of its own of another one
            super().__init__(*args, **kwargs)
            self._adopt()

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self._share_metrics()
            super().log(logs, start_time)

        def _send_telemetry(self) -> None:
            """Do nothing: no usage data is sent. Here, since TRL's own class comes before
            `_Adapter`.
            """

    Parallel.adapted = (Parallel, *adapted, _Adapter)
    return _named(Parallel, kind)


def _refuse(args: Any) -> None:
    ours = any(each.__module__.partition(".")[0] == "trl" for each in type(args).__mro__)
    if not (ours and isinstance(args, MerakArguments)):
        remedy = "Make them with parallelize(SFTConfig), or of the config that the trainer takes"
        raise ConfigError(
            "args", type(args).__name__, "it is no parallelized config of TRL", remedy
        )
    for name, (reason, remedy) in _REFUSED.items():
        if getattr(args, name, False):
            raise ConfigError(name, getattr(args, name), reason, remedy)


def _config(kind: type) -> type:
    class ParallelArguments(kind, MerakArguments):
        __doc__ = kind.__doc__

        def __post_init__(self) -> None:
            if getattr(self, "pad_to_multiple_of", None) == "auto":
                self.pad_to_multiple_of = None  # as TRL has it on CPUs and GPUs
            super().__post_init__()
            # read by TRL, and set to this, where a dataset is a stream
            settings: Any = AcceleratorConfig(dispatch_batches=False)
            self.accelerator_config = settings

        def __reduce__(self) -> tuple:
            values = {each.name: getattr(self, each.name) for each in fields(self)}
            return _unpickled, (kind, values | {"_settled": self._settled})

    return _named(dataclass(ParallelArguments), kind)


def _unpickled(kind: type, values: dict[str, Any]) -> TrainingArguments:
    """A pickled config."""
    config: Any = object.__new__(_config(kind))
    vars(config).update(values)
    return config


def _named(derived: type, kind: type) -> type:
    derived.__name__ = derived.__qualname__ = kind.__name__
    return derived


class _Adapter(MerakTrainer, Trainer):  # type: ignore[misc]  # the first base replaces what it names of the second
    """The base class of a TRL trainer in place of ``transformers.Trainer``."""

    is_fsdp_enabled = is_deepspeed_enabled = can_return_loss = False
    accelerator: Any = None
    current_gradient_accumulation_steps: int | Tensor = 1
    ref_model: Any = None
    hub_model_id = None  # of model cards
    _signature_columns: Any = None
    _metrics: dict[str, Any]  # which TRL's trainers count in, with the next
    _total_train_tokens: Any
    _fields: tuple[str, ...] = ()
    _predicting = False

    def __init__(self, *args: Any, **kwargs: Any):
        _refuse(kwargs.get("args"))
        super().__init__(*args, **kwargs)
        if getattr(self, "_is_vision_dataset", False):
            remedy = (
                "Train on text, or with MerakTrainer and a collator that makes the model's inputs"
            )
            raise ConfigError(
                "train_dataset", "(with images)", "TRL's image batches were never tried", remedy
            )
        learns = getattr(self.model, "active_peft_config", None)
        if getattr(learns, "is_prompt_learning", False):
            remedy = "Use LoRA, or another adapter inside of layers"
            raise ConfigError(
                "peft_config",
                type(learns).__name__,
                "its tokens come before the model's layers",
                remedy,
            )
        self._follow_mesh()

    def _choose(self) -> None:
        super()._choose()
        self._follow_mesh()

    def _follow_mesh(self) -> None:
        """Tell TRL's code how many replicas there are, and how many micro-batches."""
        self.accelerator = Accelerator(self.mesh)
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps

    def _adopt(self) -> None:
        """Take over what TRL created: models without its fused head, the reference model as a
        submodule of the trained one.
        """
        self._fields = take_head(base_model(self.model)) or ("logits",)
        if self.ref_model is not None:
            take_head(base_model(self.ref_model))
            self.model.add_module(REFERENCE, self.ref_model.requires_grad_(False))
            self.beside = REFERENCE
        if self.args.recomputes and hasattr(self.model, "peft_config"):
            self.model.disable_input_require_grads()  # TRL's hook for torch.utils.checkpoint

    def get_tp_size(self) -> int:
        """Processes of accelerate that share a batch: 1, since its processes are replicas."""
        return 1

    @property
    def predicts(self) -> bool:
        """Whether evaluations need more than losses and TRL's metrics."""
        return (
            self._predicting or self.compute_metrics is not None
        ) and not self.args.prediction_loss_only

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        self._predicting = True
        try:
            return super().predict(*args, **kwargs)
        finally:
            self._predicting = False

    # What MerakTrainer asks

    def _facts_of_model(self) -> ModelFacts:
        facts = super()._facts_of_model()
        self._signature_columns = None
        self._set_signature_columns_if_needed()
        columns = (*(self._signature_columns or facts.columns),)
        labels = next(names for kind, names in _TRAINERS.items() if isinstance(self, kind))
        return replace(
            facts, columns=columns, predictions=("logits",), label_names=labels, return_loss=True
        )

    def _sees_padding(self) -> bool:
        """Whether the loss reads padding: no, TRL masks it."""
        return False

    def _loss_of_script(self) -> LossOfTrainer:
        return LossOfTrl(self, self._fields, self.beside)

    def prepare_step(self, batches: list[Batch]) -> list[Batch]:
        prepared = super().prepare_step(batches)
        if not getattr(self, "aux_loss_enabled", False):
            return prepared
        count = torch.tensor(float(len(batches)))  # the last step of an epoch may have fewer
        return [batch | {MICRO_BATCHES: count} for batch in prepared]

    def note_reports(self, batches: list[Batch], prepared: list[Batch]) -> None:
        for batch, ran, reported in zip(
            batches, prepared, self.engine.reported(prepared) or (), strict=False
        ):
            self._count(batch, ran, reported, over_replicas(self.mesh))

    def _evaluation(self, *arguments: Any) -> Evaluation:
        def take(batch: Batch, ran: Batch, reported: Mapping[str, Tensor]) -> None:
            self._count(batch, ran, reported, lambda value: value)

        return replace(super()._evaluation(*arguments), report=ReportedOutputs(REPORTS, take))

    def _count(self, batch: Batch, ran: Batch, reported: Mapping[str, Tensor], gather: Any) -> None:
        if "position_ids" in ran and "position_ids" not in batch:  # its rows were made one
            reported = {
                name: in_rows(value, batch["attention_mask"]) for name, value in reported.items()
            }
            ran = {
                name: batch.get(name, value)
                for name, value in ran.items()
                if name != "position_ids"
            }
        inputs = dict(ran)
        # not padded
        inputs.update(
            {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
        )
        loss: Any = self.own_loss  # always a `LossOfTrl`
        loss.count(inputs, reported, gather)

    def _share_metrics(self) -> None:
        """Give every rank the metrics that ranks of the last stage counted.

        In training, replicas have gathered them; in an evaluation, each has those of its batches.
        Collective, except in training with one stage.
        """
        mode = "train" if self.model.training else "eval"
        if (
            self._engine is None
            or self.mesh.control is None
            or (mode == "train" and self.mesh.pp is None)
        ):
            return
        attend("log", self.mesh.control)
        replicas = range(1 if mode == "train" else self.mesh.grid.dp)
        reports = gather_json(
            [dict(self._metrics[mode]), self._total_train_tokens], self.mesh.control, "cpu"
        )
        merged: dict[str, list] = defaultdict(list)
        for replica in replicas:
            metrics, self._total_train_tokens = reports[self.engine.output_rank(replica)]
            for name, values in metrics.items():
                merged[name] += values
        self._metrics[mode] = merged

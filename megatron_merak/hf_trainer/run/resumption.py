"""Differences between a checkpoint's run and the one that resumes it: another model is an error,
others are reported.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

from ...checkpoint.directory import Iterations, read_manifest
from ...errors import CheckpointError
from ...parallel.agree import together
from ...stages.model_config import config_of, differences
from ..batches import fingerprint
from .progress import RunPosition, model_of

# Arguments that make a resumed run another one; transformers.Trainer goes on without a word about
# most of them.
SAID = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "max_steps",
    "num_train_epochs",
    "weight_decay",
    "optim",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bf16",
    "fp16",
    "fp8",
    "fp8_recipe",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "fp32_matmul_precision",
    "compile_pointwise",
    "grad_reduce_in_bf16",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "dataloader_drop_last",
    "train_sampling_strategy",
    "label_names",
)
# what the run goes on with, as transformers' optimizer state does
OF_CHECKPOINT = ("learning_rate", "weight_decay")


def describe(model: nn.Module) -> dict:
    """Return class and configuration of a model; the latter is None if it is not from
    transformers.
    """
    return {"class": type(model).__name__, "config": config_of(model)}


def check_model(saved: Mapping, present: Mapping) -> list[str]:
    """Return sentences on differences that do not change what the model computes. Raises
    CheckpointError for those that do.

    saved, present: results of ``describe``.
    """
    notes = []
    if saved["class"] != present["class"]:
        notes.append(f"model: {present['class']} != {saved['class']} (of the checkpoint)")
    others, choices = differences(present["config"], saved["config"], causal=False)
    if others:
        reason = f"the checkpoint's model has {others[0].saved}"
        remedy = (
            "Give that model, or start a new run from the checkpoint's weights: "
            "from_pretrained(directory)"
        )
        raise CheckpointError(f"config.{others[0].name}", others[0].now, reason, remedy)
    notes += [
        f"config.{each.name}: {each.now} != {each.saved} (of the checkpoint)" for each in choices
    ]
    return notes


@dataclass(frozen=True)
class RunIdentity:
    """What a run trains, and on what; that of a checkpoint is compared with it.

    seeds:        of the arguments: seed and data_seed.
    global_batch: samples of a step.
    dataset:      its fingerprint.
    model:        class and configuration.
    """

    seeds: list
    global_batch: int
    dataset: dict
    model: dict

    def compare(self, saved: RunPosition, other_data: bool) -> list[str]:
        """Return sentences on differences that a run may go on with. Raises CheckpointError for
        another model, dataset or seed.

        other_data: whether the dataset may be another one.
        """
        if saved.seeds != self.seeds:
            remedy = (
                "Give the seed and the data_seed of the checkpoint's run, or start a new "
                "run from its weights"
            )
            raise CheckpointError(
                "seed, data_seed", self.seeds, f"the checkpoint's run has {saved.seeds}", remedy
            )
        notes = check_model(saved.model, self.model)
        if reason := fingerprint.difference(saved.dataset, self.dataset):
            if not other_data:
                remedy = (
                    "Pass the dataset of that run, or set ignore_data_skip=True to start an "
                    "epoch of this one"
                )
                raise CheckpointError(
                    "train_dataset", f"(length {self.dataset['length']})", reason, remedy
                )
            notes.append(f"train_dataset: {reason}")
        if saved.global_batch != self.global_batch:
            notes.append(
                f"samples of a step: {self.global_batch} != {saved.global_batch} (of the "
                "checkpoint)"
            )
        return notes


def check_before_capture(
    directory: Path, model: nn.Module, group: dist.ProcessGroup | None
) -> None:
    """Raise CheckpointError, on every rank, if a checkpoint is of another model than the one that
    is to be captured. Collective.

    directory: the training state; what cannot be read in it is told by what loads it.
    """
    with together(group, "cpu"):
        if group is None or dist.get_rank(group) == 0:
            newest = next(Iterations(directory).newest_first(), None)
            extra = None if newest is None else read_manifest(newest)[1].meta.get("extra")
            saved = model_of(extra)
            if saved is not None:
                check_model(saved, describe(model))


def argument_changes(directory: Path, arguments: Mapping) -> list[str]:
    """Return sentences on arguments that differ from those of the run that saved a checkpoint, if
    it has them.
    """
    try:
        saved = json.loads((directory / "training_args.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(saved, dict):
        return []
    present = json.loads(json.dumps({name: arguments.get(name) for name in SAID}, default=str))
    changed = [name for name in SAID if name in saved and saved[name] != present[name]]
    theirs = [name in OF_CHECKPOINT for name in changed]
    return [
        f"{name}: {present[name]} (from args{'' if from_checkpoint else ', used'}) != "
        f"{saved[name]} (of the checkpoint{', used' if from_checkpoint else ''})"
        for name, from_checkpoint in zip(changed, theirs, strict=True)
    ]


def say(directory: Path, notes: list[str]) -> None:
    """Print one warning with all sentences."""
    if notes:
        text = "\n\t".join(notes)
        logging.getLogger(__name__).warning("Resuming from %s with changes:\n\t%s", directory, text)

"""Differences between a checkpoint's run and the one that resumes it: another model is an error,
others are reported.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ...checkpoint.directory import Iterations, read_manifest
from ...errors import CheckpointError
from ...parallel.agree import together
from .progress import as_json, model_of

# Arguments that make a resumed run another one; transformers.Trainer goes on without a word about
# most of them.
SAID = (
    *(
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "max_steps",
        "num_train_epochs",
    ),
    *(
        "weight_decay",
        "optim",
        "optim_args",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "fp16",
    ),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "dataloader_drop_last"),
    *("train_sampling_strategy", "label_names"),
)
# what the run goes on with, as transformers' optimizer state does
OF_CHECKPOINT = ("learning_rate", "weight_decay")
# Entries of a model's configuration that say nothing of what it computes, ...
IGNORED = (
    *(
        "transformers_version",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "architectures",
        "dtype",
    ),
    *("torch_dtype", "tokenizer_class", "id2label", "label2id"),
)
# ... or are choices
SOFT = tuple("drop initializer init_std use_cache attn_implementation checkpointing".split())


def describe(model: nn.Module) -> dict:
    """Return class and configuration of a model; the latter is None if it is not from
    transformers.
    """
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else "null"
    return {"class": type(model).__name__, "config": as_json(text)}


def check_model(saved: Mapping, present: Mapping) -> list[str]:
    """Return sentences on differences that do not change what the model computes. Raises
    CheckpointError for those that do.

    saved, present: results of ``describe``.
    """
    notes = []
    if saved["class"] != present["class"]:
        notes.append(f"model: {present['class']} != {saved['class']} (of the checkpoint)")
    if saved["config"] is None or present["config"] is None:
        return notes
    there = dict(_flat(saved["config"]))
    here = dict(_flat(present["config"]))
    same_version = there.get("transformers_version") == here.get("transformers_version")
    for name in sorted({*there, *here}):
        last = name.rpartition(".")[2]
        if any(part in IGNORED for part in name.split(".")) or there.get(name) == here.get(name):
            continue
        if any(soft in last for soft in SOFT) or not (
            same_version or name in there and name in here
        ):
            notes.append(
                f"config.{name}: {here.get(name)} != {there.get(name)} (of the checkpoint)"
            )
            continue
        reason = f"the checkpoint's model has {there.get(name)}"
        remedy = (
            "Give that model, or start a new run from the checkpoint's weights: "
            "from_pretrained(directory)"
        )
        raise CheckpointError(f"config.{name}", here.get(name), reason, remedy)
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


def _flat(config: Mapping, before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value

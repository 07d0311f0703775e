"""A training run's directory, as ``transformers.Trainer`` lays it out, with this library's training state inside.

    output_dir/checkpoint-500/    config.json, model.safetensors, tokenizer files: from_pretrained() opens it
                                  training_state/       parameters, moments, schedule; for any layout of ranks
                                  trainer_state.json    written last: what lacks it is not a checkpoint

Every function is collective over ``group``; what fails on one rank raises on all.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import torch.distributed as dist
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints

from ..checkpoint.files import disk_errors
from ..data.files import atomic_writer
from ..errors import CheckpointError
from ..parallel.agree import broadcast_json, together

TRAINING_STATE, TRAINER_STATE = "training_state", "trainer_state.json"
SAVE_REMEDY = "Check output_dir, its permissions and its free space; earlier checkpoints are untouched"
Group = dist.ProcessGroup | None


def _is_first(group: Group) -> bool:
    return group is None or dist.get_rank(group) == 0


def checkpoint_directory(output_dir: str, step: int) -> Path:
    return Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def find(output_dir: str, asked: str | bool, group: Group) -> Path:
    """The checkpoint to resume from: the one asked for, or the newest complete one. Raises CheckpointError."""
    found = None
    with together(group, "cpu"):
        if _is_first(group):
            found = str(_find(Path(output_dir), asked))
    return Path(broadcast_json(found, group, "cpu"))


def _find(output_dir: Path, asked: str | bool) -> Path:
    candidates = sort_checkpoints(str(output_dir))[::-1] if asked is True else [asked]
    for candidate in map(Path, candidates):
        if (candidate / TRAINER_STATE).is_file():
            if not (candidate / TRAINING_STATE).is_dir():
                reason = "it holds a model but no training state of this library"
                remedy = "Start a new run from its weights: megatron_merak.from_pretrained(directory)"
                raise CheckpointError("resume_from_checkpoint", candidate, reason, remedy)
            return candidate
    where = output_dir if asked is True else asked
    remedy = "Name a complete checkpoint-N directory, or train without resuming"
    raise CheckpointError("resume_from_checkpoint", where, "there is no complete checkpoint", remedy)


def read_state(directory: Path, group: Group) -> TrainerState:
    """The trainer's state in a checkpoint. Raises CheckpointError when it cannot be read."""
    text = None
    with together(group, "cpu"):
        if _is_first(group):
            path = directory / TRAINER_STATE
            try:
                text = path.read_text(encoding="utf-8")
                TrainerState(**json.loads(text))
            except (OSError, ValueError, TypeError) as error:
                raise CheckpointError("trainer state", path, str(error), "Resume from another checkpoint") from error
    return TrainerState(**json.loads(broadcast_json(text, group, "cpu")))


def write_text(directory: Path, name: str, text: str, group: Group) -> None:
    """The first rank writes a file that is whole or absent."""
    with together(group, "cpu"), disk_errors(directory, SAVE_REMEDY):
        if _is_first(group):
            directory.mkdir(parents=True, exist_ok=True)
            with atomic_writer(directory / name) as file:
                file.write(text.encode())


def prepare(directory: Path, group: Group) -> None:
    """Make the directory, and no checkpoint of it before its trainer state is written again."""
    with together(group, "cpu"), disk_errors(directory, SAVE_REMEDY):
        if _is_first(group):
            directory.mkdir(parents=True, exist_ok=True)
            (directory / TRAINER_STATE).unlink(missing_ok=True)


def rotate(output_dir: str, limit: int | None, best: str | None, group: Group) -> None:
    """Remove the oldest checkpoints beyond ``limit``, never the newest nor the best one."""
    with together(group, "cpu"):
        if _is_first(group):
            rotate_checkpoints(output_dir, limit, best)


def remove_others(output_dir: str, best: str, group: Group) -> None:
    """Keep the best checkpoint only."""
    with together(group, "cpu"):
        if _is_first(group):
            for path in sort_checkpoints(output_dir):
                if Path(path).resolve() != Path(best).resolve():
                    shutil.rmtree(path)


def write_state(directory: Path, state: TrainerState, group: Group) -> None:
    """The file that makes the directory a checkpoint."""
    text = json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True) + "\n"
    write_text(directory, TRAINER_STATE, text, group)

"""Whose checkpoints a directory has, if they are another program's.

DIR/iter_N/metadata.json, mp_rank_*/model_optim_rng.pt    Megatron-LM: distributed, and a file for each rank
DIR/.metadata                                             torch.distributed.checkpoint
"""

from pathlib import Path

from megatron_merak.errors import CheckpointError

# of Megatron-LM
FORMAT = "metadata.json"
RANKS = "mp_rank_*"
RANK_FILE = "model_optim_rng.pt"
RELEASE = "release"
# of torch.distributed.checkpoint
METADATA = ".metadata"
MODEL_DIRECTORY = "pytorch_model_fsdp_0"


def is_megatron(directory: Path) -> bool:
    """Whether a directory has checkpoints of Megatron-LM in either format, or is one."""
    files = (FORMAT, f"{RANKS}/{RANK_FILE}")
    places = ("", "iter_*/", f"{RELEASE}/")
    return any(any(directory.glob(place + file)) for place in places for file in files)


def is_dcp(directory: Path) -> bool:
    """Whether a directory is a store, or has those of accelerate or of a run of torchtitan."""
    places = ("", f"{MODEL_DIRECTORY}/", "step-*/")
    return any(any(directory.glob(place + METADATA)) for place in places)


def foreign(directory: Path, what: str) -> CheckpointError | None:
    """Return the error of a directory that has another program's checkpoints; None if it has none.

    what: the flag or argument that names it.
    """
    if is_megatron(directory):
        program = "Megatron-LM"
    elif is_dcp(directory):
        program = "torch.distributed.checkpoint"
    else:
        return None
    reason = f"it has checkpoints of {program}"
    return CheckpointError(what, directory, reason, "Convert them with merak-convert first")

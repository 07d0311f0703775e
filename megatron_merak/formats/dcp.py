"""Training states in stores of torch.distributed.checkpoint: FSDP2, accelerate, torchtitan.

    read_dcp(directory, config, allow_pickle)     -> PortableState, read tensor by tensor later
    write_dcp_state(state, directory, flavour)    DIR/.metadata, __0_N.distcp, config.json

    plain          {"model": get_model_state_dict(...), "optim": get_optimizer_state_dict(...)}, whose
                   parameter groups are there both nested and flattened
    accelerate     DIR/pytorch_model_fsdp_0 and DIR/optimizer_0, as Accelerator.save_state does
    torchtitan     step-N of torchtitan, for the models that it shares with transformers

Whatever dtype moments are stored in, they are read as fp32. Functions are local to one process, which
needs memory for one tensor, or one chunk, at a time.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ..checkpoint import in_place
from ..checkpoint.files import disk_errors
from ..checkpoint.foreign import METADATA, MODEL_DIRECTORY
from ..checkpoint.hf_build import CONFIG, build_empty
from ..checkpoint.hf_files import read_json
from ..errors import CheckpointError, ConfigError
from .dcp_files import SUFFIX, write_dcp
from .dcp_names import OPTIMIZER_DIRECTORY, TORCHTITAN
from .dcp_reading import DcpReading, DcpSource, DcpStores
from .dcp_writing import ACCELERATE, FLAVOURS, PLAIN, DcpWriting
from .state import PortableState

__all__ = [
    "ACCELERATE",
    "FLAVOURS",
    "PLAIN",
    "TORCHTITAN",
    "DcpSource",
    "read_dcp",
    "write_dcp_state",
]

_CHUNK = 1 << 30  # bytes of a chunk that is written, if rows of it are not more
_REMEDY = "Check the output directory, its permissions and its free space"
_OURS = re.compile(r"__\d+_\d+" + re.escape(SUFFIX))


def read_dcp(
    directory: Path,
    config: Path | None = None,
    allow_pickle: bool = False,
    say: Callable[[str], object] | None = None,
    optimizer: bool = True,
) -> PortableState:
    """Return the state in a store, or in the two directories that accelerate writes.

    directory:    with `.metadata`, or with ``pytorch_model_fsdp_0`` and perhaps ``optimizer_0``, or
                  that of these which has the weights.
    config:       the model's config.json, or the directory that has it; by default that of
                  ``directory``.
    allow_pickle: whether pickles may be read, restricted to what stores need.
    say:          called with a line on what was recognised.
    optimizer:    whether to read the optimizer's state, if there is any.

    Tensors are checked by name, shape and dtype, and are read later. Raises CheckpointError, also
    for a store without a config, and for tensors that the model does not have, has in another
    shape, or would lack.
    """
    files = DcpStores(directory, allow_pickle)
    text = _config_file(directory, config)
    floating = (tensor.dtype for tensor in files.tensors.values())
    stored_as = next((dtype for dtype in floating if dtype.is_floating_point), None)
    model = build_empty(text, None, False, {}, stored_as=stored_as)
    tell = say or (lambda line: None)
    return DcpReading(files, model).state(read_json(text), tell, optimizer)


def write_dcp_state(
    state: PortableState, directory: Path, flavour: str = PLAIN, chunk_bytes: int = _CHUNK
) -> None:
    """Write a state as a store of one of the `FLAVOURS`, with the model's config.json beside it.

    directory:   another store in it is replaced once the new one is complete; other files stay.
    chunk_bytes: the most of a tensor that is in memory at once, if its rows are divisible.

    fp32 master weights are written in place of the weights that were rounded from them, as FSDP2
    trains them. Where the state does not say the parameter groups, they are one with the defaults
    of torch's AdamW. Raises CheckpointError, and ConfigError for a model that torchtitan does not
    have.
    """
    if flavour not in FLAVOURS:
        raise ConfigError("flavour", flavour, "it is not known", f"Use {', '.join(FLAVOURS)}")
    with tempfile.TemporaryDirectory() as place:
        text = json.dumps(dict(state.config), indent=2, sort_keys=True) + "\n"
        (Path(place) / CONFIG).write_text(text, encoding="utf-8")
        model = build_empty(Path(place), None, False, {}, stored_as=torch.float32)
    contents = DcpWriting(state, model, flavour, chunk_bytes).contents()
    with disk_errors(directory, _REMEDY), in_place.replacing(directory, _replaced) as fresh:
        for folder, each in contents.items():
            write_dcp(
                fresh / folder,
                each.tensors,
                each.values,
                each.objects,
                aliases=each.aliases,
                paths=each.paths,
            )
        (fresh / CONFIG).write_text(text, encoding="utf-8")


def _config_file(directory: Path, config: Path | None) -> Path:
    beside = directory.parent if directory.name == MODEL_DIRECTORY else directory
    path = beside if config is None else config
    path = path if path.is_file() else path / CONFIG
    if not path.is_file():
        where = "the store" if config is None else os.fspath(config)
        remedy = "Give the directory of the model's config.json with --config DIR"
        raise CheckpointError("store", os.fspath(directory), f"{where} has no {CONFIG}", remedy)
    return path


def _replaced(directory: Path) -> list[str]:
    """Return the files of an earlier store in a directory."""
    found = []
    for folder in ("", MODEL_DIRECTORY, OPTIMIZER_DIRECTORY):
        if (directory / folder).is_dir():
            names = os.listdir(directory / folder)
            kept = (name for name in names if name == METADATA or _OURS.fullmatch(name))
            found += [(Path(folder) / name).as_posix() for name in kept]
    return found

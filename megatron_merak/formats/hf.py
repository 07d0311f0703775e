"""Model directories of transformers as states: weights, without optimizer state."""

import json
import re
from pathlib import Path
from typing import Any

from ..checkpoint import hf_names
from ..checkpoint.convert import to_hf
from ..checkpoint.hf import from_pretrained
from ..errors import CheckpointError
from .model import empty_model
from .state import WEIGHTS, PortableState

_REMEDY = "Give a directory with model.safetensors; weights are drawn without a checkpoint"


def read_hf(directory: Path, allow_pickle: bool = False) -> PortableState:
    """Return the weights of a directory, under the names of its model. Raises CheckpointError.

    allow_pickle: whether pytorch_model.bin may be read.
    """
    from transformers import AutoModelForCausalLM

    model: Any = from_pretrained(
        directory, auto_class=AutoModelForCausalLM, allow_pickle=allow_pickle
    )
    if model.merak_source is None:
        raise CheckpointError("model directory", directory, "it has no weights", _REMEDY)
    config = json.loads(model.config.to_json_string(use_diff=False))
    # that of a directory may be the model's without its head
    config["architectures"] = [type(model).__name__]
    return PortableState({WEIGHTS: model.merak_source}, config)


def write_hf(
    state: PortableState, directory: Path, tokenizer: Any = None, shard_size: str = "5GB"
) -> list[str]:
    """Write a directory that ``from_pretrained`` opens; return the names of buffers that the state
    lacks, which have their first values there.

    tokenizer:  saved beside the weights if given.
    shard_size: the most bytes of one weight file.

    Raises CheckpointError.
    """
    source = state.kinds[WEIGHTS]
    special = {
        name: getattr(tokenizer, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if tokenizer is not None
    }
    model = empty_model({**state.config, **special}, next(iter(source.dtypes())))
    to_hf(source, model, directory, tokenizer, shard_size=shard_size)
    known = {*source.names()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [name for name in hf_names.expected(model) if name not in known | parameters.keys()]


def is_hf(directory: Path) -> bool:
    """Whether a directory is one of transformers: with a config and weights, or nothing of others."""
    return (directory / "config.json").is_file() and not any(
        re.fullmatch(r"\.metadata|metadata\.json", path.name) for path in directory.iterdir()
    )

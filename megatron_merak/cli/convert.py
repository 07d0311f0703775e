"""Convert weights between checkpoints of this library and HuggingFace model directories.

    merak-convert CHECKPOINT HF_DIRECTORY     of merak-pretrain or merak-pretrain-hf: a --save directory (its newest
                                              checkpoint) or an iter_N directory; opens with from_pretrained()
    merak-convert HF_DIRECTORY CHECKPOINT     for merak-pretrain --load CHECKPOINT --finetune; prints the model's flags

A checkpoint is converted whatever layout saved it, with every byte compared with its digest. GPTs of merak-pretrain
become GPT-2, Llama, Qwen2, Qwen3, StableLM or Starcoder2, whichever computes the same; a shape that none of them has is
an error. TO must be empty or absent, or hold a conversion that was killed, which is started again with the same
command. With --overwrite an earlier conversion in TO is replaced once the new one is complete, and other files stay.
Needs neither a GPU nor the memory of the model, and no network. Optimizer state is not converted.
merak-pretrain-hf --model reads HuggingFace directories as they are.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError, MerakError
from .door import command
from .words import described, error_text

# Keys of a config.json without influence on what a model computes in training without dropout.
_FREE = frozenset(
    """transformers_version _name_or_path architectures dtype torch_dtype use_cache initializer_range pretraining_tp
    max_window_layers bos_token_id eos_token_id pad_token_id attn_pdrop resid_pdrop embd_pdrop attention_dropout
    hidden_dropout residual_dropout embedding_dropout reorder_and_upcast_attn n_ctx""".split()
)
_SIZE = re.compile(r"[1-9]\d*([KMGT]I?B)?", re.IGNORECASE)
_DROPOUTS = (  # settings of --hidden-dropout, which is one here
    ("resid_pdrop", "embd_pdrop"),
    ("residual_dropout", "embedding_dropout"),
)
_ATTENTION = "attention_dropout"
_SHARDS = "5GB"
_NAMED = 3  # of what a target holds
_BESIDE = (
    "summary_",
    "task_specific_params",
    "tokenizer_class",
    "id2label",
    "label2id",
    "chunk_size_feed_forward",
)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=described(__doc__, "merak-convert"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", type=Path, metavar="FROM", help="a checkpoint, or a HuggingFace directory"
    )
    parser.add_argument("target", type=Path, metavar="TO", help="the directory to write")
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="the checkpoint to convert [the newest]"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="save this tokenizer beside the weights [none]",
    )
    parser.add_argument(
        "--max-shard-size", default=_SHARDS, metavar="SIZE", help=f"largest weight file [{_SHARDS}]"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion in TO [no]"
    )
    options = parser.parse_args(arguments)
    try:
        if not _SIZE.fullmatch(options.max_shard_size):
            raise ConfigError(
                "--max-shard-size",
                options.max_shard_size,
                "is not a size",
                "Give one such as 5GB or 500MB",
            )
        from_hf = (options.source / "config.json").is_file()
        _check_target(options.source, options.target, from_hf)
        if not options.overwrite:
            _check_empty(options.target)
        if from_hf:
            _to_checkpoint(options)
        else:
            _to_hf(options)
    except MerakError as error:
        sys.stderr.write(error_text(error) + "\n")
        return 1
    return 0


def _check_target(source: Path, target: Path, to_checkpoint: bool) -> None:
    """Raise ConfigError for a target in which the result would be mistaken for something else."""
    one = source.resolve()
    other = target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConfigError(
            "TO", target, f"it is {source}, or one is inside the other", "Name another directory"
        )
    if any(target.glob("iter_*")) and not (to_checkpoint and _is_of_conversions(target)):
        reason = "it holds checkpoints, of which a run would load the newest"
        raise ConfigError("TO", target, reason, "Name an empty directory")


def _check_empty(target: Path) -> None:
    """Raise ConfigError for a target that holds anything but a conversion that was killed."""
    from ..checkpoint.begun import held, is_begun

    if target.exists() and not target.is_dir():
        raise ConfigError("TO", target, "it is not a directory", "Name another one")
    names = held(target)
    if names and not is_begun(target):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        reason = f"it is not empty: it holds {', '.join(names[:_NAMED])}{more}"
        remedy = "Name another directory, or replace what it holds with --overwrite"
        raise ConfigError("TO", target, reason, remedy)


def _is_of_conversions(target: Path) -> bool:
    """Whether the only checkpoint in a directory is that of an earlier conversion, which may have
    been killed.
    """
    from ..checkpoint.directory import Iterations, iteration_of, read_manifest

    if any(iteration_of(path) != 0 for path in target.glob("iter_*")):
        return False
    complete = Iterations(target).newest_first()
    settings = [read_manifest(path)[1].meta.get("config") for path in complete]
    # a run has some
    return all(isinstance(each, dict) and each.get("train") == {} for each in settings)


def _to_hf(options: argparse.Namespace) -> None:
    from ..checkpoint.begun import marked
    from ..checkpoint.convert import to_hf
    from ..checkpoint.hf_build import build_empty
    from ..checkpoint.stored import StoredSource, chosen

    directory = chosen(options.source, options.ckpt_step)
    config, renamed = _config_of(directory)
    tokenizer = None if options.tokenizer is None else _tokenizer(options.tokenizer)
    source = StoredSource(directory, lambda name: _replace(name, renamed))
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config | _special(tokenizer)))
        stored_dtype = next(iter(source.dtypes()))
        model = build_empty(Path(place), None, False, {"dtype": stored_dtype})
    with marked(options.target):
        to_hf(source, model, options.target, tokenizer, shard_size=options.max_shard_size)
    print(
        f"{directory} -> {options.target}: {type(model).__name__}, {_count(source)} weights, "
        f"{str(stored_dtype)[6:]}"
    )


def _config_of(directory: Path) -> tuple[dict[str, Any], Sequence[tuple[str, str]]]:
    """Return the config.json of a checkpoint's model, and the (old, new) parts of tensor names that
    differ in it.
    """
    from ..checkpoint.directory import read_manifest
    from ..models.hf_config import RENAMED, hf_config
    from ..stages.saved_run import SavedRun

    saved = SavedRun.read(read_manifest(directory)[1].meta, directory)
    if "model" in saved.config["model"]:
        if saved.model is None:
            remedy = (
                "Resume it with merak-pretrain-hf --load, --train-iters at its iteration, "
                "and --save-hf"
            )
            raise CheckpointError(
                "checkpoint", directory, "it does not hold the config.json of its model", remedy
            )
        return dict(saved.model), ()
    native = _native(saved.config["model"])
    try:
        config = hf_config(native)
    except ConfigError as error:
        error.add_note(f"The checkpoint is {directory}.")
        raise
    if native.hidden_dropout and not any(
        "dropout" in key or "pdrop" in key for key in config.keys() - {_ATTENTION}
    ):
        text = (
            f"--hidden-dropout {native.hidden_dropout} has no counterpart in {config['model_type']}"
        )
        print(f"{text}: further training of it by transformers has none.")
    return config, RENAMED.get(config["model_type"], ())


def _native(settings: Mapping[str, Any]) -> Any:
    """Return the ModelConfig of settings that another version may have saved."""
    import dataclasses

    from ..config import ModelConfig

    known = {field.name for field in dataclasses.fields(ModelConfig)}
    return ModelConfig.from_dict({name: value for name, value in settings.items() if name in known})


def _special(tokenizer: Any) -> dict[str, Any]:
    """Return the special tokens of a tokenizer as entries of a config.json."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {} if tokenizer is None else {name: getattr(tokenizer, name) for name in names}


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        reason = f"it holds no tokenizer ({str(error).splitlines()[0]:.200})"
        raise ConfigError(
            "--tokenizer", directory, reason, "Give a directory with tokenizer files"
        ) from error


def _to_checkpoint(options: argparse.Namespace) -> None:
    beside = (("--ckpt-step", None), ("--tokenizer", None), ("--max-shard-size", _SHARDS))
    for flag, default in beside:
        value = getattr(options, flag[2:].replace("-", "_"))
        if value != default:
            raise ConfigError(
                flag, value, f"{options.source} is a HuggingFace directory", "Leave it out"
            )
    from transformers import AutoModelForCausalLM

    from ..checkpoint.begun import marked
    from ..checkpoint.convert import to_checkpoint
    from ..checkpoint.hf import from_pretrained
    from ..models.hf_config import RENAMED
    from ..models.names import tensor_table

    model: Any = from_pretrained(options.source, auto_class=AutoModelForCausalLM)
    if model.merak_source is None:
        remedy = (
            "Give a directory with model.safetensors; merak-pretrain draws weights without "
            "a checkpoint"
        )
        raise CheckpointError("model directory", options.source, "it has no weights", remedy)
    native = _settings(model, options.source)
    renamed = [(theirs, ours) for ours, theirs in RENAMED.get(model.config.model_type, ())]
    ours = {tensor.name for tensor in tensor_table(native, 1)}
    names = {name: _replace(name, renamed) for name in model.merak_source.names()}
    names = {name: own for name, own in names.items() if own in ours}
    assert set(names.values()) == ours, ours - set(names.values())
    sections = {"model": _plain(native), "train": {}, "optimizer": {}, "data": {}}
    meta = {
        "consumed_samples": 0,
        "optimizer_steps": 0,
        "config": sections,
        "data": None,
        "model": None,
    }
    with marked(options.target):
        path = to_checkpoint(model.merak_source, names, options.target, meta)
    print(f"{options.source} -> {path}: {_count(model.merak_source, names)} weights")
    print(f"merak-pretrain --load {options.target} --finetune {_flags(native)} ...")


def _settings(model: Any, directory: Path) -> Any:
    """Return the ModelConfig of a HuggingFace model. Raises ConfigError for what the native model
    does not have.
    """
    from ..models.hf_config import hf_config, settings_of

    theirs = json.loads(model.config.to_json_string(use_diff=False))
    native = _native(settings_of(theirs))
    for one, other in _DROPOUTS:
        if one in theirs and theirs[one] != theirs.get(other, theirs[one]):
            print(
                f"config.json {other} {theirs[other]}: --hidden-dropout is one value, that of {one}"
            )
    ours = json.loads(type(model.config)(**hf_config(native)).to_json_string(use_diff=False))
    if theirs["model_type"] == "gpt2":
        theirs["n_inner"] = theirs["n_inner"] or 4 * theirs["n_embd"]
    for key in sorted(theirs.keys() & ours.keys() - _FREE):
        if _same(theirs[key]) != _same(ours[key]) and not key.startswith(_BESIDE):
            remedy = "Train it with merak-pretrain-hf, which runs the model's own code"
            reason = f"{directory}: the native GPT has {ours[key]}"
            raise ConfigError(f"config.json {key}", theirs[key], reason, remedy)
    return native


def _same(value: Any) -> Any:
    """A value of a config.json without the former name of one of its entries."""
    return (
        {name: each for name, each in value.items() if name != "type"}
        if isinstance(value, dict)
        else value
    )


def _plain(native: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(native)


def _flags(native: Any) -> str:
    """Return the flags of a model, as a command line; those at their defaults are left out."""
    from ..arguments import flags

    words = []
    for flag in flags():
        if flag.section == "model":
            value = getattr(native, flag.field)
            if value != flag.default:
                words += [flag.name] if value is True else [flag.name, str(value)]
    return " ".join(words)


def _replace(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def _count(source: Any, names: Mapping[str, str] | None = None) -> str:
    import math

    return f"{sum(math.prod(source.shape(name)) for name in names or source.names()):,}"

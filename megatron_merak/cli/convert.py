"""Convert checkpoints: between this library, HuggingFace, Megatron-LM and torch.distributed.checkpoint.

    merak-convert CHECKPOINT HF_DIRECTORY               of merak-pretrain or merak-pretrain-hf: a --save directory (its
                                                        newest checkpoint) or an iter_N directory; opens with
                                                        from_pretrained()
    merak-convert HF_DIRECTORY CHECKPOINT               for --load CHECKPOINT --finetune; prints the command
    merak-convert MEGATRON CHECKPOINT --config HF --allow-pickle    from Megatron-LM (torch_dist, or torch)
    merak-convert CHECKPOINT MEGATRON --to megatron                 to Megatron-LM, for any layout
    merak-convert CHECKPOINT MEGATRON --to megatron-legacy          to Megatron-LM (torch), for some ranks
    merak-convert FSDP CHECKPOINT --config HF --allow-pickle        from FSDP2, accelerate or torchtitan
    merak-convert CHECKPOINT STORE --to dcp                         to torch.distributed.checkpoint
    merak-convert MODEL TO --adapter LORA               with a LoRA adapter of peft merged into the weights

Every format goes to every other. Weights and AdamW's state are converted, whatever layout saved them; HuggingFace
directories and Megatron-LM's files for each rank have weights only here. What a directory is, is seen from its files.
TO must be empty or absent, or hold a conversion that was killed, which is started again with the same command. With
--overwrite an earlier conversion in TO is replaced once the new one is complete, and other files stay. Needs neither a
GPU nor the memory of the model, and no network. Flags of Megatron-LM's converter are understood: --loader, --saver,
--load-dir, --save-dir, --saver-transformer-impl, --target-tensor-parallel-size and the other degrees.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigError, MerakError
from .door import command
from .words import described, error_text

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..formats.state import PortableState

FORMATS = ("merak", "hf", "megatron", "megatron-legacy", "dcp")

_SIZE = re.compile(r"[1-9]\d*([KMGT]I?B)?", re.IGNORECASE)
_SHARDS = "5GB"
_NAMED = 3  # of what a target holds
_IMPLEMENTATIONS = ("transformer_engine", "local")
_RANKS = (
    "--target-tensor-parallel-size",
    "--target-pipeline-parallel-size",
    "--target-expert-parallel-size",
)
# of Megatron-LM's converter
_THEIRS = {
    "mcore": "megatron",
    "core": "megatron",
    "megatron": "megatron",
    "llama_mistral": "hf",
    "mixtral_hf": "hf",
    "hf": "hf",
    "merak": "merak",
    "dcp": "dcp",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        _understand(options)
        _check_target(options.source, options.target, options.to)
        if not options.overwrite:
            _check_empty(options.target)
        _convert(options)
    except MerakError as error:
        sys.stderr.write(error_text(error) + "\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=described(__doc__, "merak-convert"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        type=Path,
        nargs="?",
        metavar="FROM",
        help="a checkpoint, or a HuggingFace directory",
    )
    parser.add_argument("target", type=Path, nargs="?", metavar="TO", help="the directory to write")
    parser.add_argument(
        "--from", dest="format", choices=FORMATS, help="what FROM is [seen from its files]"
    )
    parser.add_argument(
        "--to",
        choices=FORMATS,
        help="what TO will be [hf from a checkpoint of this library and with --adapter, else merak]",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="HF",
        help="config.json of the model, where FROM has none: a file, or a directory with it",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read files that are pickles, as those of torch and Megatron-LM are; only tensors and "
        "plain settings are unpickled [no]",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="merge this LoRA adapter, as peft saves it, into the weights; without optimizer state "
        "[none]",
    )
    parser.add_argument(
        "--no-load-optim", action="store_true", help="leave out the optimizer's state [no]"
    )
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="the checkpoint to convert [the newest]"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="save this tokenizer beside the weights of a HuggingFace directory [none]",
    )
    parser.add_argument(
        "--max-shard-size",
        default=_SHARDS,
        metavar="SIZE",
        help=f"largest weight file of a HuggingFace directory [{_SHARDS}]",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="rows of the vocabulary are padded to a multiple of it for Megatron-LM [128]",
    )
    parser.add_argument(
        "--target-tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks of megatron-legacy; those that the padded rows must be divisible "
        "by of megatron, which any others load too [1]",
    )
    for axis in ("pipeline", "expert"):
        parser.add_argument(
            f"--target-{axis}-parallel-size",
            type=int,
            default=1,
            metavar="N",
            help=f"{axis}-parallel ranks of megatron-legacy; megatron is for any [1]",
        )
    parser.add_argument(
        "--saver-transformer-impl",
        choices=_IMPLEMENTATIONS,
        default=_IMPLEMENTATIONS[0],
        help="--transformer-impl of the run that is to load megatron-legacy, by which norms are "
        f"called; megatron is for either [{_IMPLEMENTATIONS[0]}]",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion in TO [no]"
    )
    for name, kind in (
        ("--load-dir", Path),
        ("--save-dir", Path),
        ("--loader", str),
        ("--saver", str),
    ):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--model-type", help=argparse.SUPPRESS)
    return parser


def _understand(options: argparse.Namespace) -> None:
    """Complete the options: directories, and formats. Raises ConfigError."""
    options.source = options.source or options.load_dir
    options.target = options.target or options.save_dir
    for name, value in (("FROM", options.source), ("TO", options.target)):
        if value is None:
            raise ConfigError(name, "(missing)", "is needed", "Name the two directories")
    for flag, field, value in (
        ("--loader", "format", options.loader),
        ("--saver", "to", options.saver),
    ):
        if value is not None and value not in _THEIRS:
            known = ", ".join(sorted({*_THEIRS}))
            raise ConfigError(flag, value, "is not known", f"Use one of {known}")
        if value is not None and getattr(options, field) is None:
            setattr(options, field, _THEIRS[value])
    if not _SIZE.fullmatch(options.max_shard_size):
        raise ConfigError(
            "--max-shard-size",
            options.max_shard_size,
            "is not a size",
            "Give one such as 5GB or 500MB",
        )
    for flag in ("--make-vocab-size-divisible-by", *_RANKS):
        value = getattr(options, flag[2:].replace("-", "_"))
        if value < 1:
            raise ConfigError(flag, value, "is not positive", "Give 1 or more")
    # their loader takes both formats of theirs
    if options.format is None or (options.loader and options.format == "megatron"):
        found = _format_of(options.source, options.ckpt_step)
        if options.format is None or found == "megatron-legacy":
            options.format = found
    if options.to is None:
        open_ = options.format == "merak" or options.adapter is not None
        options.to = "hf" if open_ else "merak"
    if options.format == options.to and options.adapter is None:
        reason = f"{options.source} is of that format already"
        raise ConfigError("--to", options.to, reason, f"Use one of {', '.join(FORMATS)}")
    _check_flags(options)


def _format_of(source: Path, iteration: int | None) -> str:
    from ..checkpoint.foreign import is_dcp, is_megatron
    from ..formats.adapters import CONFIG
    from ..formats.hf import is_hf
    from ..formats.megatron_directory import chosen_megatron, has_rank_files

    if not source.is_dir():
        reason = "it is not a directory"
        raise CheckpointError("FROM", source, reason, "Name a checkpoint")
    if (source / CONFIG).is_file() and not (source / "config.json").is_file():
        remedy = f"Name the model that it was trained on, and it by --adapter {source}"
        raise CheckpointError("FROM", source, "it is an adapter, not a model", remedy)
    if is_megatron(source):
        older = has_rank_files(chosen_megatron(source, iteration))
        return "megatron-legacy" if older else "megatron"
    if is_dcp(source):
        return "dcp"
    return "hf" if is_hf(source) else "merak"


def _check_flags(options: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that the formats have no use for."""
    several = ("merak", "megatron", "megatron-legacy")
    only = (
        ("--ckpt-step", None, options.format in several, "FROM has one state only"),
        ("--tokenizer", None, options.to == "hf", "only HuggingFace directories have one"),
        ("--max-shard-size", _SHARDS, options.to == "hf", "only HuggingFace directories have them"),
        ("--config", None, options.format not in ("merak", "hf"), "FROM has its own"),
    )
    for flag, default, fits, reason in only:
        value = getattr(options, flag[2:].replace("-", "_"))
        if value != default and not fits:
            reason = (
                f"{reason}: {options.source} is converted from {options.format} to {options.to}"
            )
            raise ConfigError(flag, value, reason, "Leave it out")


def _convert(options: argparse.Namespace) -> None:
    from ..checkpoint.begun import marked

    state, source = _read(options)
    if options.adapter is not None:
        from ..formats.adapters import merge_adapter

        state = merge_adapter(state, options.adapter)
    # its name is wrong before anything is written
    tokenizer = None if options.tokenizer is None else _tokenizer(options.tokenizer)
    with marked(options.target):
        written, note = _write(state, options, tokenizer)
    steps = state.optimizer_steps
    optimizer = f", AdamW's state of {steps:,} steps" if state.has_optimizer else ""
    if options.to == "hf":
        optimizer = ""
    elif optimizer and options.to == "megatron-legacy":
        optimizer += " left out: files for each rank have weights only"
    merged = "" if options.adapter is None else f", with {options.adapter} merged into them"
    print(f"{source} -> {written}: {_told(state)}{merged}{optimizer}")
    if note:
        print(note)


def _read(options: argparse.Namespace) -> tuple["PortableState", Path]:
    from ..formats.dcp import read_dcp
    from ..formats.hf import read_hf
    from ..formats.megatron import read_megatron
    from ..formats.megatron_directory import chosen_megatron
    from ..formats.megatron_legacy import read_megatron_legacy
    from ..formats.merak import read_merak

    optimizer = options.to != "hf" and not options.no_load_optim and options.adapter is None
    source = options.source
    if options.format == "merak":
        return read_merak(source, options.ckpt_step, optimizer, print)
    if options.format == "hf":
        return read_hf(source, options.allow_pickle), source
    if options.format == "dcp":
        state = read_dcp(source, options.config, options.allow_pickle, print, optimizer)
        return state, source
    path = chosen_megatron(source, options.ckpt_step)
    if options.format == "megatron-legacy":
        allow = options.allow_pickle
        return read_megatron_legacy(path, options.config, allow, print, optimizer=optimizer), path
    return read_megatron(path, options.config, options.allow_pickle, optimizer), path


def _write(state: "PortableState", options: argparse.Namespace, tokenizer: Any) -> tuple[Path, str]:
    """Return what was written, and a line for the user."""
    from ..formats.dcp import write_dcp_state
    from ..formats.hf import write_hf
    from ..formats.megatron import write_megatron
    from ..formats.megatron_legacy_writing import RankFormat, write_megatron_legacy
    from ..formats.megatron_ranks import RankGrid
    from ..formats.merak import write_merak

    target = options.target
    if options.to == "hf":
        lacking = write_hf(state, target, tokenizer, options.max_shard_size)
        few = f"{', '.join(lacking[:_NAMED])}{' ...' if len(lacking) > _NAMED else ''}"
        note = f"Not in the checkpoint, so as in a new model: {few}" if lacking else ""
        return target, note
    if options.to == "dcp":
        write_dcp_state(state, target)
        return target, ""
    if options.to == "megatron":
        divisor = options.make_vocab_size_divisible_by * options.target_tensor_parallel_size
        return write_megatron(state, target, divisor), ""
    if options.to == "megatron-legacy":
        grid = RankGrid(
            options.target_tensor_parallel_size,
            options.target_pipeline_parallel_size,
            options.target_expert_parallel_size,
        )
        fused = options.saver_transformer_impl == _IMPLEMENTATIONS[0]
        ranks = RankFormat(grid, options.make_vocab_size_divisible_by, fused)
        return write_megatron_legacy(state, target, ranks), ""
    path, native = write_merak(state, target, print)
    _remove_others(target, path)
    start = "" if state.has_optimizer else " --finetune"
    if native is None:
        model = options.config or options.source
        return path, f"merak-pretrain-hf --model {model} --load {target}{start} ..."
    return path, f"merak-pretrain --load {target}{start} {_flags(native)} ..."


def _check_target(source: Path, target: Path, to: str) -> None:
    """Raise ConfigError for a target in which the result would be mistaken for something else."""
    one = source.resolve()
    other = target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConfigError(
            "TO", target, f"it is {source}, or one is inside the other", "Name another directory"
        )
    if any(target.glob("iter_*")) and not _is_of_conversions(target, to):
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


def _is_of_conversions(target: Path, to: str) -> bool:
    """Whether the checkpoints in a directory are those of earlier conversions to a format, of which
    one may have been killed.
    """
    from ..checkpoint.begun import is_begun
    from ..checkpoint.directory import Iterations, read_manifest

    if to.startswith("megatron"):
        # what a run of Megatron-LM writes has no config.json
        found = [path for path in target.glob("iter_*") if not path.suffix]
        ours = is_begun(target) or all((path / "config.json").is_file() for path in found)
        return ours and not any(Iterations(target).newest_first())
    if to != "merak":
        return False
    complete = [*Iterations(target).newest_first()]
    others = {*target.glob("iter_*")} - {*complete}
    # what a killed one leaves is aside
    if any(not other.suffix or not is_begun(target) for other in others):
        return False
    settings = [read_manifest(path)[1].meta.get("config") for path in complete]
    # a run has some
    return all(isinstance(each, dict) and each.get("train") == {} for each in settings)


def _remove_others(target: Path, path: Path) -> None:
    """Remove what conversions before this one wrote: a run would load the newest."""
    from ..checkpoint.directory import Iterations, iteration_of

    iterations = Iterations(target)
    for other in [*iterations.newest_first()]:
        if iteration_of(other) != iteration_of(path):
            iterations.remove(iteration_of(other))


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        reason = f"it holds no tokenizer ({str(error).splitlines()[0]:.200})"
        raise ConfigError(
            "--tokenizer", directory, reason, "Give a directory with tokenizer files"
        ) from error


def _flags(native: "ModelConfig") -> str:
    """Return the flags of a model, as a command line; those at their defaults are left out."""
    from ..arguments import flags

    words = []
    for flag in flags():
        if flag.section == "model":
            value = getattr(native, flag.field)
            if value != flag.default:
                words += [flag.name] if value is True else [flag.name, str(value)]
    return " ".join(words)


def _told(state: "PortableState") -> str:
    """Return the model, its number of weights and their dtype, in words."""
    import math

    source = state.kinds["model"]
    count = sum(math.prod(source.shape(name)) for name in source.names())
    names = state.config.get("architectures") or [state.config.get("model_type", "a model")]
    return f"{names[0]}, {count:,} weights, {str(source.dtypes()[0])[6:]}"

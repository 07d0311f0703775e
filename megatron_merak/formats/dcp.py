"""Training states in stores of torch.distributed.checkpoint: of FSDP2 loops, accelerate and torchtitan.

    DIR/.metadata                        weights and optimizer state under names such as model.N, optim.state.N.exp_avg
    DIR/pytorch_model_fsdp_0/, optimizer_0/        the two stores of accelerate

What stands before a weight's name is found by looking, since each program has something else there. Weights are named
as in transformers, or as in torchtitan.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..checkpoint import hf_names
from ..checkpoint.files import complete_or_absent, disk_errors
from ..checkpoint.hf import Source
from ..checkpoint.shard import Intervals
from ..durable import make_directory
from ..errors import CheckpointError
from .dcp_files import METADATA, SAVE_REMEDY, DcpFiles, DcpTensor, StoredChunk, write_dcp
from .model import CONFIG, config_beside, empty_model, shapes_of
from .state import MASTER, MOMENTS, WEIGHTS, PortableState

_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
_STEP = "step"
# wrappers that leave a part in names
_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_NAMED = 3  # names in one message
# what is no weight: states of optimizers, schedules and loaders, and tables of angles
_BESIDE = re.compile(
    r"(^|\.)(optim\w*|state|param_groups|lr_scheduler\w*|train_state|dataloader\w*|freqs_cis|"
    r"inv_freq|original_inv_freq)(\.|$)"
)


@dataclass(frozen=True)
class _Titan:
    """torchtitan's names of a family; those of transformers without the layer's number before them.

    permuted: the products whose rows are pairs, which its rotary embedding turns, in the order of
              pairs: transformers has the first halves of all pairs before the second.
    """

    names: Mapping[str, str]
    permuted: Mapping[str, str]


_TITAN_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "lm_head": "output",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
)
_TITANS: Mapping[str, _Titan] = MappingProxyType(
    {
        "llama": _Titan(
            _TITAN_NAMES,
            {
                "self_attn.q_proj": "num_attention_heads",
                "self_attn.k_proj": "num_key_value_heads",
            },
        ),
        "qwen3": _Titan(_TITAN_NAMES, {}),
    }
)


class DcpSource(Source):
    """Tensors of a store under HuggingFace's names.

    files:  the store.
    places: of each tensor, its name in the store, and for how many heads its rows are pairs; 0 for
            rows in order.
    """

    def __init__(self, files: DcpFiles, places: Mapping[str, tuple[str, int]]):
        self._files = files
        self._places = dict(places)
        self._tensors = {
            name: torch.empty(
                files.tensors[stored].shape, dtype=files.tensors[stored].dtype, device="meta"
            )
            for name, (stored, _) in places.items()
        }

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        stored, heads = self._places[name]
        if not heads:
            return self._files.read(stored, dim, intervals)
        values = halves_first(self._files.read(stored), heads)
        if dim is None:
            return values
        return torch.cat([values.narrow(dim, a, b - a) for a, b in intervals], dim)

    def place(self, name: str) -> tuple:
        return (*self._files.place(self._places[name][0]), name)

    def close(self) -> None:
        self._files.close()


def halves_first(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows with the first halves of a head's pairs before the second ones, given rows in the
    order of pairs: transformers' order from torchtitan's.
    """
    rows = values.view(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return rows.transpose(1, 2).reshape(values.shape)


def is_dcp(directory: Path) -> bool:
    """Whether a directory is a store, or has those of accelerate."""
    return any((directory / part / METADATA).is_file() for part in ("", _ACCELERATE[0]))


def read_dcp(
    directory: Path, config: Path | None, allow_pickle: bool, optimizer: bool = True
) -> PortableState:
    """Return the state in a store.

    directory:    that of the store, or of accelerate's two.
    config:       the model's config.json, or a directory with it; None where it lies beside.
    allow_pickle: whether its files, which are pickles, may be read.
    optimizer:    whether to look for optimizer state.

    Raises CheckpointError for weights that are missing, of another shape, or beside others that the
    model does not have, and for optimizer state of some of them only.
    """
    described = config_beside(directory, config)
    model: Any = empty_model(described)
    first = directory if (directory / METADATA).is_file() else directory / _ACCELERATE[0]
    files = DcpFiles(first, allow_pickle)
    wanted = {name: tuple(tensor.shape) for name, tensor in hf_names.expected(model).items()}
    trained = shapes_of(model)
    aliases = hf_names.aliases(model)
    needed = [name for name in wanted if name not in aliases]
    places = _places_of(files, needed, model.config, "")
    if places is None:
        raise _unknown(first, needed)
    _check_shapes(files, places, wanted)
    _refuse_extra(files, {stored for stored, _ in places.values()}, list(aliases))
    kinds: dict[str, Source] = {WEIGHTS: DcpSource(files, places)}
    steps = 0
    if optimizer:
        beside = first if first == directory else directory / _ACCELERATE[1]
        state = files if beside == first else None
        if state is None and (beside / METADATA).is_file():
            state = DcpFiles(beside, allow_pickle)
        if state is not None and _has_state(state):
            for kind in MOMENTS:
                found = _places_of(state, list(trained), model.config, f".{kind}")
                if found is None:
                    raise _partial(beside, list(trained), kind)
                _check_shapes(state, found, trained)
                kinds[kind] = DcpSource(state, found)
            steps = _steps(state)
    return PortableState(kinds, described, iteration=steps, optimizer_steps=steps)


def write_dcp_state(state: PortableState, directory: Path) -> None:
    """Write a store that ``torch.distributed.checkpoint.load`` reads into

        {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}

    It has no groups of parameters, whose rates are those of the run that loads it, so a planner
    with ``allow_partial_load=True`` is needed for the optimizer. The model's config.json lies
    beside. Weights that were trained in a lower precision are those of the fp32 copy where the state
    has one, as FSDP keeps them.

    Raises CheckpointError.
    """
    weights = state.kinds.get(MASTER, state.kinds[WEIGHTS])
    tensors: dict[str, DcpTensor] = {}
    reads: dict[str, Callable[[], torch.Tensor]] = {}
    paths: dict[str, tuple[str, ...]] = {}

    def add(source: Source, name: str, *path: str) -> None:
        flat = ".".join(path)
        tensors[flat] = DcpTensor.whole(source.shape(name), source.dtype(name))
        reads[flat] = lambda: source.read(name)
        paths[flat] = path

    model = empty_model(state.config)
    for name in state.kinds[WEIGHTS].names():
        add(weights if name in weights.names() else state.kinds[WEIGHTS], name, "model", name)
    # get_model_state_dict has tied weights under each of their names
    for alias, name in hf_names.aliases(model).items():
        if f"model.{alias}" not in tensors and f"model.{name}" in tensors:
            source = weights if name in weights.names() else state.kinds[WEIGHTS]
            add(source, name, "model", alias)
    for kind in MOMENTS if state.has_optimizer else ():
        for name in state.kinds[kind].names():
            add(state.kinds[kind], name, "optim", "state", name, kind)
    if state.has_optimizer:
        step = torch.tensor(float(state.optimizer_steps))
        for name in state.kinds[MOMENTS[0]].names():
            flat = f"optim.state.{name}.{_STEP}"
            tensors[flat] = DcpTensor.whole((), torch.float32)
            reads[flat] = lambda: step
            paths[flat] = ("optim", "state", name, _STEP)

    def values(name: str, chunk: StoredChunk) -> torch.Tensor:
        return reads[name]()

    with disk_errors(directory, SAVE_REMEDY):
        make_directory(directory)
        with complete_or_absent(directory / CONFIG) as file:
            file.write(json.dumps(dict(state.config), indent=2).encode() + b"\n")
    write_dcp(directory, tensors, values, {}, paths=paths)


def _places_of(
    files: DcpFiles, names: Sequence[str], config: Any, end: str
) -> dict[str, tuple[str, int]] | None:
    """Return where each tensor is: its name in the store, and the heads by which it is permuted.

    end: what follows the name of a weight, such as ".exp_avg".
    """
    plain = {_WRAPPERS.sub("", stored): stored for stored in files.tensors}
    titan = _TITANS.get(config.model_type)
    spellings: list[Callable[[str], tuple[str, int]]] = [lambda name: (name, 0)]
    if titan is not None:
        spellings.append(lambda name: _titan_name(name, titan, config))
    for spelling in spellings:
        first, _ = spelling(names[0])
        befores = [
            stored[: -len(first + end)]
            for stored in plain
            if stored.endswith(first + end) and stored[: -len(first + end)][-1:] in ("", ".")
        ]
        for before in sorted(befores, key=len):
            found = {name: spelling(name) for name in names}
            if all(before + theirs + end in plain for theirs, _ in found.values()):
                return {
                    name: (plain[before + theirs + end], heads)
                    for name, (theirs, heads) in found.items()
                }
    return None


def _titan_name(name: str, titan: _Titan, config: Any) -> tuple[str, int]:
    """Return torchtitan's name of a weight, and the heads by which its rows are permuted; the name
    itself for what it does not have.
    """
    match = re.fullmatch(r"(model\.layers\.(\d+)\.)?(.*)\.(weight|bias)", name)
    if match is None or match[3] not in titan.names:
        return name, 0
    layer = "" if match[2] is None else f"layers.{match[2]}."
    heads = titan.permuted.get(match[3])
    count = 0 if heads is None else int(getattr(config, heads))
    return f"{layer}{titan.names[match[3]]}.{match[4]}", count


def _check_shapes(
    files: DcpFiles, places: Mapping[str, tuple[str, int]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    for name, (stored, _) in places.items():
        shape = files.tensors[stored].shape
        if shape != wanted[name]:
            reason = f"{stored} has shape {shape}, and the model of the config {wanted[name]}"
            remedy = "Give that model's --config"
            raise CheckpointError("checkpoint", files.directory, reason, remedy)


def _refuse_extra(files: DcpFiles, used: Collection[str], aliases: Sequence[str]) -> None:
    """Raise CheckpointError for weights in a store that its model does not have."""
    extra = [
        name
        for name in files.tensors
        if name not in used and not _BESIDE.search(name) and not name.endswith(tuple(aliases))
    ]
    if extra:
        more = f" and {len(extra) - _NAMED} more" if len(extra) > _NAMED else ""
        reason = (
            f"it has weights that the config's model does not have: {', '.join(extra[:_NAMED])}"
        )
        remedy = "Give that model's --config"
        raise CheckpointError("checkpoint", files.directory, reason + more, remedy)


def _has_state(files: DcpFiles) -> bool:
    return any(name.endswith(f".{MOMENTS[0]}") for name in files.tensors)


def _steps(files: DcpFiles) -> int:
    """Return the updates behind the moments, the same for all parameters."""
    steps = {int(value) for value in _step_values(files)}
    if len(steps) > 1:
        reason = f"parameters have different steps: {', '.join(map(str, sorted(steps)))}"
        raise CheckpointError(
            "checkpoint", files.directory, reason, "Convert the weights alone with --no-load-optim"
        )
    return steps.pop() if steps else 0


def _step_values(files: DcpFiles) -> Iterator[Any]:
    end = f".{_STEP}"
    for name in files.tensors:
        if name.endswith(end) and ".state." in f".{name}" and not files.tensors[name].shape:
            yield files.read(name)
    for name in files.objects:
        if name.endswith(end) and ".state." in f".{name}":
            yield files.object(name)


def _unknown(directory: Path, names: Sequence[str]) -> CheckpointError:
    few = ", ".join(names[:_NAMED])
    reason = f"not all tensors of the config's model, {few} ..., are in it"
    return CheckpointError("checkpoint", directory, reason, "Give that model's --config")


def _partial(directory: Path, names: Sequence[str], kind: str) -> CheckpointError:
    reason = (
        f"it has no {kind} for each of {len(names)} trained weights, or has them by number instead "
        "of by name"
    )
    remedy = (
        "Save it by get_optimizer_state_dict, or convert the weights alone with --no-load-optim"
    )
    return CheckpointError("checkpoint", directory, reason, remedy)

"""Any ``nn.Module`` -> one graph: trace its fake twin, in the most faithful of several ways that succeeds."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture import fake_model as twin
from megatron_merak.graph.capture import patches, python_state
from megatron_merak.graph.capture.captured import Captured, Origin
from megatron_merak.graph.capture.clean import clean, refuse_dynamic
from megatron_merak.graph.capture.eager_module import (
    CannotKeepModule,
    DataDependentForward,
    EagerModules,
    around_error,
    keep_modules,
)
from megatron_merak.graph.capture.fast_trace import swift
from megatron_merak.graph.capture.lengths import Axes, Lengths, SymbolicLength, digest
from megatron_merak.graph.capture.outputs import LossFunction, pick_outputs, take_entries
from megatron_merak.graph.capture.python_state import Written
from megatron_merak.graph.capture.unlift import unlift
from megatron_merak.graph.capture.values import values_of_batch
from megatron_merak.graph.capture.watch import Seen, function_notes, place, watch

# Keywords by which transformers tells where the documents of a packed row lie: every model takes them, few read them.
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_FOR_ALL = ("num_items_in_batch", *DOCUMENTS)


@dataclass(frozen=True)
class Attempt:
    """One way to trace. ``attention``: an implementation to switch to, "" for the model's own."""

    attention: str = ""
    is_causal: bool = False
    no_layer_drop: bool = False
    strict: bool = False
    values: bool = False

    def __str__(self) -> str:
        parts = [f"{self.attention} attention" if self.attention else "as it is"]
        parts += ["is_causal kept"] * self.is_causal + ["no layer drop"] * self.no_layer_drop
        return ", ".join(parts + ["strict"] * self.strict + ["values of the batch"] * self.values)


def capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
    outputs: Sequence[str] = ("loss",),
    compute: LossFunction | None = None,
) -> Captured:
    """The forward of ``model`` for batches like ``batch``, as a graph of aten operations without memory.

    The model is not changed, but for what its forward writes into its config, and its parameters may be real or fake
    (``init_empty_weights``). Of the batch only shapes and dtypes of tensors matter; other values are part of the graph.
    ``training``: dropout and friends are on.
    ``dtype``: floating parameters are of that dtype (None: of their own). ``outputs``: which values of the model's
    output, "loss" being a tensor that is returned alone or first, "*" all others (see ``pick_outputs``).
    ``compute``: computes the loss instead, of the model and the batch; it is traced with the model, and calls that.

    Raises TraceError, naming the model's line of code, if no attempt gives a graph that is right.
    """
    batch = {key: value for key, value in batch.items() if value is not None}
    _check_batch(model, batch, compute is not None)
    eager, first, reasons = EagerModules(), None, {}
    while True:
        try:
            captured = _capture(model, batch, training, dtype, outputs, compute, eager)
            return replace(captured, notes=captured.notes + eager.notes(reasons))
        except CannotKeepModule as error:
            eager = eager.refusing(error)
        except DataDependentForward as error:
            first = first or error
            grown = eager.with_innermost(model, error)
            if grown is None:
                raise first from first.__cause__
            eager = grown
            reasons[grown.chosen[-1]] = error.reason


def _capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    training: bool,
    dtype: torch.dtype | None,
    outputs: Sequence[str],
    compute: LossFunction | None,
    eager: EagerModules,
) -> Captured:
    """By the first attempt that succeeds, with ``islands`` kept as they are."""
    error: Exception | None = None
    chooses: TraceError | None = None
    for attempt in _attempts(model, batch):
        if chooses and not attempt.values:
            continue
        try:
            how = (attempt, training, dtype, outputs, compute, eager)
            program, seen, written = _trace(model, batch, *how)
        except TraceError:
            raise
        except Exception as failure:  # the exporter raises whatever the model's code and its own internals raise
            error = error if attempt.strict or attempt.values else failure
            continue
        if seen.drawn and not attempt.no_layer_drop:
            continue

        def trace(before: Written | None, tensors: bool) -> tuple[ExportedProgram, Written]:
            program, _, written = _trace(model, batch, *how, before, tensors)  # noqa: B023  called within this turn
            return program, written

        python_state.refuse(model, written, trace, program)
        python_state.keep_config(model, written)
        alone = not (eager.chosen or attempt.strict or attempt.values)
        origin = Origin(attempt, digest(program)) if alone else None
        raw = unlift(program, model)
        if attempt.is_causal and patches.positions_from_batch(raw.module.graph):
            continue
        try:
            refuse_dynamic(raw.module.graph, raw.model)
        except TraceError as refusal:
            chooses = chooses or refusal
            continue
        _refuse_unseen(model, seen)
        captured = clean(raw, seen.outputs, str(attempt))
        notes = function_notes(seen) + _notes(model, batch, captured, attempt, compute is not None)
        return replace(captured, notes=captured.notes + notes, origin=origin)
    raise chooses or _failure(model, error)


def lengths_of(
    model: nn.Module,
    batch: Mapping[str, Any],
    axes: Axes,
    like: Origin,
    length: int,
    *,
    training: bool = True,
    dtype: torch.dtype | None = None,
    outputs: Sequence[str] = ("loss",),
    compute: LossFunction | None = None,
) -> Lengths | None:
    """For which lengths, the extent of ``axes``, a capture does what the one that came of ``like`` does, which had
    ``length``; None where that cannot be told. batch: of another length. The rest: as of ``capture``."""
    batch = {key: value for key, value in batch.items() if value is not None}
    export = SymbolicLength(batch, axes)
    try:
        how = (like.attempt, training, dtype, outputs, compute, EagerModules())
        program, _, written = _trace(model, batch, *how, export=export)
        written.restore()
        return export.lengths(program) if digest(program, length) == like.digest else None
    except Exception:  # the exporter raises whatever the model's code and its own internals raise for a symbol
        return None


def accepts_num_items(model: nn.Module) -> bool:
    """Whether the model divides its loss by ``num_items_in_batch``, by the criterion of HuggingFace's Trainer."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return twin.forward_parameters(model)[1]


def _attempts(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[Attempt]:
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    attention = attention if hasattr(model, "set_attn_implementation") else None
    own = "" if attention in (None, "sdpa", "eager") else "sdpa"
    ways = [Attempt(own, is_causal=True)] if attention and "position_ids" not in batch else []
    ways += [Attempt(own)] + ([Attempt("eager")] if attention not in (None, "eager") else [])
    yield from ways
    yield from (replace(way, no_layer_drop=True) for way in ways)
    yield Attempt(own, strict=True)
    yield from (replace(way, values=True) for way in ways if not (way.is_causal and "attention_mask" in batch))
    yield from (replace(way, values=True, no_layer_drop=True) for way in ways if not way.is_causal)


def _trace(
    model: nn.Module,
    batch: Mapping[str, Any],
    attempt: Attempt,
    training: bool,
    dtype: torch.dtype | None,
    outputs: Sequence[str],
    compute: LossFunction | None,
    eager: EagerModules,
    before: Written | None = None,
    tensors: bool = False,
    export: Callable[..., ExportedProgram] = torch.export.export,
) -> tuple[ExportedProgram, Seen, Written]:
    """before: what an earlier trace wrote and this one begins with. tensors: return what this one writes."""
    if before is None:
        fake = twin.make_twin(model, training, dtype, copy_buffers=attempt.values)
        if attempt.attention:
            fake.set_attn_implementation(attempt.attention)  # type: ignore[operator]
        told = pick_outputs(fake, outputs, compute)
    else:
        fake, told = before.replay(), []
    if compute is not None:
        take_entries(fake, tuple(batch))
    elif "use_cache" in twin.forward_parameters(fake)[0]:
        batch = {"use_cache": False, **batch}
    written = Written(fake) if attempt.strict else python_state.record(fake)
    if tensors:
        python_state.with_written_tensors(fake, written)
    with ExitStack() as world:
        world.enter_context(patches.quiet())
        world.enter_context(swift())
        seen = world.enter_context(watch())
        seen.outputs = told
        world.enter_context(keep_modules(fake, eager, seen.opaque))
        if not attempt.strict:
            world.enter_context(patches.native())
            world.enter_context(patches.stopped())
        if attempt.is_causal:
            world.enter_context(patches.is_causal())
        if attempt.no_layer_drop:
            world.enter_context(patches.no_layer_drop())
        if attempt.values:
            world.enter_context(values_of_batch())
            given = {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in batch.items()}
        else:
            given = twin.fake_batch(fake, batch)
        program = export(fake, (), given, strict=attempt.strict)
        seen.opaque.settle(program.graph_module)
    return program, seen, written


def _check_batch(model: nn.Module, batch: Mapping[str, Any], computed: bool) -> None:
    """computed: by a loss function, which may read other entries, and give others to the model's forward."""
    named, open_ended = twin.forward_parameters(model)
    for key, value in batch.items():
        if key not in named and not open_ended and not computed:
            near = difflib.get_close_matches(key, named, 1)
            reason = f"the forward of {type(model).__name__} does not take it"
            raise TraceError("batch entry", key, reason, f"Did you mean {near[0]}" if near else "Leave it out")
        if isinstance(value, list | tuple | Mapping) and any(isinstance(x, Tensor) for x in tree_leaves(value)):
            reason = "it holds several tensors, and a graph takes one tensor per entry"
            raise TraceError("batch entry", key, reason, "Pass them as separate arguments of the forward")
    missing = [k for k, p in named.items() if p.default is p.empty and k not in batch]
    if missing and not computed:
        reason = f"the forward of {type(model).__name__} needs it"
        raise TraceError("batch entry", missing[0], reason, "Add it to the batch")


def _refuse_unseen(model: nn.Module, seen: Seen) -> None:
    name = type(model).__name__
    if seen.hooked:
        reason = f"{seen.hooked[0]} puts a gradient hook on a tensor, which a captured graph would not run"
        raise TraceError("model", name, reason, "Compute the same with operations that differentiate as wanted")
    if seen.reseeded:
        reason = f"{seen.reseeded[0]} sets the seed of torch, which a captured graph would not"
        raise TraceError("model", name, reason, "Leave the seed alone, or keep such numbers in a buffer")
    if seen.clocked:
        reason = f"{seen.clocked[0]} reads the clock, which a captured graph would do once"
        raise TraceError("model", name, reason, "Pass such numbers as an entry of the batch")
    if seen.drawn:
        reason = f"{seen.drawn[0]} draws random numbers on the host, which a captured graph would repeat at every step"
        remedy = "Turn that augmentation off in the config, or draw with torch"
        raise TraceError("model", name, reason, remedy)


def _notes(
    model: nn.Module, batch: Mapping[str, Any], captured: Captured, attempt: Attempt, computed: bool
) -> tuple[str, ...]:
    notes = []
    named, _ = twin.forward_parameters(model)
    for node in captured.module.graph.find_nodes(op="placeholder"):
        if node.users:
            continue
        if node.target not in named and node.target not in _FOR_ALL and not computed:
            near = difflib.get_close_matches(node.target, named, 1)
            reason = f"the forward of {type(model).__name__} takes any keyword but does not read this one"
            raise TraceError("batch entry", node.target, reason, f"Did you mean {near[0]}" if near else "Leave it out")
        if node.target != "labels" or "shift_labels" not in batch:
            notes.append(f"The model does not read {node.target}.")
    if captured.guards:
        lines = "; ".join(captured.guards.lines[:3])
        notes.append(f"Batches are captured anew where other values of the batch decide: {lines}.")
    norms = captured.module.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    if any(node.args[5] for node in norms):
        notes.append("Running statistics of batch norm follow the micro-batches of each rank by itself.")
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]
    drops = [
        f"{key} {value:g}"
        for part in parts
        for key, value in sorted(vars(part).items() if part is not None else ())
        if "layerdrop" in key.replace("_", "").lower() and isinstance(value, float | int) and value > 0
    ]
    if attempt.no_layer_drop and drops:
        notes.append(f"No layer is ever dropped, although the config says {', '.join(dict.fromkeys(drops))}.")
    return tuple(notes)


def _failure(model: nn.Module, error: Exception | None) -> TraceError:
    text = " ".join(str(error).split()) or "no further information"
    line = place(error)
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        reason = f"{line} decides by the values of a tensor, and a graph has no branches"
        remedy = "Pass what settles the branch (attention_mask, position or decoder inputs), use another "
        remedy += "attn_implementation, or rewrite that line with tensor operations"
        around = around_error(error) if error else ()
        failure: TraceError = DataDependentForward(type(model).__name__, reason, remedy, around)
    else:
        reason = f"{line} raises {type(error).__name__}: {text[:300].rstrip('.')}"
        remedy = (
            "Check that the model runs with such a batch; if it does, rewrite that line with plain tensor operations"
        )
        failure = TraceError("model", type(model).__name__, reason, remedy)
    failure.__cause__ = error
    return failure

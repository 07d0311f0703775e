"""Captures any ``nn.Module`` as one graph: traces a fake copy in several ways, most
faithful first.
"""

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
from megatron_merak.graph.capture.fake_model import (
    Cast,
    fake_batch,
    forward_parameters,
    make_fake_model,
)
from megatron_merak.graph.capture.fast_trace import compiled_when_called, fast_tracing
from megatron_merak.graph.capture.four_bit import check_readers, drop_copies, four_bit_weights
from megatron_merak.graph.capture.inspected import inspected_model
from megatron_merak.graph.capture.lengths import Axes, Lengths, SymbolicLength, digest
from megatron_merak.graph.capture.outputs import (
    LossFunction,
    output_names,
    pick_outputs,
    take_entries,
)
from megatron_merak.graph.capture.python_state import StateChanges
from megatron_merak.graph.capture.unlift import unlift
from megatron_merak.graph.capture.values import values_of_batch
from megatron_merak.graph.capture.watch import TraceEvents, function_notes, model_line, watch

# Keywords of transformers for the documents of a packed row. Every model accepts them, few read
# them.
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_UNREAD_BY_MOST = ("num_items_in_batch", *DOCUMENTS)


@dataclass(frozen=True)
class Attempt:
    """One way to trace a model.

    attention:     attention implementation to switch to; "" for the model's own.
    is_causal:     keep ``is_causal`` instead of a materialised mask.
    no_layer_drop: never drop a layer.
    strict:        trace with TorchDynamo.
    values:        trace with the values of the batch, and guard those that the model branches on.
    """

    attention: str = ""
    is_causal: bool = False
    no_layer_drop: bool = False
    strict: bool = False
    values: bool = False

    def __str__(self) -> str:
        options = {
            "is_causal kept": self.is_causal,
            "no layer drop": self.no_layer_drop,
            "strict": self.strict,
            "values of the batch": self.values,
        }
        kept = f"{self.attention} attention" if self.attention else "as it is"
        return ", ".join([kept, *(words for words, chosen in options.items() if chosen)])


def capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    training: bool = True,
    dtype: Cast = None,
    outputs: Sequence[str] = ("loss",),
    compute: LossFunction | None = None,
) -> Captured:
    """Return the forward of ``model`` for batches like ``batch``, as a graph of aten operations
    without memory.

    The model is not changed, except for what its forward writes into its config.

    model:    its parameters may be real or fake (``init_empty_weights``).
    batch:    only shapes and dtypes of its tensors matter; values that are not tensors become part
              of the graph.
    training: whether the model is in training mode (dropout is on).
    dtype:    dtype of floating-point parameters, or of those that a mapping names; None for their
              own.
    outputs:  which of the model's outputs to return; "loss" is the tensor that is returned alone or
              first, "*" all others (see ``pick_outputs``).
    compute:  computes the loss from the model and the batch, in place of the model's forward, which
              it calls.

    Raises TraceError, which names the model's line of code, if no attempt gives a correct graph.
    """
    batch = {key: value for key, value in batch.items() if value is not None}
    _check_batch(model, batch, compute is not None)
    four_bit_weights(model)  # raises, where attempts would go on to the next one
    eager = EagerModules()
    first_error: DataDependentForward | None = None
    reasons: dict[str, str] = {}
    while True:
        try:
            captured = _capture(
                model, batch, training, dtype, outputs=outputs, compute=compute, eager=eager
            )
            return replace(captured, notes=captured.notes + eager.notes(reasons))
        except CannotKeepModule as error:
            eager = eager.refusing(error)
        except DataDependentForward as error:
            first_error = first_error or error
            extended = eager.with_innermost(model, error)
            if extended is None:
                raise first_error from first_error.__cause__
            eager = extended
            reasons[extended.chosen[-1]] = error.reason


def _capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    training: bool,
    dtype: Cast,
    outputs: Sequence[str],
    compute: LossFunction | None,
    eager: EagerModules,
) -> Captured:
    """Capture by the first attempt that succeeds, with the modules that ``eager`` names as single
    nodes.
    """

    def traced(attempt: Attempt, before: StateChanges | None = None, return_changed: bool = False):
        return _trace(
            model,
            batch,
            attempt,
            training=training,
            dtype=dtype,
            outputs=outputs,
            compute=compute,
            eager=eager,
            before=before,
            return_changed=return_changed,
        )

    last_error: Exception | None = None
    refused: TraceError | None = None
    for attempt in _attempts(model, batch):
        if refused and not attempt.values:
            continue
        try:
            program, events, changes = traced(attempt)
        except TraceError:
            raise
        # the exporter raises whatever the model's code and its own internals raise
        except Exception as failure:
            last_error = last_error if attempt.strict or attempt.values else failure
            continue
        if events.drawn and not attempt.no_layer_drop:
            continue

        def trace(
            before: StateChanges | None, return_changed: bool
        ) -> tuple[ExportedProgram, StateChanges]:
            program, _, changes = traced(attempt, before, return_changed)  # noqa: B023  called within this iteration
            return program, changes

        python_state.refuse_changes(model, changes, trace, program)
        python_state.keep_config(model, changes)
        comparable = not (eager.chosen or attempt.strict or attempt.values)
        origin = Origin(attempt, digest(program)) if comparable else None
        with compiled_when_called():
            raw = unlift(program, model)
        if attempt.is_causal and patches.positions_from_batch(raw.module.graph):
            continue
        try:
            refuse_dynamic(raw.module.graph, raw.model)
        except TraceError as refusal:
            refused = refused or refusal
            continue
        _refuse_side_effects(model, events)
        captured = clean(raw, output_names(program), str(attempt))
        packed = four_bit_weights(model)
        drop_copies(captured.module.graph, packed)
        check_readers(captured.module.graph, packed)
        read = {name: how for name, how in packed.items() if name in captured.shapes}
        notes = function_notes(events) + _notes(
            model, batch, captured, attempt, compute is not None
        )
        return replace(captured, notes=captured.notes + notes, origin=origin, four_bit=read)
    raise refused or _failure(model, last_error)


def lengths_of(
    model: nn.Module,
    batch: Mapping[str, Any],
    axes: Axes,
    like: Origin,
    length: int,
    *,
    training: bool = True,
    dtype: Cast = None,
    outputs: Sequence[str] = ("loss",),
    compute: LossFunction | None = None,
) -> Lengths | None:
    """Return for which lengths a capture has the same operations as an earlier one; None if that is
    unknown.

    batch:  a batch of another length than the earlier one.
    axes:   the batch entries and dimensions whose extent is the length.
    like:   origin of the earlier capture.
    length: length of the earlier capture.

    The other arguments are those of ``capture``.
    """
    batch = {key: value for key, value in batch.items() if value is not None}
    export = SymbolicLength(batch, axes)
    try:
        program, _, changes = _trace(
            model,
            batch,
            like.attempt,
            training=training,
            dtype=dtype,
            outputs=outputs,
            compute=compute,
            eager=EagerModules(),
            export=export,
        )
        changes.restore()
        return export.lengths(program) if digest(program, length) == like.digest else None
    # the exporter raises whatever the model's code and its own internals raise for a symbol
    except Exception:
        return None


def accepts_num_items(model: nn.Module) -> bool:
    """Whether the model divides its loss by ``num_items_in_batch``, by the criterion of
    HuggingFace's Trainer.
    """
    inspected = inspected_model(model)
    if hasattr(inspected, "accepts_loss_kwargs"):
        return bool(inspected.accepts_loss_kwargs)
    return forward_parameters(model)[1]


def _attempts(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[Attempt]:
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    attention = attention if hasattr(model, "set_attn_implementation") else None
    preferred = "" if attention in (None, "sdpa", "eager") else "sdpa"
    basic = (
        [Attempt(preferred, is_causal=True)] if attention and "position_ids" not in batch else []
    )
    basic += [Attempt(preferred)] + ([Attempt("eager")] if attention not in (None, "eager") else [])
    yield from basic
    yield from (replace(each, no_layer_drop=True) for each in basic)
    yield Attempt(preferred, strict=True)
    yield from (
        replace(each, values=True)
        for each in basic
        if not (each.is_causal and "attention_mask" in batch)
    )
    yield from (
        replace(each, values=True, no_layer_drop=True) for each in basic if not each.is_causal
    )


def _trace(
    model: nn.Module,
    batch: Mapping[str, Any],
    attempt: Attempt,
    training: bool,
    dtype: Cast,
    outputs: Sequence[str],
    compute: LossFunction | None,
    eager: EagerModules,
    before: StateChanges | None = None,
    return_changed: bool = False,
    export: Callable[..., ExportedProgram] = torch.export.export,
) -> tuple[ExportedProgram, TraceEvents, StateChanges]:
    """Trace a fake copy of the model in one way; return the program and what the trace did besides.

    before:         state changes of an earlier trace to begin from.
    return_changed: return the tensors that the forward writes into Python state, instead of the
                    outputs.
    export:         what exports the fake model.
    """
    if before is None:
        fake = make_fake_model(model, training, dtype, copy_buffers=attempt.values)
        if attempt.attention:
            fake.set_attn_implementation(attempt.attention)  # type: ignore[operator]
        pick_outputs(fake, outputs, compute)
    else:
        fake = before.replay()
    if compute is not None:
        take_entries(fake, tuple(batch))
    elif "use_cache" in forward_parameters(fake)[0]:
        batch = {"use_cache": False, **batch}
    changes = StateChanges(fake) if attempt.strict else python_state.record_changes(fake)
    if return_changed:
        python_state.return_changed_tensors(fake, changes)
    with ExitStack() as contexts:
        contexts.enter_context(patches.silenced())
        contexts.enter_context(fast_tracing())
        events = contexts.enter_context(watch())
        contexts.enter_context(keep_modules(fake, eager, events.opaque))
        if not attempt.strict:
            contexts.enter_context(patches.eager_branches())
            contexts.enter_context(patches.adapted_parameters())
            contexts.enter_context(patches.explicit_gradient_stops())
        if attempt.is_causal:
            contexts.enter_context(patches.is_causal())
        if attempt.no_layer_drop:
            contexts.enter_context(patches.no_layer_drop())
        if attempt.values:
            contexts.enter_context(values_of_batch())
            inputs = {
                k: v.detach().cpu().clone() if isinstance(v, Tensor) else v
                for k, v in batch.items()
            }
        else:
            inputs = fake_batch(fake, batch)
        program = export(fake, (), inputs, strict=attempt.strict)
        events.opaque.settle(program.graph_module)
    return program, events, changes


def _check_batch(model: nn.Module, batch: Mapping[str, Any], has_compute: bool) -> None:
    """Raise TraceError for entries that the forward does not take, or that it needs and the batch
    lacks.

    has_compute: a loss function is given, which may read other entries and pass others to the
                 forward.
    """
    parameters, takes_any = forward_parameters(model)
    for key, value in batch.items():
        if key not in parameters and not takes_any and not has_compute:
            similar = difflib.get_close_matches(key, parameters, 1)
            reason = f"the forward of {type(model).__name__} does not take it"
            raise TraceError(
                "batch entry",
                key,
                reason,
                f"Did you mean {similar[0]}" if similar else "Leave it out",
            )
        if isinstance(value, list | tuple | Mapping) and any(
            isinstance(x, Tensor) for x in tree_leaves(value)
        ):
            reason = "it contains several tensors, and a graph takes one tensor per entry"
            raise TraceError(
                "batch entry", key, reason, "Pass them as separate arguments of the forward"
            )
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in batch]
    if missing and not has_compute:
        reason = f"the forward of {type(model).__name__} needs it"
        raise TraceError("batch entry", missing[0], reason, "Add it to the batch")


def _refuse_side_effects(model: nn.Module, events: TraceEvents) -> None:
    name = type(model).__name__
    if events.hooked:
        reason = (
            f"{events.hooked[0]} puts a gradient hook on a tensor, which a captured graph "
            "would not run"
        )
        raise TraceError(
            "model", name, reason, "Compute the same with operations that differentiate as wanted"
        )
    if events.reseeded:
        reason = f"{events.reseeded[0]} sets the seed of torch, which a captured graph would not"
        raise TraceError(
            "model", name, reason, "Leave the seed alone, or keep such numbers in a buffer"
        )
    if events.clocked:
        reason = f"{events.clocked[0]} reads the clock, which a captured graph would do once"
        raise TraceError("model", name, reason, "Pass such numbers as an entry of the batch")
    if events.drawn:
        line = events.drawn[0]
        reason = (
            f"{line} draws random numbers on the host, which a captured graph would repeat "
            "at every step"
        )
        remedy = "Turn that augmentation off in the config, or draw with torch"
        raise TraceError("model", name, reason, remedy)


def _notes(
    model: nn.Module,
    batch: Mapping[str, Any],
    captured: Captured,
    attempt: Attempt,
    has_compute: bool,
) -> tuple[str, ...]:
    notes = []
    parameters, _ = forward_parameters(model)
    for node in captured.module.graph.find_nodes(op="placeholder"):
        if node.users:
            continue
        if node.target not in parameters and node.target not in _UNREAD_BY_MOST and not has_compute:
            similar = difflib.get_close_matches(node.target, parameters, 1)
            reason = (
                f"the forward of {type(model).__name__} takes any keyword but does not read "
                "this one"
            )
            remedy = f"Did you mean {similar[0]}" if similar else "Leave it out"
            raise TraceError("batch entry", node.target, reason, remedy)
        if node.target != "labels" or "shift_labels" not in batch:
            notes.append(f"The model does not read {node.target}.")
    if captured.guards:
        lines = "; ".join(captured.guards.lines[:3])
        notes.append(f"Batches are captured anew where other values of the batch decide: {lines}.")
    batch_norms = captured.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.batch_norm.default
    )
    if any(node.args[5] for node in batch_norms):
        notes.append(
            "Running statistics of batch norm follow the micro-batches of each rank by itself."
        )
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]
    drops = [
        f"{key} {value:g}"
        for part in parts
        for key, value in sorted(vars(part).items() if part is not None else ())
        if "layerdrop" in key.replace("_", "").lower()
        and isinstance(value, float | int)
        and value > 0
    ]
    if attempt.no_layer_drop and drops:
        notes.append(
            f"No layer is ever dropped, although the config says {', '.join(dict.fromkeys(drops))}."
        )
    return tuple(notes)


def _failure(model: nn.Module, error: Exception | None) -> TraceError:
    text = " ".join(str(error).split()) or "no further information"
    line = model_line(error)
    if "data-dependent" in text.lower() or "GuardOnDataDependent" in type(error).__name__:
        reason = f"{line} decides by the values of a tensor, and a graph has no branches"
        remedy = (
            "Pass what settles the branch (attention_mask, position or decoder inputs), use "
            "another "
        )
        remedy += "attn_implementation, or rewrite that line with tensor operations"
        around = around_error(error) if error else ()
        failure: TraceError = DataDependentForward(type(model).__name__, reason, remedy, around)
    else:
        reason = f"{line} raises {type(error).__name__}: {text[:300].rstrip('.')}"
        remedy = (
            "Check that the model runs with such a batch; if it does, rewrite that line "
            "with plain tensor operations"
        )
        failure = TraceError("model", type(model).__name__, reason, remedy)
    failure.__cause__ = error
    return failure

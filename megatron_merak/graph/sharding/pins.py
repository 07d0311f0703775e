"""Pins: how a plan shards parameters, and the errors where it cannot be so."""

from collections.abc import Mapping, Sequence

from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from ..capture.captured import Captured
from ..ir.names import place
from ..ir.nodes import op_name
from .placement import PlanConflict, ShardSpec

Pins = Mapping[str, TensorSharding]


def extents(tensor: TensorSharding) -> tuple[int, ...]:
    """Return the extents of the blocks along the sharded dimension, without padding."""
    assert tensor.dim is not None
    blocks = tensor.blocks
    extent = tensor.shape[tensor.dim]
    return (extent // blocks,) * blocks if isinstance(blocks, int) else tuple(blocks)


def spec_of(tensor: TensorSharding) -> ShardSpec | None:
    """Return which shard of a tensor each rank has; None if it is replicated."""
    return (
        None if tensor.dim is None else ShardSpec(tensor.dim, extents(tensor), tensor.padded or 0)
    )


def check_pins(captured: Captured, tp: int, pins: Pins, complete: bool) -> None:
    """Check what can be checked before the graph is walked.

    complete: the pins must name every parameter of the capture and no other.

    Raises PlanError, naming the first parameter at fault.
    """
    for name, pin in pins.items():
        if name in captured.shapes:
            _check_pin(name, pin, tuple(captured.shapes[name]), tp)
        elif complete and name in captured.aliases:
            real = captured.aliases[name]
            raise PlanError(
                "sharding of",
                name,
                f"it is tied to {real}, whose name the plan uses",
                f"Name {real}",
            )
        elif complete:
            reason = "the plan has it, and the model computes with no such parameter"
            raise PlanError(
                "sharding of", name, reason, "Leave it out, or make a plan of this model"
            )
    missing = [name for name in captured.shapes if name not in pins] if complete else []
    if missing:
        reason = "the model computes with it, and the plan does not say how it is sharded"
        raise PlanError(
            "sharding of", missing[0], reason, "Add it; with dim null every rank holds all of it"
        )


def _check_pin(name: str, pin: TensorSharding, shape: tuple[int, ...], tp: int) -> None:
    if tuple(pin.shape) != shape:
        reason = f"its shape is {tuple(pin.shape)} in the plan, and {shape} in the model"
        raise PlanError(
            "sharding of", name, reason, "Correct the plan, or train the model that it was made of"
        )
    if pin.dim is None:
        return
    if tp == 1 and not (pin.padded and pin.dim == 0 and len(shape) == 2):
        reason = (
            f"the plan has it {pin.describe()}, and there is one tensor-parallel rank, "
            "which holds all of it"
        )
        raise PlanError(
            "sharding of", name, reason, "Let dim be null, or set the tensor-parallel size"
        )
    if shape[pin.dim] == 1:
        reason = f"the plan has it {pin.describe()}, which is 1 long"
        raise PlanError("sharding of", name, reason, "Shard another dimension, or let dim be null")
    blocks = [pin.blocks] if isinstance(pin.blocks, int) else pin.blocks
    uneven = isinstance(pin.blocks, int) and pin.blocks > 0 and shape[pin.dim] % pin.blocks
    if uneven or not blocks or min(blocks) < 1:
        reason = (
            f"the plan has it in {pin.blocks} blocks, and dimension {pin.dim} is "
            f"{shape[pin.dim]} long"
        )
        raise PlanError(
            "sharding of", name, reason, "Let blocks be 1, or a number or extents that make it up"
        )
    evenly = (pin.padded,) if pin.padded else extents(pin)
    uneven_extents = [extent for extent in evenly if extent % tp]
    if uneven_extents:
        extent = uneven_extents[0]
        reason = (
            f"the plan has it {pin.describe()}, and {extent} is not divisible by {tp} "
            "tensor-parallel ranks"
        )
        remedy = (
            f"Pad it to a multiple of {tp}, or let dim be null"
            if len(evenly) == 1
            else "Let dim be null"
        )
        raise PlanError("sharding of", name, reason, remedy)


def conflict_error(
    conflict: PlanConflict, pins: Pins, free: Pins, edited: Sequence[str]
) -> PlanError:
    """Return the error for a graph that cannot be computed as a plan says.

    free:   how propagation without a plan shards the parameters.
    edited: names of those that the plan shards otherwise.
    """
    name = next((origin for origin in conflict.origins if origin in edited), conflict.origins[0])
    node = conflict.node
    reason = (
        f"the plan has it {pins[name].describe()}, but {op_name(node)} in {place(node)} "
        f"{conflict.why}"
    )
    remedy = f"Let it be {free[name].describe()}"
    if name not in edited:
        restored = ", ".join(f"{other} be {free[other].describe()}" for other in edited[:3])
        remedy = f"Let it be replicated, or let {restored}"
    return PlanError("sharding of", name, reason, remedy)

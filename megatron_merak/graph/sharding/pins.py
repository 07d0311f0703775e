"""How a plan says that weights are divided: what it may say of a capture, and why a capture cannot do it."""

from collections.abc import Mapping, Sequence

from megatron_merak.errors import PlanError
from megatron_merak.plan import TensorSharding

from ..capture.captured import Captured
from ..ir.names import place
from ..ir.nodes import op_name
from .placement import Cut, Stuck

Pins = Mapping[str, TensorSharding]


def extents(tensor: TensorSharding) -> tuple[int, ...]:
    """The extents of the blocks along the divided dimension, without padding."""
    assert tensor.dim is not None
    blocks, extent = tensor.blocks, tensor.shape[tensor.dim]
    return (extent // blocks,) * blocks if isinstance(blocks, int) else tuple(blocks)


def cut_of(tensor: TensorSharding) -> Cut | None:
    """What a rank takes of a tensor; None: all of it."""
    return None if tensor.dim is None else Cut(tensor.dim, extents(tensor), tensor.padded or 0)


def check_pins(captured: Captured, tp: int, pins: Pins, complete: bool) -> None:
    """What can be said of a plan before the graph is walked.

    ``complete``: it names every parameter of the capture and no other. Raises PlanError, naming the first at fault.
    """
    for name, pin in pins.items():
        if name in captured.shapes:
            _check_pin(name, pin, tuple(captured.shapes[name]), tp)
        elif complete and name in captured.aliases:
            real = captured.aliases[name]
            raise PlanError("sharding of", name, f"it is tied to {real}, whose name the plan uses", f"Name {real}")
        elif complete:
            reason = "the plan has it, and the model computes with no such parameter"
            raise PlanError("sharding of", name, reason, "Leave it out, or make a plan of this model")
    missing = [name for name in captured.shapes if name not in pins] if complete else []
    if missing:
        reason = "the model computes with it, and the plan does not say how it is divided"
        raise PlanError("sharding of", missing[0], reason, "Add it; with dim null every rank holds all of it")


def _check_pin(name: str, pin: TensorSharding, shape: tuple[int, ...], tp: int) -> None:
    if tuple(pin.shape) != shape:
        reason = f"its shape is {tuple(pin.shape)} in the plan, and {shape} in the model"
        raise PlanError("sharding of", name, reason, "Correct the plan, or train the model that it was made of")
    if pin.dim is None:
        return
    if tp == 1:
        reason = f"the plan has it {pin.told()}, and there is one tensor-parallel rank, which holds all of it"
        raise PlanError("sharding of", name, reason, "Let dim be null, or set the tensor-parallel size")
    if shape[pin.dim] == 1:
        reason = f"the plan has it {pin.told()}, which is 1 long"
        raise PlanError("sharding of", name, reason, "Divide another dimension, or let dim be null")
    blocks = [pin.blocks] if isinstance(pin.blocks, int) else pin.blocks
    uneven = isinstance(pin.blocks, int) and pin.blocks > 0 and shape[pin.dim] % pin.blocks
    if uneven or not blocks or min(blocks) < 1:
        reason = f"the plan has it in {pin.blocks} blocks, and dimension {pin.dim} is {shape[pin.dim]} long"
        raise PlanError("sharding of", name, reason, "Let blocks be 1, or a number or extents that make it up")
    divided = (pin.padded,) if pin.padded else extents(pin)
    odd = [extent for extent in divided if extent % tp]
    if odd:
        reason = f"the plan has it {pin.told()}, and {odd[0]} does not divide by {tp} tensor-parallel ranks"
        remedy = f"Pad it to a multiple of {tp}, or let dim be null" if len(divided) == 1 else "Let dim be null"
        raise PlanError("sharding of", name, reason, remedy)


def refusal(stuck: Stuck, pins: Pins, free: Pins, edited: Sequence[str]) -> PlanError:
    """The error to raise where a graph cannot be computed as a plan says. ``free``: what propagation makes of the
    parameters by itself. ``edited``: those of which the plan says otherwise."""
    name = next((origin for origin in stuck.origins if origin in edited), stuck.origins[0])
    reason = f"the plan has it {pins[name].told()}, but {op_name(stuck.node)} in {place(stuck.node)} {stuck.why}"
    remedy = f"Let it be {free[name].told()}"
    if name not in edited:
        restored = ", ".join(f"{other} be {free[other].told()}" for other in edited[:3])
        remedy = f"Let it be whole, or let {restored}"
    return PlanError("sharding of", name, reason, remedy)

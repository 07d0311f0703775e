"""Choices of precision that some dtypes of a model exclude."""

from megatron_merak.config.fp8 import Fp8
from megatron_merak.errors import PlanError

REDUCE = "--grad-reduce-in-bf16"
RESIDUAL = "--fp32-residual-connection"


def refused_of(dtype: str, grad_reduce_in_bf16: bool, fp32_residual: bool) -> PlanError | None:
    """Return the error for choices that a model with ``dtype`` excludes; None if there are none."""
    if grad_reduce_in_bf16 and dtype != "bfloat16":
        reason = f"gradients of a model in {dtype} have more digits than bf16 keeps"
        return PlanError(REDUCE, True, reason, "Leave it out, or compute in bf16")
    if fp32_residual and dtype == "float32":
        return PlanError(
            RESIDUAL, True, "all of a model in float32 is fp32", "Leave it out, or add --bf16"
        )
    return None


def refused_with_fp8(
    fp8: Fp8 | None, *, cp: int, halves: bool, recomputes_activations: bool, updates: bool
) -> PlanError | None:
    """Return the error for what a plan does beside fp8 and cannot; None if there is none.

    cp:      ranks that divide sequences.
    halves:  whether micro-batches are computed in halves.
    updates: whether weights change while micro-batches are in flight.
    """
    reasons = {
        "ranks have parts of the sequences whose values have one scale": cp > 1,
        "a half of a micro-batch has other scales than all of it": halves,
        "no linear layer recomputes its input by itself": recomputes_activations,
        "weights would change between a forward and its backward": updates,
    }
    for reason, found in reasons.items():
        if fp8 is not None and found:
            return PlanError("fp8_format", fp8.format, reason, "Plan again, or set it to null")
    return None

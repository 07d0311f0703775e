"""Choices of precision that some dtypes of a model exclude."""

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

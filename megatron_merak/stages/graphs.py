"""What CUDA graphs cannot record."""

from ..errors import ConfigError
from ..plan import Plan
from ..runtime.program import Program

_FLAG = "--cuda-graph-impl"


def check_graphs(plan: Plan) -> None:
    """Refuse plans whose ops do more than the kernels of one device.

    Raises ConfigError.
    """
    reasons = {
        "tensor-parallel ranks exchange values inside an op": plan.grid.tp > 1,
        "context-parallel ranks exchange values inside an op": plan.grid.cp > 1,
        "ranks exchange rows of experts inside an op": plan.expert_ranks > 1,
        "--offload-model-states copies weights inside an op": plan.offload_model_states,
        f"--data-parallel-sharding-strategy {plan.sharding} reduces gradients unit by unit": (
            plan.sharding in ("optim_grads", "optim_grads_params")
        ),
        "no recording has been tried of what --compile-pointwise compiles": plan.compile_pointwise,
        "activations go to host memory inside an op": any(s.offload for s in plan.stages),
        "the schedule updates weights on its way": plan.schedule.updates is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(_FLAG, "local", reason, "Use none, or leave that out")


def check_program(program: Program) -> None:
    """Refuse programs that draw random numbers, and those that run Python code of the model: what it
    reads of a batch, in its backward too, would be that of the recorded one. Raises ConfigError.
    """
    for segment in program.segments:
        if segment.random:
            reason = (
                f"unit {segment.unit} draws random numbers, which the host seeds for each unit of a "
                "micro-batch, and within a graph the host does nothing"
            )
            raise ConfigError(_FLAG, "local", reason, "Use none, or set dropout to 0")
    if program.codes:
        reason = f"{program.codes[0]} is Python code, which no replay runs"
        raise ConfigError(_FLAG, "local", reason, "Use none")

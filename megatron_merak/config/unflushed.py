"""Which settings go with pipeline schedules that update weights without a flush of the pipeline."""

from ..errors import ConfigError
from .optimizer import OptimizerConfig
from .parallel import UNFLUSHED
from .sections import CheckpointConfig, ModelConfig, TrainConfig
from .settings import flag_name

FLAG = "--pipeline-schedule"


def check_unflushed(
    schedule: str,
    model: ModelConfig,
    train: TrainConfig,
    optimizer: OptimizerConfig,
    *,
    checkpoint: CheckpointConfig,
    tp: int,
    cp: int,
    replicas: int,
) -> None:
    """Raise ConfigError for what would not be computed as such a schedule says.

    schedule: its name.
    tp, cp:   ranks that share the weights of a layer, and its sequences.
    replicas: of the model.
    """
    alone = f"with {FLAG} {schedule} each stage updates its own weights"
    once = f"with {FLAG} {schedule} a step has several updates"
    for name, ranks in (("tensor_model_parallel_size", tp), ("context_parallel_size", cp)):
        if ranks > 1:
            _refuse(name, ranks, f"{alone}, on one rank", "Use 1")
    if replicas > 1:
        reason = f"{alone}, of which there are no replicas"
        raise ConfigError("data-parallel size", replicas, reason, "Use as many ranks as stages")
    if not model.untie_embeddings_and_output_weights:
        name = flag_name("untie_embeddings_and_output_weights")
        reason = f"{alone}, and the first and the last one would share the embedding"
        raise ConfigError(name, "(missing)", reason, "Give it")
    if optimizer.clip_grad:
        reason = f"{alone}, without waiting for the norm of all gradients"
        _refuse("clip_grad", optimizer.clip_grad, reason, "Use --clip-grad 0")
    if train.fp16:
        _refuse("fp16", True, f"{alone}, and none could skip an overflow of others", "Use --bf16")
    refused = {
        "rampup_batch_size": " ".join(train.rampup_batch_size),
        "step_batch_size_schedule": train.step_batch_size_schedule,
        "calculate_per_token_loss": train.calculate_per_token_loss,
        "rerun_mode": train.rerun_mode != "disabled" and train.rerun_mode,
        "save_increment_interval": checkpoint.save_increment_interval,
    }
    for name, value in refused.items():
        if value:
            _refuse(name, value, f"{once}, which it is not made for", "Leave it out")


def refuse_unflushed(schedule: str | None) -> None:
    """Raise ConfigError where any other model is asked to run such a schedule, given its name."""
    if schedule in UNFLUSHED:
        reason = (
            "it updates weights while micro-batches are in flight, which the GPT of "
            "merak-pretrain alone does"
        )
        raise ConfigError(FLAG, schedule, reason, "Use 1f1b, whose gradients are never stale")


def _refuse(name: str, value: object, reason: str, remedy: str) -> None:
    raise ConfigError(flag_name(name), value, reason, remedy)

"""Which products of a model have operands of 8 bits."""

from dataclasses import dataclass

from ..errors import ConfigError
from .parallel import UNFLUSHED, ParallelConfig

FP8_FORMATS = ("e4m3", "hybrid")
FP8_RECIPES = ("tensorwise", "blockwise")


@dataclass(frozen=True)
class Fp8:
    """How linear layers compute in fp8.

    format:      what operands are rounded to: e4m3, or hybrid with gradients in e5m2.
    recipe:      what has a scale: tensorwise, or blockwise.
    bf16_layers: layers at the start and at the end that do not.
    """

    format: str
    recipe: str = FP8_RECIPES[0]
    bf16_layers: tuple[int, int] = (0, 0)


def check_fp8(fp8: Fp8 | None, parallel: ParallelConfig) -> None:
    """Raise ConfigError for what ranks cannot divide as one process computes it, or is not tried."""
    if fp8 is None:
        return
    flag = "--fp8-format"
    if parallel.context_parallel_size > 1:
        reason = (
            "scales are of all tokens of a micro-batch, and ranks of --context-parallel-size "
            f"{parallel.context_parallel_size} have parts of these"
        )
        raise ConfigError(flag, fp8.format, reason, "Use --context-parallel-size 1")
    if parallel.recomputes_activations:
        reason = (
            "linear layers keep their input in fp8, and none recomputes it by itself, as with "
            "--recompute-granularity selective"
        )
        raise ConfigError(flag, fp8.format, reason, "Use --recompute-granularity full, or none")
    if parallel.pipeline_schedule in UNFLUSHED:
        reason = (
            f"--pipeline-schedule {parallel.pipeline_schedule} changes weights between a forward "
            "and its backward"
        )
        raise ConfigError(flag, fp8.format, reason, "Use another schedule, such as 1f1b")
    if any(count < 0 for count in fp8.bf16_layers):
        raise ConfigError(
            flag, fp8.format, f"{fp8.bf16_layers} counts layers", "Use numbers of 0 or more"
        )

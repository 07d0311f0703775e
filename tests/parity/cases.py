"""What is compared: cases over the axes of parity, and a small choice of them that meets every pair of values."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product

from megatron_merak.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig

from .families import FAMILIES

MICRO_BATCH, GLOBAL_BATCH = 2, 12  # 6 micro-batches of one replica, 3 of two: more and fewer than 4 stages
FIRST, PEAK, WARMUP, STEPS, WEIGHT_DECAY = 5e-4, 2e-3, 3, 10, 0.1

AXES: dict[str, tuple] = {
    "family": tuple(FAMILIES),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "dp": (1, 2),
    "schedule": ("gpipe", "1f1b"),
    "recompute": ("none", "full"),
    "dtype": ("fp32", "bf16"),
    "loss": ("full", "masked", "per-token"),
}


@dataclass(frozen=True)
class Case:
    """One training run.

    loss: 'full' masks no token; 'masked' masks unevenly, mean of micro-batch means; 'per-token' too, mean over tokens.
    hidden_dropout, attention_dropout: probabilities. clip: largest gradient norm, 0 for any. steps: optimizer steps.
    bucket: elements of a gradient bucket (all models hold several times more). overlap: reduce during the backward.
    """

    family: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    dtype: str = "fp32"
    loss: str = "masked"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    clip: float = 1.0
    steps: int = STEPS
    bucket: int = 4000
    overlap: bool = True

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> tuple[int, int, int]:
        return self.tp, self.pp, self.dp

    def __str__(self) -> str:
        degrees = f"tp{self.tp}-pp{self.pp}-dp{self.dp}"
        return f"{self.family}-{degrees}-{self.schedule}-{self.recompute}-{self.dtype}-{self.loss}"

    def config(self) -> Config:
        return Config(
            model=FAMILIES[self.family].model(self.hidden_dropout, self.attention_dropout),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                pipeline_schedule=self.schedule,
                recompute_granularity="full" if self.recompute == "full" else None,
                ddp_bucket_size=self.bucket,
                no_overlap_grad_reduce=not self.overlap,
            ),
            train=TrainConfig(
                micro_batch_size=MICRO_BATCH,
                global_batch_size=GLOBAL_BATCH,
                train_iters=STEPS,
                bf16=self.dtype == "bf16",
                calculate_per_token_loss=self.loss == "per-token",
            ),
            optimizer=OptimizerConfig(
                lr=PEAK,
                lr_warmup_init=FIRST,
                lr_warmup_iters=WARMUP,
                weight_decay=WEIGHT_DECAY,
                clip_grad=self.clip,
            ),
            data=DataConfig(mock_data=True),
        )


def all_cases(largest_world: int = 8) -> list[Case]:
    """Every combination of ``AXES`` that runs on at most ``largest_world`` ranks."""
    cases = [Case(**dict(zip(AXES, values, strict=True))) for values in product(*AXES.values())]
    return [case for case in cases if case.world <= largest_world]


def sweep() -> list[Case]:
    """The full comparison, layout by layout: every combination with unevenly masked tokens."""
    return sorted((case for case in all_cases() if case.loss == "masked"), key=lambda case: (case.world, *case.layout))


def pairs(case: Case) -> frozenset[tuple]:
    """All pairs of axis values that a case meets."""
    return frozenset(combinations([(axis, getattr(case, axis)) for axis in AXES], 2))


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Greedily: the case that meets most pairs not met yet, of fewest ranks among equals, until none is left."""
    cases = list(cases)
    meets = [pairs(case) for case in cases]
    missing, chosen = frozenset().union(*meets), []
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(meets[i] & missing), -cases[i].world))
        chosen.append(cases[best])
        missing -= meets[best]
    return sorted(chosen, key=lambda case: case.world)


def bound(case: Case) -> int:
    """Seconds that a case may take before it counts as hung."""
    return 15 + 2 * case.world * case.steps // 4

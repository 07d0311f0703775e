"""What is compared: cases over the axes of parity, and a small choice of them that meets every pair
of values.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from random import Random

from megatron_merak.config import Config, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from megatron_merak.config.parallel import SHARDINGS
from megatron_merak.errors import ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule

from .families import FAMILIES, LAYERS

# 6 micro-batches of one replica, 3 of two: more and fewer than 4 stages
MICRO_BATCH, GLOBAL_BATCH = 2, 12
FIRST, PEAK, WARMUP, STEPS, WEIGHT_DECAY = 5e-4, 2e-3, 3, 10, 0.1

# it has grown in the third step
LOSS_SCALES = {"fp16": True, "initial_loss_scale": 2.0**8, "loss_scale_window": 2}
DRAWS, CANDIDATES = 60, 6  # in search of combinations with two given values

SWEPT = {"dtype": ("fp32", "bf16")}  # what every layout runs in
LAYERS_RECOMPUTED = {"uniform": 2, "block": 1}

AXES: dict[str, tuple] = {
    "family": tuple(FAMILIES),
    "tp": (1, 2, 4),
    "pp": (1, 2, 4),
    "dp": (1, 2),
    "schedule": tuple(BUILDERS),
    "recompute": ("none", "full", "uniform", "block"),
    "overlap": ("weight-gradient", "none", "sub-pipeline", "pair"),
    "sequence_parallel": (False, True),
    "sharding": SHARDINGS,
    "dtype": ("fp32", "bf16", "fp16"),
    "loss": ("full", "masked", "per-token"),
}


@cache
def stages_of(schedule: str, ranks: int, microbatches: int) -> float:
    """Stages of a schedule, infinitely many where it is not defined."""
    try:
        return build_schedule(schedule, ranks, microbatches).stages
    except ScheduleError:
        return math.inf


@dataclass(frozen=True)
class Case:
    """One training run.

    loss: 'full' masks no token; 'masked' masks unevenly, mean of micro-batch means; 'per-token'
          too, mean over tokens.
    hidden_dropout, attention_dropout: probabilities. clip: largest gradient norm, 0 for any. steps:
                                       optimizer steps.
    bucket: elements of a gradient bucket (all models hold several times more). early: reduce during
            the backward.
    schedule: a name, or the path of a file. sharding: what replicas share, all of them or those of
              an instance.
    micro_batch: its samples. sent_in_bf16: gradients between replicas. fp32_residual: of a 16-bit
                 model.
    """

    family: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    overlap: str = "weight-gradient"
    sequence_parallel: bool = False
    sharding: str = "no_shard"
    instances: int = 1
    micro_batch: int = MICRO_BATCH
    dtype: str = "fp32"
    loss: str = "masked"
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    clip: float = 1.0
    steps: int = STEPS
    bucket: int = 4000
    early: bool = True
    sent_in_bf16: bool = False
    fp32_residual: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> tuple[int, int, int]:
        return self.tp, self.pp, self.dp

    def __str__(self) -> str:
        degrees = f"tp{self.tp}-pp{self.pp}-dp{self.dp}"
        ways = f"{self.schedule}-{self.recompute}-{self.overlap}" + (
            "-sp" if self.sequence_parallel else ""
        )
        ways += "" if self.sharding == "no_shard" else f"-{self.sharding}"
        ways += "" if self.instances == 1 else f"-{self.instances}-instances"
        ways += "-sent_in_bf16" * self.sent_in_bf16 + "-fp32_residual" * self.fp32_residual
        return f"{self.family}-{degrees}-{ways}-{self.dtype}-{self.loss}"

    @property
    def possible(self) -> bool:
        """Whether there is such a run: enough units and micro-batches for the schedule, and
        collectives to overlap.
        """
        if self.sharding != "no_shard" and self.dp == 1:
            return False
        if self.sharding in SHARDINGS[2:] and self.overlap in ("sub-pipeline", "pair"):
            return False
        if self.tp == 1 and (self.sequence_parallel or self.overlap != "weight-gradient"):
            return False
        return (
            stages_of(self.schedule, self.pp, GLOBAL_BATCH // self.micro_batch // self.dp)
            <= LAYERS + 2
        )

    def config(self) -> Config:
        key = "pipeline_schedule" if self.schedule in AXES["schedule"] else "schedule_file"
        model = FAMILIES[self.family].model(self.hidden_dropout, self.attention_dropout)
        return Config(
            model=replace(model, fp32_residual_connection=self.fp32_residual),
            parallel=ParallelConfig(
                tensor_model_parallel_size=self.tp,
                pipeline_model_parallel_size=self.pp,
                **{key: self.schedule},
                recompute_granularity=None if self.recompute == "none" else "full",
                recompute_method=self.recompute if self.recompute in LAYERS_RECOMPUTED else None,
                recompute_num_layers=LAYERS_RECOMPUTED.get(self.recompute),
                tp_comm_overlap=self.overlap,
                sequence_parallel=self.sequence_parallel,
                data_parallel_sharding_strategy=self.sharding,
                num_distributed_optimizer_instances=self.instances,
                ddp_bucket_size=self.bucket,
                no_overlap_grad_reduce=not self.early,
                grad_reduce_in_bf16=self.sent_in_bf16,
            ),
            train=TrainConfig(
                micro_batch_size=self.micro_batch,
                global_batch_size=GLOBAL_BATCH,
                train_iters=STEPS,
                bf16=self.dtype == "bf16",
                **(LOSS_SCALES if self.dtype == "fp16" else {}),
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


def combinations_of(largest_world: int = 8, **given: tuple) -> list[Case]:
    """Every possible combination of ``AXES`` on at most ``largest_world`` ranks; ``given`` values
    of some axes only.
    """
    axes = AXES | given
    cases = (Case(**dict(zip(axes, values, strict=True))) for values in product(*axes.values()))
    return [case for case in cases if case.world <= largest_world and case.possible]


def layouts() -> list[Case]:
    """Every layout of every model, with unevenly masked tokens, as Megatron-LM would run it."""
    plain = {
        "schedule": ("gpipe", "1f1b"),
        "recompute": ("none", "full"),
        "overlap": ("weight-gradient",),
    } | SWEPT
    return combinations_of(
        loss=("masked",), sequence_parallel=(False,), sharding=("no_shard",), **plain
    )


def accelerated() -> list[Case]:
    """Every schedule with every recomputation and overlap, where all of them meet tensor and
    pipeline parallelism.
    """
    where = {"tp": (2,), "pp": (2, 4), "dp": (1,), "dtype": ("fp32",), "loss": ("masked",)}
    return combinations_of(family=("llama",), **where)


def divided() -> list[Case]:
    """Every model whose tensor-parallel ranks divide the sequence, in whole micro-batches and in
    halves.
    """
    where = {"tp": (2, 4), "pp": (1, 2), "dp": (1,), "schedule": ("1f1b",), "loss": ("masked",)}
    ways = {"recompute": ("none", "full"), "overlap": ("weight-gradient", "sub-pipeline")} | SWEPT
    return combinations_of(sequence_parallel=(True,), **where, **ways)


def shared() -> list[Case]:
    """Every model on every layout of two replicas that share all, and every schedule with whatever
    they share.
    """
    plain = {"recompute": ("none",), "overlap": ("weight-gradient",), "sequence_parallel": (False,)}
    every = combinations_of(
        schedule=("gpipe", "1f1b"), sharding=SHARDINGS[3:], loss=("masked",), **plain, **SWEPT
    )
    where = {
        "tp": (1,),
        "pp": (2,),
        "dp": (2,),
        "dtype": ("bf16",),
        "loss": ("per-token",),
        "family": ("gpt2",),
    }
    return [*every, *combinations_of(sharding=SHARDINGS[1:], **where, **plain)]


def sweep() -> list[Case]:
    """The full comparison, layout by layout."""
    cases = dict.fromkeys([*layouts(), *accelerated(), *divided(), *shared()])
    return sorted(cases, key=lambda case: (case.world, *case.layout))


def some_cases() -> list[Case]:
    """Combinations that meet every pair of values of ``AXES`` that can meet on 4 ranks; few enough to
    choose from. Degrees that need more ranks meet in the full sweep."""
    drawn = Random(7)
    found: dict[Case, None] = {}
    for (a, xs), (b, ys) in combinations(AXES.items(), 2):
        for x, y in product(xs, ys):
            draws = [
                {axis: drawn.choice(options) for axis, options in AXES.items()}
                for _ in range(DRAWS)
            ]
            cases = [
                case
                for values in draws
                if (case := Case(**values | {a: x, b: y})).world <= 4 and case.possible
            ]
            found |= dict.fromkeys(cases[:CANDIDATES])
    return list(found)


def pairs(case: Case) -> frozenset[tuple]:
    """All pairs of axis values that a case meets."""
    return frozenset(combinations([(axis, getattr(case, axis)) for axis in AXES], 2))


def pairwise(cases: Iterable[Case]) -> list[Case]:
    """Greedily: the case that meets most pairs not met yet, of fewest ranks among equals, until
    none is left.
    """
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

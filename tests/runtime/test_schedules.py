"""Every schedule on real ranks: gradients equal those of one process to the bit, whatever order the
ops run in.
"""

from dataclasses import replace

import pytest
import torch

from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.pipeline_parallel.builders import BUILDERS, build_schedule
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule
from megatron_merak.plan import Grid, Plan, StagePlan
from megatron_merak.planner.make import plan as make_plan
from tests.engines import gpt_trainer, gradient_step
from tests.parity.batches import replica_batch
from tests.parity.cases import Case
from tests.parity.rig import Shard, assemble, disturb, parts, spoil
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYERS = 6  # 8 units: two stages for each of four ranks


def split_weights(schedule: Schedule) -> Schedule:
    """The same order with each weight gradient as an op of its own, one op later than its
    backward.
    """
    programs = []
    for program in schedule.ranks:
        ops, waiting = [], []
        for op in program:
            ops.append(op)
            ops += waiting
            waiting = [Op(op.stage, Kind.W, op.microbatch)] if op.kind is Kind.B else []
        programs.append((*ops, *waiting))
    return replace(schedule, name=f"{schedule.name}+w", ranks=tuple(programs))


def recompute_early(schedule: Schedule) -> Schedule:
    """The same order with an R right before each backward but the last stage's."""
    last = schedule.stages - 1
    ranks = tuple(
        tuple(
            made
            for op in program
            for made in (
                (Op(op.stage, Kind.R, op.microbatch), op)
                if op.kind is Kind.B and op.stage < last
                else (op,)
            )
        )
        for program in schedule.ranks
    )
    return replace(schedule, name=f"{schedule.name}+r", ranks=ranks)


def run_together(schedule: Schedule) -> Schedule:
    """The same order with each backward and the forward behind it as one entry."""
    programs = []
    for program in schedule.ranks:
        entries = []
        for op in program:
            before = entries[-1] if entries else None
            if op.kind is Kind.F and isinstance(before, Op) and before.kind is Kind.B:
                entries[-1] = (op, before)
            else:
                entries.append(op)
        programs.append(tuple(entries))
    return replace(schedule, name=f"{schedule.name}+pairs", ranks=tuple(programs))


CHANGES = {
    "": lambda schedule: schedule,
    "w": split_weights,
    "r": recompute_early,
    "pairs": run_together,
}


def plan_of(case: Case, name: str, change: str, recompute: bool, overlap: str) -> Plan:
    """The case's plan with another schedule, its units spread evenly over the stages."""
    config = case.config()
    config = replace(config, model=replace(config.model, num_layers=LAYERS))
    made = make_plan(config, case.world)
    schedule = CHANGES[change](build_schedule(name, case.pp, made.num_microbatches))
    check(schedule)
    units, count = len(made.units), schedule.stages
    bounds = [units * stage // count for stage in range(count + 1)]
    again = range(1, units - 1) if recompute else ()
    stages = tuple(
        StagePlan(a, b, tuple(u for u in range(a, b) if u in again))
        for a, b in zip(bounds, bounds[1:], strict=False)
    )
    return replace(made, stages=stages, schedule=schedule, predicted_bytes=(), overlap=overlap)


def _run(rank: int, world: int, case: Case, variants) -> list[tuple[float | None, list[Shard]]]:
    mesh = build_mesh(Grid(tp=case.tp, dp=case.dp, pp=case.pp), rank, CPU)
    config = case.config()
    config = replace(config, model=replace(config.model, num_layers=LAYERS))
    found = []
    for variant in variants:
        trainer = gpt_trainer(config, plan_of(case, *variant), mesh)
        disturb(trainer)
        spoil(trainer.model.buffer)
        loss = gradient_step(trainer, replica_batch(case, 0, mesh.dp_rank))
        assert all(stage.parts == {} for stage in trainer.model.stages.values())
        found.append((loss, parts(trainer, trainer.model.buffer.main_grad)))
    return found


def gradients(case: Case, variants) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and full gradients of each variant."""
    ranks = (
        run_ranks(_run, case.world, case, variants, timeout=300)
        if case.world > 1
        else [_run(0, 1, case, variants)]
    )
    results = []
    for outcomes in zip(*ranks, strict=True):
        losses = {loss for loss, _ in outcomes if loss is not None}
        assert len(losses) == 1
        results.append((losses.pop(), assemble([shards for _, shards in outcomes])))
    return results


VARIANTS = [
    *(
        (name, change, recompute, "weight-gradient")
        for name in BUILDERS
        for change, recompute in (("", False), ("", True))
    ),
    ("1f1b", "w", False, "weight-gradient"),
    ("1f1b", "w", True, "none"),
    ("1f1b", "r", True, "weight-gradient"),
    ("gpipe", "r", True, "none"),
    ("1f1b", "pairs", True, "pair"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", pp=2, hidden_dropout=0.1, attention_dropout=0.1),
        pytest.param(Case("llama", pp=4, hidden_dropout=0.1), marks=pytest.mark.slow),
        Case("llama", pp=2, tp=2, loss="per-token"),
    ],
    ids=str,
)
def test_gradients_are_equal_to_the_bit(case):
    alone = replace(case, pp=1)
    ((loss, wanted),) = gradients(alone, [("1f1b", "", False, "weight-gradient")])
    variants = [v for v in VARIANTS if not (v[0] == "naive" and case.pp > 2)]
    for variant, (found_loss, found) in zip(variants, gradients(case, variants), strict=True):
        assert found_loss == loss, variant
        different = [name for name in wanted if not torch.equal(wanted[name], found[name])]
        assert not different, (variant, different)


HALVES = [
    ("1f1b", "", False, "sub-pipeline"),
    ("gpipe", "", True, "sub-pipeline"),
    ("1f1b", "w", True, "sub-pipeline"),
    ("1f1b", "r", True, "sub-pipeline"),
    ("1f1b", "pairs", False, "sub-pipeline"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "case", [Case("gpt2", tp=2), Case("llama", pp=2, tp=2, loss="per-token")], ids=str
)
def test_halves_give_the_same_gradients_but_for_the_order_of_sums(case):
    """With unequal numbers of valid tokens in the halves, too: all batches of these cases are
    masked unevenly.
    """
    ((loss, wanted), *found) = gradients(case, [("1f1b", "", False, "weight-gradient"), *HALVES])
    for variant, (found_loss, grads) in zip(HALVES, found, strict=True):
        assert found_loss == pytest.approx(loss, rel=1e-6), variant
        for name, grad in wanted.items():
            distance = (grads[name] - grad).norm() / grad.norm()
            assert distance < 2e-6, (variant, name, distance)
    assert any(not torch.equal(grads[name], wanted[name]) for name in wanted), (
        "the batches were not split"
    )

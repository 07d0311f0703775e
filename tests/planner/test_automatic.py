"""The plan of auto beside the plans of every builder: never slower within the same memory, and it says what decided."""

from dataclasses import replace
from random import Random

import pytest

from megatron_merak.cluster import Cluster, Device, Link
from megatron_merak.errors import MerakError, PlanError, ScheduleError
from megatron_merak.pipeline_parallel.builders import BUILDERS
from megatron_merak.pipeline_parallel.check import check
from megatron_merak.plan import Grid, Plan, Unit, plan_table
from megatron_merak.planner import plan_chain, priced
from megatron_merak.planner.automatic import largest
from megatron_merak.planner.recompute import Recompute

KINDS = (Recompute(), Recompute("full"))


def chain(draw: Random, count: int, uneven: bool) -> tuple[Unit, ...]:
    def unit(index: int) -> Unit:
        work = draw.uniform(0.5, 2) if uneven else 1.0
        saved = round(1000 * work)
        return Unit(
            f"layer.{index}",
            "layer",
            100,
            round(1e6 * work),
            saved,
            100,
            weight_bytes=saved // 2,
            products=((1, 1, 1),),
        )

    return tuple(map(unit, range(count)))


def asked(seed: int) -> dict:
    """A random pipeline: uneven stages, recomputation and slow links, each in half of the cases."""
    draw = Random(seed)
    uneven, recomputes, slow = (bool(seed >> bit & 1) for bit in range(3))
    ranks = draw.choice([2, 3, 4])
    units = chain(draw, draw.choice([2, 3]) * ranks + draw.randrange(3), uneven)
    link = Link("link", 1e-5 if slow else 0.0, 1e7 if slow else 1e12)
    device = Device("card", 1e12, 1e11, 1e12, 0, 1.0)
    return {
        "units": units,
        "grid": Grid(pp=ranks),
        "microbatches": draw.choice([ranks, 2 * ranks, 3 * ranks + 1]),
        "micro_batch_size": 1,
        "cluster": Cluster(device, 1, link, link, "own"),
        "recompute": KINDS[recomputes],
    }


def of_builder(arguments: dict, name: str, **more) -> Plan | None:
    try:
        return plan_chain(**arguments, schedule=name, **more)
    except MerakError:
        return None


@pytest.mark.parametrize("seed", range(16))
def test_auto_is_never_slower_than_a_builder_within_the_memory_of_1f1b(seed):
    arguments = asked(seed)
    plain, found = of_builder(arguments, "1f1b"), plan_chain(**arguments, schedule="auto")
    check(found.schedule)
    assert largest(found) <= largest(plain) and priced(found) == found
    compared = 0
    for name in BUILDERS:
        for chunks in (None, 3) if name == "interleaved" else (None,):
            built = of_builder(arguments, name, chunks=chunks)
            if built is not None and largest(built) <= largest(plain):
                compared += 1
                assert found.predicted_time <= built.predicted_time, name
    assert compared >= 2


@pytest.mark.parametrize("seed", range(0, 16, 3))
def test_auto_is_never_slower_than_a_builder_in_the_memory_of_a_rank(seed):
    arguments = asked(seed)
    memory = 1.6 * largest(of_builder(arguments, "1f1b")) / 2**30
    found = plan_chain(**arguments, schedule="auto", memory_gb=memory)
    assert largest(found) <= memory * 2**30 and "per rank, its memory" in found.schedule_note
    times = [of_builder(arguments, name, memory_gb=memory) for name in BUILDERS]
    assert found.predicted_time <= min(plan.predicted_time for plan in times if plan is not None)


def test_the_note_says_what_the_cap_is_and_which_placement_was_chosen():
    found = plan_chain(**asked(0), schedule="auto")
    head, *rows = found.schedule_note.splitlines()
    assert head.startswith("chosen by auto within ") and head.endswith(" per rank, the memory that 1f1b needs:")
    names = ["one stage per rank", "2 stages per rank, interleaved", "2 stages per rank, V-shaped"]
    assert [any(name in row for row in rows) for name in names] == [True] * 3
    (chosen,) = (row for row in rows if row.endswith("chosen"))
    stages = found.schedule.stages // found.grid.pp
    assert ("one stage" in chosen) == (stages == 1) and f"{1e3 * found.predicted_time:.3g} ms" in chosen
    assert found.schedule_note in plan_table(found) and Plan.from_json(found.to_json()) == found
    assert plan_chain(**asked(0)).schedule_note == ""


def test_even_stages_and_free_links_get_the_v():
    """Three equal ops: a V waits for its first input and its last output alone, one stage per rank for more."""
    draw = Random(0)
    arguments = asked(0) | {"units": chain(draw, 16, False), "grid": Grid(pp=4), "microbatches": 12}
    found = plan_chain(**arguments, schedule="auto")
    best = min(of_builder(arguments, name).predicted_time for name in ("1f1b", "zb-h1"))
    assert found.schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0) and found.predicted_time < best


def test_flags_decide_how_many_stages_a_rank_has():
    arguments = asked(0) | {"units": chain(Random(0), 8, False), "grid": Grid(pp=2), "microbatches": 4}
    for chunks in (1, 2, 3, 4):
        assert plan_chain(**arguments, schedule="auto", chunks=chunks).schedule.stages == 2 * chunks
    with pytest.raises(PlanError, match="10 stages .* need as many units, and the model is a chain of 8"):
        plan_chain(**arguments, schedule="auto", chunks=5)
    with pytest.raises(ScheduleError, match="--microbatch-group-size-per-virtual-pipeline-stage 2"):
        plan_chain(**arguments, schedule="auto", group=2)
    with pytest.raises(PlanError, match="2 stages .* need as many units, and the model is a chain of 1"):
        plan_chain(**arguments | {"units": arguments["units"][:1]}, schedule="auto")


def test_where_nothing_fits_the_memory_is_that_of_1f1b():
    arguments = asked(1)
    small = replace(arguments["cluster"], device=replace(arguments["cluster"].device, memory=100))
    found = plan_chain(**arguments | {"cluster": small}, schedule="auto")
    assert largest(found) <= largest(plan_chain(**arguments | {"cluster": small}))
    assert "the memory that 1f1b needs, since no schedule fits into 75 B" in found.schedule_note
    with pytest.raises(PlanError, match="--device-memory-gb"):
        plan_chain(**arguments, schedule="auto", memory_gb=1e-7)


def test_the_search_tells_how_far_it_is():
    shares = []
    plan_chain(**asked(3), schedule="auto", report_progress=shares.append)
    assert shares == sorted(shares) and 0 < shares[0] and shares[-1] <= 1

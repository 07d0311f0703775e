"""The plan of auto beside the plans of every builder: never slower within the same memory, and it
says what decided.
"""

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
from tests.requests import request

KINDS = (None, "full")


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
        "cluster": Cluster(device, 1, link, link, "own"),
        "recompute_granularity": KINDS[recomputes],
    }


def planned(arguments: dict, name: str, report_progress=lambda share: None, **more) -> Plan:
    given = arguments | {"pipeline_schedule": name} | more
    units, cluster = given.pop("units"), given.pop("cluster")
    return plan_chain(units, request(**given), cluster, report_progress=report_progress)


def of_builder(arguments: dict, name: str, **more) -> Plan | None:
    try:
        return planned(arguments, name, **more)
    except MerakError:
        return None


@pytest.mark.parametrize("seed", range(16))
def test_auto_is_never_slower_than_a_builder_within_the_memory_of_1f1b(seed):
    arguments = asked(seed)
    plain, found = of_builder(arguments, "1f1b"), planned(arguments, "auto")
    check(found.schedule)
    assert largest(found) <= largest(plain) and priced(found) == found
    compared = 0
    for name in BUILDERS:
        for chunks in (None, 3) if name == "interleaved" else (None,):
            built = of_builder(arguments, name, num_virtual_stages_per_pipeline_rank=chunks)
            if built is not None and largest(built) <= largest(plain):
                compared += 1
                assert found.predicted_time <= built.predicted_time, name
    assert compared >= 2


@pytest.mark.parametrize("seed", range(0, 16, 3))
def test_auto_is_never_slower_than_a_builder_in_the_memory_of_a_rank(seed):
    arguments = asked(seed)
    memory = 1.6 * largest(of_builder(arguments, "1f1b")) / 2**30
    found = planned(arguments, "auto", device_memory_gb=memory)
    assert largest(found) <= memory * 2**30 and "per rank, its memory" in found.schedule_note
    times = [of_builder(arguments, name, device_memory_gb=memory) for name in BUILDERS]
    assert found.predicted_time <= min(plan.predicted_time for plan in times if plan is not None)


def test_the_note_says_what_the_cap_is_and_which_placement_was_chosen():
    found = planned(asked(0), "auto")
    head, *rows = found.schedule_note.splitlines()
    assert head.startswith("chosen by auto within ") and head.endswith(
        " per rank, the memory that 1f1b needs:"
    )
    names = ["one stage per rank", "2 stages per rank, interleaved", "2 stages per rank, V-shaped"]
    assert [any(name in row for row in rows) for name in names] == [True] * 3
    (chosen,) = (row for row in rows if row.endswith("chosen"))
    stages = found.schedule.stages // found.grid.pp
    assert ("one stage" in chosen) == (
        stages == 1
    ) and f"{1e3 * found.predicted_time:.3g} ms" in chosen
    assert found.schedule_note in plan_table(found) and Plan.from_json(found.to_json()) == found
    assert planned(asked(0), "1f1b").schedule_note == ""


def test_even_stages_and_free_links_get_the_v():
    """Three equal ops: a V waits for its first input and its last output alone, one stage per rank
    for more. It sends twice the messages, so that 1F1B needs a little less memory.
    """
    draw = Random(0)
    arguments = asked(0) | {"units": chain(draw, 16, False), "grid": Grid(pp=4), "microbatches": 12}
    needs = largest(of_builder(arguments, "zb-v"))
    assert needs < 1.1 * largest(of_builder(arguments, "1f1b"))
    device = replace(arguments["cluster"].device, memory=needs, reserve=0)
    arguments |= {"cluster": replace(arguments["cluster"], device=device)}
    found = planned(arguments, "auto")
    best = min(of_builder(arguments, name).predicted_time for name in ("1f1b", "zb-h1"))
    assert found.schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0) and found.predicted_time < best


def test_flags_decide_how_many_stages_a_rank_has():
    arguments = asked(0) | {
        "units": chain(Random(0), 8, False),
        "grid": Grid(pp=2),
        "microbatches": 4,
    }
    for chunks in (1, 2, 3, 4):
        assert (
            planned(arguments, "auto", num_virtual_stages_per_pipeline_rank=chunks).schedule.stages
            == 2 * chunks
        )
    with pytest.raises(
        PlanError, match="10 stages .* need as many units, and the model is a chain of 8"
    ):
        planned(arguments, "auto", num_virtual_stages_per_pipeline_rank=5)
    with pytest.raises(ScheduleError, match="--microbatch-group-size-per-virtual-pipeline-stage 2"):
        planned(arguments, "auto", microbatch_group_size_per_virtual_pipeline_stage=2)
    with pytest.raises(
        PlanError, match="2 stages .* need as many units, and the model is a chain of 1"
    ):
        planned(arguments | {"units": arguments["units"][:1]}, "auto")


def test_where_nothing_fits_the_memory_is_that_of_1f1b():
    arguments = asked(1)
    small = replace(arguments["cluster"], device=replace(arguments["cluster"].device, memory=100))
    found = planned(arguments | {"cluster": small}, "auto")
    assert largest(found) <= largest(planned(arguments | {"cluster": small}, "1f1b"))
    assert "the memory that 1f1b needs, since no schedule fits into 75 B" in found.schedule_note
    with pytest.raises(PlanError, match="--device-memory-gb"):
        planned(arguments, "auto", device_memory_gb=1e-7)


def test_the_search_tells_how_far_it_is():
    shares = []
    planned(asked(3), "auto", report_progress=shares.append)
    assert shares == sorted(shares) and 0 < shares[0] and shares[-1] <= 1

"""The benchmark of recomputation: every method plans a layout, none is slower than recomputing all,
and the premises of the paper's rule are as its page says.
"""

import pytest

from benchmarks.modelled.recompute import DOCUMENT, SCHEDULES, Case, page, premises_of
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.plan import Grid, StagePlan, Unit
from megatron_merak.planner.memory import Ledger


def test_recomputing_less_takes_less_time_on_one_layout():
    case = Case("1.5B", Grid(tp=1, dp=2, pp=4), 16)
    assert case.plan("none", "1f1b") is None, "it does not fit"
    for schedule in SCHEDULES:
        full, fewest = case.plan("full", schedule), case.plan("capacity", schedule)
        assert fewest.predicted_time <= case.unbalanced(schedule) <= full.predicted_time


def test_the_premises_of_the_rule_are_as_the_page_says():
    found = premises_of(Case("1.5B", Grid(tp=1, dp=2, pp=4), 16))
    assert found.kinds_of_layers() == 1 and found.head() > 1
    assert found.in_flight(found.aware) == [4, 3, 2, 1]
    assert found.in_flight(found.shifted) == [4, 3, 3, 1]
    first, *others = found.kept()
    sizes = [stage.last - stage.first for stage in found.aware.stages]
    assert others[:2] == [first * 3 // 2, first * 3 // 1] and others[2] == sizes[3] - 1
    assert max(found.static()) > 1.1 * min(found.static())
    assert max(found.unused()) > 10 * min(found.unused()) > 0
    assert max(found.base_rounds()) < 1.1 * min(found.base_rounds())
    assert max(found.rounds()) > 1.25 * min(found.rounds())


LAYERS = 12
TAPE = 1000  # of a layer; its input has 1 byte


def _activations(schedule: str, kept: tuple[int, ...]) -> list[int]:
    """The activations of stages of equal layers, in tapes."""
    units = [Unit(f"layer.{n}", "layer", 0, 1, TAPE, 1) for n in range(LAYERS * len(kept))]
    ledger = Ledger(units, build_schedule(schedule, len(kept), 8), "float32")
    starts = range(0, len(units), LAYERS)
    stages = [
        StagePlan(start, start + LAYERS, tuple(range(start, start + LAYERS - keep)))
        for start, keep in zip(starts, kept, strict=True)
    ]
    return [round(memory.activations / TAPE) for memory in ledger.together(stages)]


def test_equal_memory_of_stages_that_are_recomputed_by_layers_is_another_ratio():
    """The rule has 2 3 6 for what its formula calls equal; with the running micro-batch they are
    not.
    """
    assert _activations("1f1b", (2, 3, 6, 12)) == [4 * 2, 3 * 3, 2 * 6, 12]
    assert _activations("1f1b", (3, 4, 6, 12)) == [12] * 4


def test_a_stage_that_is_recomputed_at_once_has_all_its_activations_while_it_runs():
    waiting = [3 * 2, 2 * 3, 1 * 6]
    assert _activations("early-recompute", (2, 3, 6, 12))[:3] == [LAYERS + n for n in waiting]


def test_other_schedules_hold_as_many_micro_batches_on_every_stage():
    units = [Unit(f"layer.{n}", "layer", 0, 1, TAPE, 1) for n in range(8)]
    for name, count in (("gpipe", 8), ("zb-h1", 4)):
        ledger = Ledger(units, build_schedule(name, 4, 8), "float32")
        most = [sum(count for _, count in max(moment, key=len)) for moment in ledger.moments]
        assert most == [count] * 4, name


@pytest.mark.long
def test_the_page_is_what_the_planner_says():
    assert DOCUMENT.read_text(encoding="utf-8") == page()

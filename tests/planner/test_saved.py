"""What micro-batches keep, against a walk that follows every block of every micro-batch."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_merak.pipeline_parallel.builders import BUILDERS
from megatron_merak.pipeline_parallel.ops import Kind, ops_of
from megatron_merak.plan import StagePlan, Unit
from megatron_merak.planner.saved import footprint, moments, peak


class Rank:
    """A rank that really holds things: (stage, micro-batch, unit or input) -> bytes."""

    def __init__(self, units, stages):
        self.units, self.stages, self.held, self.most = units, stages, {}, 0

    def hold(self, key, size):
        self.held[key] = size
        self.most = max(self.most, sum(self.held.values()))

    def drop(self, key):
        self.held.pop(key, None)

    def entering(self, unit, first):
        if not unit:
            return 0
        before = self.units[unit - 1]
        return before.output_bytes if unit == first else before.output_bytes - before.passed_bytes

    def forward(self, stage, k):
        plan = self.stages[stage]
        inner = [unit for run in plan.runs for unit in run[1:]]
        for unit in plan.units:
            self.hold((stage, k, "input", unit), self.entering(unit, plan.first))
            self.hold((stage, k, "tape", unit), self.units[unit].saved_bytes)
            if unit in plan.recompute:
                self.drop((stage, k, "tape", unit))
            if unit in inner:
                self.drop((stage, k, "input", unit))

    def recompute(self, stage, k, run):
        for unit in run:
            self.hold((stage, k, "input", unit), self.entering(unit, self.stages[stage].first))
            self.hold((stage, k, "tape", unit), self.units[unit].saved_bytes)

    def backward(self, stage, k, early, split):
        plan, run_of = self.stages[stage], {run[-1]: run for run in self.stages[stage].runs}
        done = set()
        for unit in reversed(plan.units):
            if unit in run_of and not early:
                self.recompute(stage, k, run_of[unit])
            done.add(unit)
            block = next((run for run in plan.runs if unit in run), (unit,))
            if not set(block) <= done:
                # the tape of a run goes behind its first unit: inputs and products share it
                continue
            for each in block:
                self.drop((stage, k, "input", each))
                self.drop((stage, k, "tape", each))
            for each in block if split else ():
                self.hold((stage, k, "held", each), self.units[each].held_bytes)


def walked(schedule, rank, units, stages):
    """The most bytes that a rank holds."""
    ops = [op for entry in schedule.ranks[rank] for op in ops_of(entry)]
    kinds = defaultdict(set)
    for op in ops:
        kinds[op.kind].add((op.stage, op.microbatch))
    holder = Rank(units, stages)
    for op in ops:
        key = op.stage, op.microbatch
        if op.kind is Kind.F:
            holder.forward(*key)
        elif op.kind is Kind.R:
            for run in reversed(stages[op.stage].runs):
                holder.recompute(*key, run)
        elif op.kind is Kind.B:
            holder.backward(*key, key in kinds[Kind.R], key in kinds[Kind.W])
        else:
            for unit in stages[op.stage].units:
                holder.drop((*key, "held", unit))
    return holder.most


@given(st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("name", BUILDERS)
def test_the_peak_is_that_of_a_walk(name, data):
    ranks, microbatches = data.draw(st.integers(2, 4)), data.draw(st.integers(4, 9))
    schedule = BUILDERS[name].build(ranks, microbatches)
    count = schedule.stages * 3
    sizes = st.integers(0, 50)
    units = []
    for index in range(count):
        output = data.draw(sizes)
        passed = data.draw(st.integers(0, output)) if index else 0
        made = Unit(
            f"u{index}",
            "u",
            0,
            1,
            data.draw(sizes),
            output,
            passed_bytes=passed,
            weight_bytes=data.draw(sizes),
        )
        units.append(made)
    stages = []
    for stage in range(schedule.stages):
        again = data.draw(st.lists(st.integers(3 * stage, 3 * stage + 2), unique=True))
        stages.append(
            StagePlan(3 * stage, 3 * stage + 3, tuple(sorted(again)), data.draw(st.integers(1, 3)))
        )
    for rank in range(ranks):
        mine = {
            s: footprint(units, stages[s])
            for s in range(schedule.stages)
            if schedule.rank_of(s) == rank
        }
        assert sum(peak(moments(schedule, rank), mine).values()) == walked(
            schedule, rank, units, stages
        )

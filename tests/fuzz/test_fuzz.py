"""Random modules on simulated ranks against their eager selves; `make fuzz-graph` runs thousands of
them.
"""

from dataclasses import replace

import pytest
import torch

from megatron_merak.errors import PlanError
from tests.fuzz.check import Subject, Way, check, compare, report, step_of_process, ways
from tests.fuzz.draw import HEAD
from tests.fuzz.grammar import recipe
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

MODULES = 200
AT_ONCE = 20


@pytest.mark.parametrize("first", range(0, MODULES, AT_ONCE))
def test_random_modules(first):
    shares = []
    for seed in range(first, first + AT_ONCE):
        way = ways(seed)[0]
        try:
            subject = Subject(recipe(seed), way.dtype)
            for way in ways(seed):
                shares.append(check(subject, way))
        except Exception as error:
            raise AssertionError(report(recipe(seed), way)) from error
    divided = [share for share in shares if share is not None]
    assert len(divided) > 0.7 * len(shares) and sum(divided) / len(divided) < 0.85, (
        "little is put to the test"
    )


@pytest.mark.parametrize("first", [1, pytest.param(1001, marks=pytest.mark.slow)])
def test_random_plans(first):
    """What a plan says of a few weights is done, or refused; it changes neither loss nor
    gradients.
    """
    shares = []
    for seed in range(first, first + (10 if first == 1 else 600)):
        subject = Subject(recipe(seed))
        for way in ways(seed):
            way = replace(way, edits=seed, dtype=torch.float64)
            try:
                shares.append(check(subject, way))
            except Exception as error:
                raise AssertionError(report(recipe(seed), way)) from error
    assert sum(share is not None for share in shares) > 0.3 * len(shares), "most plans are refused"


WRITTEN = """
        self.table, self.into, self.out = nn.Embedding(67, 16), nn.Linear(16, 70), nn.Linear(70, 16)

    def forward(self, ids, labels):
        h = self.into(self.table(ids))
        rows = h.view(-1, 70)
        rows.clamp_(min=-0.4)
        rows[3].zero_()
        return self.out(h).square().mean()
"""
SHIFTED = """
        self.table, self.into, self.out = nn.Embedding(67, 24), nn.Linear(24, 129), nn.Linear(129, 24)

    def forward(self, ids, labels):
        x = self.table(ids)
        y = self.into(x).clone()
        moved = torch.zeros_like(y)
        moved[:, 2:] = y[:, :-2]
        x = x + torch.tanh(self.out((y + moved).cos()))
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), labels.flatten())
"""
FOUND = {  # what it found
    "a product is written in place through a view": WRITTEN,
    "what all context ranks compute of shards is read by parts": SHIFTED,
}


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("way", [Way(1), Way(2, 2, True), Way(2, cp=2)], ids=str)
def test_found_before(found, way):
    check(Subject(recipe(0), text=HEAD + FOUND[found].lstrip("\n")), way)


def real_processes(rank, world_size, seeds):
    divided = 0
    for seed in seeds:
        way = Way(world_size, 1 + seed % 3, seed % 2 == 0, sequence=seed % 2 == 1)
        subject = Subject(recipe(seed), way.dtype)
        try:
            sharding, loss, found = step_of_process(subject, way, rank)
        except PlanError:  # no weight can be sharded
            continue
        divided += 1
        compare(subject, way, sharding, rank, loss, found)
    return divided


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_modules_on_processes(world_size):
    assert min(run_ranks(real_processes, world_size, range(MODULES, MODULES + 6), timeout=200)) >= 4

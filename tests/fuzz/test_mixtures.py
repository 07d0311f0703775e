"""Random mixtures of experts on simulated ranks against their eager selves: experts that ranks shard,
divide, or both.
"""

from unittest import mock

import pytest
import torch

from megatron_merak.graph.sharding import local
from tests.fuzz.check import Mismatch, Subject, Way, check, report, ways_of_experts
from tests.fuzz.draw import HEAD
from tests.fuzz.grammar import mixture, recipe

QUICK = (0, 6)
MODULES = 60
AT_ONCE = 10


def shares(seeds):
    """The share of the parameters that a rank holds, of all ways; None of those that are refused."""
    found = []
    for seed in seeds:
        way = ways_of_experts(seed)[0]
        try:
            subject = Subject(mixture(seed))
            for way in ways_of_experts(seed):
                found.append(check(subject, way))
        except Exception as error:
            raise AssertionError(report(mixture(seed), way)) from error
    return found


@pytest.mark.parametrize("seed", QUICK)
def test_a_mixture(seed):
    assert sum(share is not None for share in shares([seed])) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10, 10 + MODULES, AT_ONCE))
def test_random_mixtures(first):
    found = shares(range(first, first + AT_ONCE))
    divided = [share for share in found if share is not None]
    assert len(divided) > 0.7 * len(found), "little is put to the test"
    assert sum(divided) / len(divided) < 0.85, "little is divided"


# rows of the experts whose features a layer in front of them shards, without a sum behind it
SHARDED_ROWS = """
        self.table, self.into = nn.Embedding(67, 16), nn.Linear(16, 16)
        self.up, self.gate = nn.Parameter(torch.zeros(4, 16, 24)), nn.Linear(16, 4)
        self.down = nn.Parameter(torch.zeros(4, 24, 16))

    def forward(self, ids, labels):
        x = self.into(self.table(ids)).tanh().flatten(0, 1)
        best = self.gate(x).softmax(-1).topk(1, -1)
        numbers, order = torch.sort(best.indices.flatten())
        counts = torch.histc(numbers.float(), 4, 0, 3).cumsum(0).to(torch.int32)
        h = torch.ops.transformers.grouped_mm_fallback(x[order], self.up, counts).tanh()
        y = torch.ops.transformers.grouped_mm_fallback(h, self.down, counts)
        return (y[order.argsort()] * best.values).square().mean()
"""


@pytest.mark.parametrize("way", [Way(2, sequence=True, ep=2), Way(2, sequence=True)], ids=str)
def test_found_before(way):
    check(Subject(recipe(0), text=HEAD + SHARDED_ROWS.lstrip("\n")), way)


def first_shard(rows, counts, shards):
    pieces = rows.split(counts[0].tolist())
    return torch.cat(pieces[::shards])


def by_rank(got, rows):
    return torch.arange(len(rows))


FAULTS = {
    "parts of a row that are not added up": ("sums_of_shards", first_shard),
    "biases of experts that every rank adds": ("on_first", lambda x, shard: x),
    "rows by the rank that they came from": ("order_by_expert", by_rank),
    "dropped rows of other experts": ("counted_rows", lambda x, counts: x),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault):
    name, faulty = FAULTS[fault]
    for seed in range(MODULES):
        subject = Subject(mixture(seed))
        for way in ways_of_experts(seed)[:3]:
            try:
                with mock.patch.object(local, name, faulty):
                    check(subject, way)
            except (Mismatch, AssertionError, RuntimeError):
                return
    raise AssertionError(f"no mixture shows {fault}")

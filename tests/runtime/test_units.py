"""Replicas that share gradients, or gradients and parameters: what is there when, and what it adds
up to.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak.config import OptimizerConfig
from megatron_merak.optimizer.adamw import AdamW
from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer, ShardedState
from megatron_merak.parallel.pieces import Pieces
from megatron_merak.pipeline_parallel.ops import Kind
from megatron_merak.runtime.shards import ShardGatherer
from megatron_merak.runtime.units import ShardedPass, UnitShards, visits_of
from megatron_merak.runtime.weights import Gradient
from tests.ranks import run_ranks

CONFIG = OptimizerConfig(lr=1e-2, clip_grad=1.0)
UNITS, MICRO_BATCHES, STEPS = 5, 3, 2
READS = (
    {0: ["table", "tied"]}
    | {k: [f"{k}.weight", f"{k}.bias"] for k in range(1, 4)}
    | {4: ["gate", "tied"]}
)


def summary(visits):
    return [f"{visit.unit}{'c' * visit.computes}{'r' * visit.reduces}" for visit in visits]


def test_a_pass_visits_units_in_the_order_in_which_it_computes():
    units, recompute = (3, 4, 5, 6), [(4, 5), (6,)]
    assert summary(visits_of(Kind.F, units, recompute)) == ["3c", "4c", "5c", "6c"]
    assert summary(visits_of(Kind.B, units, ())) == ["6cr", "5cr", "4cr", "3cr"]
    assert summary(visits_of(Kind.B, units, recompute)) == ["6cr", "4c", "5cr", "4cr", "3cr"]
    assert summary(visits_of(Kind.B, units, (), defer=True)) == ["6c", "5c", "4c", "3c"]
    assert summary(visits_of(Kind.R, units, recompute)) == ["6c", "4c", "5c"]
    assert summary(visits_of(Kind.W, units, ())) == ["6r", "5r", "4r", "3r"]


@pytest.mark.parametrize("paged", [True, False])
def test_views_of_a_piece_outlive_its_memory(paged):
    pieces = Pieces(
        [(0, 6), (6, 10)], {"a": (1, 5, (2, 2)), "b": (6, 9, (3,))}, torch.float32, "cpu", paged
    )
    assert not pieces.allocated(0) and not pieces.allocated(1) and pieces.named["a"].shape == (2, 2)
    for value in (1.0, 2.0):
        pieces.allocate(0)
        pieces[0:6].copy_(torch.arange(6.0) * value)
        assert torch.equal(pieces.named["a"], torch.tensor([[1.0, 2], [3, 4]]) * value)
        pieces.release(0)
        assert not pieces.allocated(0) and not pieces.allocated(1)
    if not paged:
        assert pieces.piece(0).untyped_storage().nbytes() == 0


def resident(paged):
    """MiB that a process has beside what it had before: with 3 of 6 pieces of 16 MiB filled, with
    1, with none.
    """
    count = 4 << 20
    pieces = Pieces(
        [(k * count, (k + 1) * count) for k in range(6)], {}, torch.float32, "cpu", paged
    )
    before, found = memory(), []
    for number in range(3):
        pieces.allocate(number)
        pieces.piece(number).fill_(1)
    found.append(memory() - before)
    for number in range(2):
        pieces.release(number)
        found.append(memory() - before)
    pieces.release_all()
    return [*found, memory() - before]


def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def on_a_rank(rank, world_size):
    return resident(True)


def test_released_pieces_are_given_back():
    assert run_ranks(on_a_rank, 1)[0] == pytest.approx([48, 32, 16, 0], abs=3)


def entries():
    shapes = {"table": (70, 9), "tied": (33, 7), "gate": (5,)}
    shapes |= {f"{k}.weight": (40, 30) for k in range(1, 4)} | {
        f"{k}.bias": (30,) for k in range(1, 4)
    }
    seen, found = set(), []
    for unit in range(UNITS):
        names = [name for name in READS[unit] if name not in seen]
        seen |= {*names}
        found.append(
            [BufferEntry(n, shapes[n], int(len(shapes[n]) < 2), fp32=n == "gate") for n in names]
        )
    return found


def whole(shape, seed):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def gradient(name, shape, step, microbatch, rank):
    return whole(shape, hash((len(name), ord(name[0]), step, microbatch, rank)) % 2**31)


def pass_over(shards, buffer, kind, skipped, work, last=False):
    """One pass, as a stage makes it; a graph may have no step in the unit ``skipped``."""
    most = [0, 0]
    sharded_pass = ShardedPass(shards, visits_of(kind, range(UNITS), ()), last=last)
    for visit in visits_of(kind, range(UNITS), ()):
        if visit.unit != skipped:
            sharded_pass.reach(visit.unit)
            for name in READS[visit.unit]:
                work(name)
        for at, flat in enumerate((buffer.data, buffer.main_grad)):
            if isinstance(flat, Pieces):
                most[at] = max(most[at], sum(map(flat.allocated, range(len(flat)))))
    sharded_pass.end()
    return most


def divided(rank, world_size, instances):
    """The ranks that share, and those that own the same shards; as many, and which of them this one
    is.
    """
    if instances == 1:
        return dist.group.WORLD, None, world_size, rank
    size = world_size // instances
    inside = [dist.new_group([*range(first, first + size)]) for first in range(0, world_size, size)]
    across = [dist.new_group([*range(place, world_size, size)]) for place in range(size)]
    return inside[rank // size], across[rank % size], size, rank % size


def trained(rank, world_size, dtype, sharding, overlap, in_bf16=False, instances=1):
    group, across, *place = divided(rank, world_size, instances)
    buffer = ParameterBuffer(entries(), dtype, "cpu", None, *place, ShardedState(sharding))
    for buckets in buffer.filling():
        for name in (name for bucket in buckets for name in bucket.names):
            buffer.parameter(name).copy_(whole(buffer.slots[name].shape, len(name) + ord(name[0])))
    buffer.refresh_master()
    optimizer = AdamW(buffer, CONFIG, None, group)
    grads = {name: Gradient(buffer.grad(name)) for name in buffer.slots}
    shards = UnitShards(
        buffer,
        group,
        grads,
        READS,
        overlap=overlap,
        replicate_group=across,
        group=dist.group.WORLD,
        in_bf16=in_bf16,
    )
    gatherer = ShardGatherer(buffer, group, overlap)
    most, norms = [0, 0], []
    for step in range(STEPS):
        shards.gradients.start()
        for microbatch in range(MICRO_BATCHES):
            gatherer.finish()
            read = {}
            skipped = 2 if rank == 0 and microbatch == 1 else None
            seen = pass_over(
                shards,
                buffer,
                Kind.F,
                skipped,
                lambda n, r=read: r.update({n: buffer.parameter(n).clone()}),
            )
            assert read.keys() >= buffer.slots.keys() - set(READS[2] if skipped else ())

            def add(name, read=read, at=(step, microbatch, rank)):
                assert torch.equal(buffer.parameter(name), read[name])
                grads[name].add(gradient(name, buffer.slots[name].shape, *at))

            last = microbatch == MICRO_BATCHES - 1
            seen = [*map(max, seen, pass_over(shards, buffer, Kind.B, skipped, add, last))]
            assert last or not shards.gradients._sums, (
                "shards are summed over instances once a step"
            )
            most = [*map(max, most, seen)]
        # But for what the last unit has added to, all of them are on their way when the backward
        # ends.
        assert instances == 1 or len(shards.gradients._sums) >= len(buffer.buckets) - 3
        shards.gradients.finish()
        norms.append(optimizer.step([(1e-2, 0.1), (1e-2, 0.0)]).grad_norm)
        gatherer.launch()
    gatherer.gather()
    found = {name: buffer.parameter(name).clone() for name in buffer.slots}
    kept = sum(own.nbytes for own in (*buffer.own_data, *buffer.own_grads))
    return found, norms, most, kept


def expected(world_size, dtype):
    """The same on one rank that has all, where a skipped unit has no gradient."""
    buffer = ParameterBuffer(entries(), dtype, "cpu", None)
    for name, slot in buffer.slots.items():
        buffer.parameter(name).copy_(whole(slot.shape, len(name) + ord(name[0])))
    buffer.refresh_master()
    optimizer, norms = AdamW(buffer, CONFIG), []
    for step in range(STEPS):
        for name, slot in buffer.slots.items():
            buffer.grad(name).zero_()
            for rank in range(world_size):
                for microbatch in range(MICRO_BATCHES):
                    times = sum(name in names for names in READS.values())
                    if not (rank == 0 and microbatch == 1 and name in READS[2]):
                        buffer.grad(name).add_(
                            gradient(name, slot.shape, step, microbatch, rank), alpha=times
                        )
        norms.append(optimizer.step([(1e-2, 0.1), (1e-2, 0.0)]).grad_norm)
    return {name: buffer.parameter(name).clone() for name in buffer.slots}, norms


WAYS = [(2, 3, True, False), (3, 3, False, False), (3, 2, True, False), (2, 3, True, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size, sharding, overlap, in_bf16", WAYS)
def test_steps_are_those_of_a_rank_that_has_all(world_size, sharding, overlap, in_bf16, dtype):
    """Gradients are integers, so sums are exact; a tied parameter is used twice, and one graph
    lacks a unit.
    """
    weights, norms = expected(world_size, dtype)
    for found, told_norms, (data, grad), _ in run_ranks(
        trained, world_size, dtype, sharding, overlap, in_bf16
    ):
        assert told_norms == pytest.approx(norms, rel=1e-12)
        for name, value in weights.items():
            assert torch.equal(found[name], value), name
        assert 0 < grad <= 4, "a unit has two buckets at most, and two units have gradients"
        assert 0 < data <= 4 if sharding == 3 else data == 0


@pytest.mark.parametrize(
    "dtype, sharding, in_bf16", [(torch.float32, 3, False), (torch.bfloat16, 2, True)]
)
def test_so_are_those_of_two_instances(dtype, sharding, in_bf16):
    weights, norms = expected(4, dtype)
    for found, told_norms, *_ in run_ranks(trained, 4, dtype, sharding, True, in_bf16, 2):
        assert told_norms == pytest.approx(norms, rel=1e-12)
        for name, value in weights.items():
            assert torch.equal(found[name], value), name

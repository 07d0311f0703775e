"""What ranks of mpirun do: ``python -m tests.parallel.mpi_ranks NAME``; each prints what differs."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_merak.errors import LaunchError
from megatron_merak.parallel.launch import launch, leave
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.parallel.collectives import each_collective, whole

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def collectives(world):
    """Every collective, at once and later, small and large, in groups of all ranks and of two."""
    mesh = build_mesh(Grid(tp=2, dp=world.size // 2), world.rank, world.device)
    for group in (dist.group.WORLD, mesh.tp, mesh.dp, mesh.control):
        n = dist.get_world_size(group)
        for dtype in TYPES:
            for size in (1, 7, 60_000):
                given = whole(size, n, n * size, dtype)
                for later in (False, True):
                    each = [*each_collective(dist.get_rank(group), n, given, size, group, later)]
                    for name, work, found, wanted in reversed(each):
                        if later:
                            work.wait()
                        same = zip(found, wanted, strict=True)
                        if not all(torch.equal(one, other) for one, other in same):
                            yield f"{name} {dtype} {size}"


def sums(world):
    """In the order of ranks, in fp32 for 16-bit types: large and small ones."""
    for dtype in (torch.float32, torch.bfloat16):
        for size in (5, 50_001):
            generator = torch.Generator().manual_seed(size)
            parts = torch.randn(world.size, size, generator=generator).to(dtype)
            wanted = parts[0].float()
            for part in parts[1:]:
                wanted = wanted + part.float()
            found = parts[world.rank].clone()
            dist.all_reduce(found)
            if not torch.equal(found, wanted.to(dtype)):
                yield f"sum {dtype} {size}"
            strided = torch.zeros(2, size, dtype=dtype).T
            strided[:, 1] = parts[world.rank]
            dist.all_reduce(strided[:, 1])
            if not torch.equal(strided[:, 1], wanted.to(dtype)):
                yield f"sum of a column {dtype} {size}"
    try:
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.BAND)
        yield "a bitwise reduction was not refused"
    except LaunchError as error:
        if "Use a sum, product, minimum or maximum" not in str(error):
            yield str(error)


def messages(world):
    """By tag, in any order, of any type; and rows that ranks have different numbers of."""
    after = (world.rank + 1) % world.size
    before = (world.rank - 1) % world.size
    sizes = (3, 200_000, 0)
    sent = [torch.full((size,), float(world.rank * 10 + tag)) for tag, size in enumerate(sizes)]
    works = [dist.isend(tensor, after, tag=tag) for tag, tensor in enumerate(sent)]
    for tag in reversed(range(3)):
        found = torch.empty(sizes[tag])
        work = dist.irecv(found, before, tag=tag)
        work.wait()
        if not torch.equal(found, torch.full((sizes[tag],), float(before * 10 + tag))):
            yield f"message {tag}"
        if not work.is_completed():
            yield f"message {tag} is not complete"
    for work in works:
        work.wait()
    rows = [rank + 1 for rank in range(world.size)]
    given = torch.full((sum(rows), 2), world.rank, dtype=torch.bfloat16)
    got = torch.empty(rows[world.rank] * world.size, 2, dtype=torch.bfloat16)
    dist.all_to_all_single(got, given, [rows[world.rank]] * world.size, rows)
    wanted = torch.arange(world.size).repeat_interleave(rows[world.rank]).bfloat16()
    if not torch.equal(got, wanted.view(-1, 1).expand(-1, 2)):
        yield "rows"


def crossed(world):
    """A rank waits for a large sum, and another one for a message that comes behind it."""
    values = torch.ones(500_000)
    for _ in range(10):
        work = dist.all_reduce(values, async_op=True)
        if world.rank == 0:
            work.wait()
            for other in range(1, world.size):
                dist.send(torch.ones(300_000), other)
        else:
            dist.recv(torch.empty(300_000), 0)
            work.wait()
        values.fill_(1)
    pair = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(6)]
    for work in pair if world.rank % 2 else reversed(pair):
        work.wait()
    yield from ()


def late(world):
    """A rank that does not come is an error of those that wait."""
    if world.rank == 0:
        began = time.monotonic()
        try:
            dist.barrier(async_op=True).wait(timedelta(seconds=1))
            yield "no error"
        except RuntimeError as error:
            if "MPI: a barrier was not complete within 1 s" not in str(error):
                yield str(error)
        if time.monotonic() - began > 5:
            yield "late"
    else:
        time.sleep(2)
        dist.barrier()


def main() -> None:
    world = launch("mpi")
    for name in sys.argv[1:]:
        for text in globals()[name](world):
            print(f"rank {world.rank}: {text}", flush=True)
    print(f"rank {world.rank} of {world.size} is done by {dist.get_backend()}", flush=True)
    leave(world)


if __name__ == "__main__":
    main()

"""What tests of process groups share: every collective with its true result, and an outcome as
plain bits.
"""

import torch
import torch.distributed as dist

OPS = {
    dist.ReduceOp.SUM: lambda parts: parts.sum(0),
    dist.ReduceOp.MAX: lambda parts: parts.amax(0),
}
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def whole(seed, world_size, size, dtype):
    """Every rank's numbers [world_size, size]; sums over four ranks are whole in every type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-30, 30, (world_size, size), generator=generator, dtype=torch.int64).to(
        dtype
    )


def each_collective(rank, n, given, size, group, later):
    """(name, work, what was found, what it should be). ``given``: the ranks' whole numbers [n, n *
    size].
    """
    mine, first = given[rank], given[:, :size]
    for op, expected in OPS.items():
        found = mine[:size].clone()
        yield (
            f"all_reduce {op}",
            dist.all_reduce(found, op, group, async_op=later),
            [found],
            [expected(first)],
        )
        found, wanted = (
            torch.empty_like(mine[:size]),
            expected(given[:, rank * size : (rank + 1) * size]),
        )
        work = reduce_scatter_single(found, mine.clone(), op, group, async_op=later)
        yield f"reduce_scatter_single {op}", work, [found], [wanted]
        found, parts = torch.empty_like(mine[:size]), [part.clone() for part in mine.view(n, -1)]
        work = dist.reduce_scatter(found, parts, op, group, async_op=later)
        yield f"reduce_scatter {op}", work, [found], [wanted]
    found = torch.empty_like(first.reshape(-1))
    work = gather_single(found, mine[:size].clone(), group, async_op=later)
    yield "all_gather_single", work, [found], [first.reshape(-1)]
    found, wanted = torch.empty_like(mine), given[:, rank * size : (rank + 1) * size].reshape(-1)
    yield (
        "all_to_all",
        dist.all_to_all_single(found, mine.clone(), group=group, async_op=later),
        [found],
        [wanted],
    )
    parts = [torch.empty_like(mine[:size]) for _ in range(n)]
    yield (
        "all_gather",
        dist.all_gather(parts, mine[:size].clone(), group, async_op=later),
        parts,
        list(first),
    )
    for root in range(n):
        found = mine[:size].clone()
        work = dist.broadcast(found, group=group, group_src=root, async_op=later)
        yield f"broadcast {root}", work, [found], [first[root]]


def bits(outcome):
    """An outcome with plain numbers and bytes, which compare as a whole."""
    tensors = [shard.tensor.flatten() for shard in (*outcome.gradients, *outcome.weights)]
    values = [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return outcome.evaluated, outcome.first_loss, outcome.curve, outcome.norms, values

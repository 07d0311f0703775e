"""All ranks of a layer of a rewritten model in one process, node by node together."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.ir.kinds import over
from megatron_merak.graph.ir.marks import (
    MARKS,
    all_gather,
    copy_in,
    exchange,
    exchange_rows,
    reduce_scatter,
    reduce_sum,
    stack,
)
from megatron_merak.graph.lowering.rewrite import Rewritten, rewrite
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import Sharding
from megatron_merak.plan import TensorSharding
from megatron_merak.segment import LayerAxis

NO_GRADIENT = 1e-7  # attention's key biases have none in exact arithmetic: what is left is rounding


class _ReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        total = torch.stack([part.contiguous() for part in parts]).sum(0)
        return tuple(total.clone() for _ in parts)

    @staticmethod
    def backward(ctx, *grads):
        return grads


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *copies):
        return tuple(x.view_as(x) for x in copies)

    @staticmethod
    def backward(ctx, *grads):
        total = torch.stack([grad.contiguous() for grad in grads]).sum(0)
        return tuple(total.clone() for _ in grads)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        return tuple(torch.stack(parts) for _ in parts)

    @staticmethod
    def backward(ctx, *grads):
        return tuple(grad[rank] for rank, grad in enumerate(grads))


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        total = torch.stack([part.contiguous() for part in parts]).sum(0)
        return tuple(x.clone() for x in total.chunk(len(parts), 1))

    @staticmethod
    def backward(ctx, *grads):
        return tuple(torch.cat(grads, 1) for _ in grads)


class _AllGather(torch.autograd.Function):
    """What reads the full value passes back the same gradient on every rank."""

    @staticmethod
    def forward(ctx, *parts):
        return tuple(torch.cat(parts, 1) for _ in parts)

    @staticmethod
    def backward(ctx, *grads):
        return tuple(grad.chunk(len(grads), 1)[rank] for rank, grad in enumerate(grads))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *given):
        return _exchanged(given)

    @staticmethod
    def backward(ctx, *grads):
        return _exchanged(grads)


def _exchanged_of(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _Exchange.apply(*given) if given[0].is_floating_point() else _exchanged(given)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ranks, *given):
        ctx.counts = [counts.tolist() for counts in given[1::2]]
        return _rows_exchanged(given[::2], ctx.counts)

    @staticmethod
    def backward(ctx, *grads):
        back = _rows_exchanged(grads, [(got, sent) for sent, got in ctx.counts])
        return None, *(x for grad in back for x in (grad, None))


def _rows_exchanged(given, counts):
    pieces = [rows.split(sent) for rows, (sent, _) in zip(given, counts, strict=True)]
    made = tuple(map(torch.cat, zip(*pieces, strict=True)))
    assert [len(rows) for rows in made] == [sum(got) for _, got in counts]
    return made


def _exchanged(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(map(torch.stack, zip(*given, strict=True)))


def part(full: Tensor, tensor: TensorSharding, rank: int, tp: int) -> Tensor:
    """A rank's shard of a full tensor, padding rows included as zeros."""
    if tensor.dim is None:
        return full.clone()
    pieces = [full.narrow(tensor.dim, a, b - a) for a, b in tensor.intervals(rank, tp)]
    shard = torch.cat(pieces, tensor.dim)
    if tensor.within is not None:
        pieces = [shard.narrow(tensor.within, a, b - a) for a, b in tensor.features(rank)]
        shard = torch.cat(pieces, tensor.within)
    missing = (tensor.padded // tp if tensor.padded else shard.shape[tensor.dim]) - shard.shape[
        tensor.dim
    ]
    shape = list(shard.shape)
    shape[tensor.dim] = missing
    return torch.cat([shard, shard.new_zeros(shape)], tensor.dim)


def run(
    rewritten: Sequence[Rewritten],
    parameters: Sequence[Mapping[str, Tensor]],
    batch: Mapping[str, Any],
    tp: int | None = None,
) -> list[tuple[Tensor, ...]]:
    """Every rank's outputs; values keep their autograd graph, which spans the ranks. Shapes must be
    as announced.

    tp: of the ranks, those that divide weights and lie together; None: all do.
    """
    count = len(rewritten)
    groups = groups_of(count, tp or count)
    values: list[dict[Node, Any]] = [{} for _ in range(count)]
    for nodes in zip(*(list(r.graph.nodes) for r in rewritten), strict=True):
        assert len({(node.op, node.name, str(node.target)) for node in nodes}) == 1, (
            "ranks disagree on their programs"
        )
        node = nodes[0]
        args = [map_arg(n.args, lambda x, r=r: values[r][x]) for r, n in enumerate(nodes)]
        kwargs = [map_arg(n.kwargs, lambda x, r=r: values[r][x]) for r, n in enumerate(nodes)]
        if node.op == "output":
            return [tuple(a[0]) for a in args]
        if node.op == "placeholder":
            made = [batch[node.target]] * count
        elif node.op == "get_attr":
            made = [{**rewritten[r].constants, **parameters[r]}[node.target] for r in range(count)]
        elif node.target in MARKS:
            made = [None] * count
            for group in groups[over(node)]:
                together = collective(node.target, [args[r] for r in group])
                for r, value in zip(group, together, strict=True):
                    made[r] = value
        else:
            made = [n.target(*a, **k) for n, a, k in zip(nodes, args, kwargs, strict=True)]
        for r, n in enumerate(nodes):
            values[r][n] = made[r]
            _check_shape(n, made[r])
    raise AssertionError("no output")


def groups_of(count: int, tp: int) -> dict[LayerAxis, list[list[int]]]:
    """The ranks of every group of each axis."""
    return {
        LayerAxis.TP: [list(range(first, first + tp)) for first in range(0, count, tp)],
        LayerAxis.CP: [list(range(first, count, tp)) for first in range(tp)],
        LayerAxis.EP: [list(range(count))],
    }


def collective(mark: Any, args: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """What the ranks of a group have after a collective."""
    given = [a[0] for a in args]
    if mark is copy_in:
        return _CopyIn.apply(*given) if given[0].requires_grad else given
    if mark is exchange:
        return _exchanged_of(given)
    if mark is exchange_rows:
        return _ExchangeRows.apply(args[0][1].shape[1], *(x for a in args for x in a))
    return _FUNCTIONS[mark].apply(*given)


_FUNCTIONS: dict[Any, type[torch.autograd.Function]] = {
    reduce_sum: _ReduceSum,
    stack: _Stack,
    reduce_scatter: _ReduceScatter,
    all_gather: _AllGather,
}


def reduce_partial(
    found: Sequence[dict[str, Tensor]],
    partial: Sequence[str],
    tp: int,
    divided: Container[str] = (),
) -> None:
    """Add up the gradients of ``partial`` over tensor-parallel ranks, and all over the others.

    divided: what all ranks divide.
    """
    groups = groups_of(len(found), tp)
    for axis, names in ((LayerAxis.TP, partial), (LayerAxis.CP, list(found[0]))):
        for group in groups[axis]:
            for name in names if len(group) > 1 else ():
                if name in divided:
                    continue
                total = torch.stack([found[r][name] for r in group]).sum(0)
                for r in group:
                    found[r][name] = total


def _check_shape(node: Node, value: Any) -> None:
    known = node.meta["val"]
    if node.meta.get("dispatched", False):  # as many rows as there are for these experts
        return
    if isinstance(value, Tensor) and isinstance(known, Tensor):
        assert value.shape == known.shape, (
            f"{node} {node.target}: {tuple(value.shape)}, announced {tuple(known.shape)}"
        )


def shards(
    captured: Captured, sharding: Sharding, model: torch.nn.Module, ranks: int | None = None
) -> list[dict[str, Tensor]]:
    """Every rank's parameters. ranks: of all copies of a layer; None: of one."""
    real = dict(model.named_parameters(remove_duplicate=False))
    return [
        {
            name: shard_of(real[name].detach(), tensor, rank, sharding).requires_grad_(
                name in captured.trainable
            )
            for name, tensor in sharding.tensors.items()
        }
        for rank in range(ranks or sharding.tp)
    ]


def shard_of(full: Tensor, tensor: TensorSharding, rank: int, sharding: Sharding) -> Tensor:
    """What a rank, of those of all copies of a layer, has of a full tensor."""
    count = sharding.ranks_of(tensor)
    return part(full, tensor, rank % count, count)


def gradients(
    programs: Sequence[Rewritten],
    held: Sequence[Mapping[str, Tensor]],
    batch: Mapping[str, Any],
    tp: int | None = None,
    divided: Container[str] = (),
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Every rank's loss and gradients (zero where there is none), those of ``partial`` after their
    sum. tp: see ``run``. divided: of experts, over all ranks.
    """
    losses = [outputs[0] for outputs in run(programs, held, batch, tp)]
    for h in held:
        for x in h.values():
            x.grad = None
    torch.autograd.backward(losses, [torch.ones_like(x) for x in losses])
    found = [
        {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in h.items()} for h in held
    ]
    reduce_partial(found, programs[0].partial, tp or len(found), divided)
    return [x.detach() for x in losses], found


def compare(
    captured: Captured,
    sharding: Sharding,
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    loss: Tensor,
    grads: Mapping[str, Tensor],
) -> tuple[float, float, str, list[Rewritten]]:
    """(loss difference, largest relative error of a gradient, of which, the programs) against the
    whole model's.

    Each rank's gradient is compared with its part of the whole one, those in ``partial`` after
    their sum.
    """
    tp = sharding.tp
    chain = cut(captured)
    programs = [rewrite(captured, chain, sharding, rank, tp) for rank in range(tp)]
    held = shards(captured, sharding, model)
    losses, found = gradients(programs, held, batch)
    difference = max(abs(float(x - loss)) for x in losses)
    worst, where = 0.0, ""
    for name, tensor in sharding.tensors.items():
        if name not in grads or not grads[name].numel():
            continue
        got = [grads_of_rank[name] for grads_of_rank in found]
        scale = float(grads[name].abs().max())
        for rank in range(tp):
            error = float((got[rank] - part(grads[name], tensor, rank, tp)).abs().max()) / max(
                scale, NO_GRADIENT
            )
            # so that nan is the worst
            if not error <= worst and (scale > NO_GRADIENT or not error <= 1):
                worst, where = error, name
    return difference, worst, where, programs

"""All tensor-parallel ranks of a rewritten model in one process, node by node together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.ir.marks import copy_in, reduce_sum, stack
from megatron_merak.graph.lowering.rewrite import Rewritten, rewrite
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.shard import Sharding
from megatron_merak.plan import TensorSharding

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


def part(full: Tensor, tensor: TensorSharding, rank: int, tp: int) -> Tensor:
    """A rank's shard of a full tensor, padding rows included as zeros."""
    if tensor.dim is None:
        return full.clone()
    pieces = [full.narrow(tensor.dim, a, b - a) for a, b in tensor.intervals(rank, tp)]
    shard = torch.cat(pieces, tensor.dim)
    missing = (tensor.padded // tp if tensor.padded else shard.shape[tensor.dim]) - shard.shape[tensor.dim]
    shape = list(shard.shape)
    shape[tensor.dim] = missing
    return torch.cat([shard, shard.new_zeros(shape)], tensor.dim)


def run(
    rewritten: Sequence[Rewritten], parameters: Sequence[Mapping[str, Tensor]], batch: Mapping[str, Any]
) -> list[tuple[Tensor, ...]]:
    """Every rank's outputs; values keep their autograd graph, which spans the ranks. Shapes must be as announced."""
    tp = len(rewritten)
    values: list[dict[Node, Any]] = [{} for _ in range(tp)]
    for nodes in zip(*(list(r.graph.nodes) for r in rewritten), strict=True):
        assert len({(node.op, node.name, str(node.target)) for node in nodes}) == 1, "ranks disagree on their programs"
        node = nodes[0]
        args = [map_arg(n.args, lambda x, r=r: values[r][x]) for r, n in enumerate(nodes)]
        kwargs = [map_arg(n.kwargs, lambda x, r=r: values[r][x]) for r, n in enumerate(nodes)]
        if node.op == "output":
            return [tuple(a[0]) for a in args]
        if node.op == "placeholder":
            made = [batch[node.target]] * tp
        elif node.op == "get_attr":
            made = [{**rewritten[r].constants, **parameters[r]}[node.target] for r in range(tp)]
        elif node.target is reduce_sum:
            made = _ReduceSum.apply(*(a[0] for a in args))
        elif node.target is copy_in:
            made = _CopyIn.apply(*(a[0] for a in args)) if args[0][0].requires_grad else [a[0] for a in args]
        elif node.target is stack:
            made = _Stack.apply(*(a[0] for a in args))
        else:
            made = [n.target(*a, **k) for n, a, k in zip(nodes, args, kwargs, strict=True)]
        for r, n in enumerate(nodes):
            values[r][n] = made[r]
            _check_shape(n, made[r])
    raise AssertionError("no output")


def _check_shape(node: Node, value: Any) -> None:
    known = node.meta["val"]
    if isinstance(value, Tensor) and isinstance(known, Tensor):
        assert value.shape == known.shape, f"{node} {node.target}: {tuple(value.shape)}, announced {tuple(known.shape)}"


def shards(captured: Captured, sharding: Sharding, model: torch.nn.Module) -> list[dict[str, Tensor]]:
    """Every rank's parameters."""
    real = dict(model.named_parameters(remove_duplicate=False))
    return [
        {
            n: part(real[n].detach(), t, rank, sharding.tp).requires_grad_(n in captured.trainable)
            for n, t in sharding.tensors.items()
        }
        for rank in range(sharding.tp)
    ]


def gradients(
    programs: Sequence[Rewritten], held: Sequence[Mapping[str, Tensor]], batch: Mapping[str, Any]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Every rank's loss and gradients (zero where there is none), those of ``partial`` after their sum."""
    losses = [outputs[0] for outputs in run(programs, held, batch)]
    for h in held:
        for x in h.values():
            x.grad = None
    torch.autograd.backward(losses, [torch.ones_like(x) for x in losses])
    found = [{n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in h.items()} for h in held]
    for name in programs[0].partial:
        total = torch.stack([grads[name] for grads in found]).sum(0)
        for grads in found:
            grads[name] = total
    return [x.detach() for x in losses], found


def compare(
    captured: Captured,
    sharding: Sharding,
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    loss: Tensor,
    grads: Mapping[str, Tensor],
) -> tuple[float, float, str, list[Rewritten]]:
    """(loss difference, largest relative error of a gradient, of which, the programs) against the whole model's.

    Each rank's gradient is compared with its part of the whole one, those in ``partial`` after their sum.
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
            error = float((got[rank] - part(grads[name], tensor, rank, tp)).abs().max()) / max(scale, NO_GRADIENT)
            if not error <= worst and (scale > NO_GRADIENT or not error <= 1):  # so that nan is the worst
                worst, where = error, name
    return difference, worst, where, programs

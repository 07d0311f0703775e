"""Softmax cross entropy per row of logits: of one tensor, of shards of the classes, and fused with
the output layer.

Statistics and losses are fp32 (fp64 for fp64 logits). A class at -inf does not exist.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .flat import accumulate_
from .linear import WeightGradientSink
from .register import kernels, operation

# values that stay in a CPU's cache between the passes of a reference implementation
_CACHED = 1 << 18


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ---- statistics of a shard, and their loss -------------------------------------------------------
def _local(target: Tensor, start: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return a target's index in the shard, 0 for others, int64 [t, 1]; and whether it is in
    another shard.
    """
    place = target.unsqueeze(-1) - start
    outside = (place < 0) | (place >= classes)
    return place.masked_fill(outside, 0), outside


@operation("cross_entropy_grad", lambda logits, *arguments: logits.new_empty(logits.shape))
def _cross_entropy_grad(
    logits: Tensor, target: Tensor, stats: Tensor, grad: Tensor, start: int, classes: int
) -> Tensor:
    grad_logits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    if classes <= 0:
        return grad_logits
    known = logits[:, :classes].to(_wide(logits))
    maximum = stats[:, :1].masked_fill(stats[:, :1] == -torch.inf, 0.0)
    each = (known - maximum).exp_().mul_(grad[:, 1:2])
    if grad.shape[1] > 3:
        each.add_(grad[:, 3:4]).masked_fill_(known == -torch.inf, 0.0)
    place, outside = _local(target, start, classes)
    each.scatter_add_(-1, place, grad[:, 2:3].masked_fill(outside, 0.0))
    empty = (grad[:, 1:4:1] == 0).all(-1, keepdim=True)
    grad_logits[:, :classes] = each.masked_fill_(empty, 0.0)
    return grad_logits


@operation("cross_entropy_grad_", lambda *arguments: None)
def _cross_entropy_grad_(
    logits: Tensor, target: Tensor, stats: Tensor, grad: Tensor, start: int, classes: int
) -> None:
    logits.copy_(_cross_entropy_grad(logits, target, stats, grad, start=start, classes=classes))


def _setup_stats(ctx, inputs, output) -> None:
    logits, target, ctx.start, ctx.classes, _ = inputs
    ctx.save_for_backward(logits, target, output)


def _backward_stats(ctx, grad):
    logits, target, stats = ctx.saved_tensors
    grad_logits = kernels(logits).cross_entropy_grad(
        logits, target, stats, grad, ctx.start, ctx.classes
    )
    return grad_logits, None, None, None, None


@operation(
    "cross_entropy_stats",
    lambda logits, target, start, classes, smoothing: logits.new_empty(
        (len(target), 5 if smoothing else 3), dtype=_wide(logits)
    ),
    _setup_stats,
    _backward_stats,
)
def _cross_entropy_stats(
    logits: Tensor, target: Tensor, start: int, classes: int, smoothing: bool
) -> Tensor:
    stats = logits.new_zeros((len(target), 5 if smoothing else 3), dtype=_wide(logits))
    stats[:, 0] = stats[:, 2] = -torch.inf
    if classes <= 0 or not len(target):
        return stats
    known = logits[:, :classes].to(stats.dtype)
    torch.amax(known, -1, out=stats[:, 0])
    reference = stats[:, :1].masked_fill(stats[:, :1] == -torch.inf, 0.0)
    stats[:, 1] = (known - reference).exp_().sum(-1)
    place, outside = _local(target, start, classes)
    stats[:, 2:3] = known.gather(-1, place).masked_fill_(outside, -torch.inf)
    if smoothing:
        hidden = known == -torch.inf
        stats[:, 3] = known.masked_fill(hidden, 0.0).sum(-1)
        stats[:, 4] = hidden.logical_not().sum(-1)
    return stats


class _OwnedStats(torch.autograd.Function):
    """Statistics of logits that nothing else reads: the gradient overwrites them."""

    @staticmethod
    def forward(ctx, logits, target, start, classes, smoothing):
        stats = kernels(logits).cross_entropy_stats(logits, target, start, classes, smoothing)
        ctx.save_for_backward(logits, target, stats)
        ctx.start = start
        ctx.classes = classes
        ctx.consumed = False
        return stats

    @staticmethod
    def backward(ctx, grad):
        if ctx.consumed:
            raise RuntimeError(
                "a cross entropy that owns its logits turns them into their gradient: one "
                "backward only"
            )
        ctx.consumed = True
        logits, target, stats = ctx.saved_tensors
        kernels(logits).cross_entropy_grad_(logits, target, stats, grad, ctx.start, ctx.classes)
        return logits, None, None, None, None


def cross_entropy_stats(
    logits: Tensor,
    target: Tensor,
    start: int = 0,
    classes: int | None = None,
    smoothing: bool = False,
    owned: bool = False,
) -> Tensor:
    """Statistics of one shard of a row: logits [..., v], target int64 [...] -> [..., 3], or 5 with
    ``smoothing``.

    Per row: the maximum, the sum of exp(x - maximum), and the target's x (-inf: in another shard);
    with ``smoothing`` also sum and number of the x that are not -inf.

    start:   first class of the shard.
    classes: number of classes; later columns are padding; None: v.
    owned:   nothing else reads the logits, so that the backward, which may run once, overwrites
             them.
    """
    flat = logits.reshape(target.numel(), logits.shape[-1])
    targets = target.flatten()
    arguments = flat, targets, start, logits.shape[-1] if classes is None else classes, smoothing
    stats = (
        _OwnedStats.apply(*arguments) if owned else kernels(logits).cross_entropy_stats(*arguments)
    )
    return stats.view(*target.shape, stats.shape[-1])


class _LossOfStats(torch.autograd.Function):
    """Saves the gradient for an upstream gradient of 1; maxima count as constants."""

    @staticmethod
    def forward(ctx, stats, smoothing, everywhere):
        maximum = stats[..., 0].amax(0)
        factors = (stats[..., 0] - maximum).exp_().masked_fill_(stats[..., 0] == -torch.inf, 0.0)
        total = (stats[..., 1] * factors).sum(0)
        log_sum = total.log()
        chosen = stats[..., 2].amax(0) - maximum
        loss = log_sum - chosen
        grad = torch.zeros_like(stats)
        grad[..., 1], grad[..., 2] = factors / total, smoothing - 1
        if smoothing > 0:
            number = stats[..., 4].sum(0)
            others = stats[..., 3].sum(0) - maximum * number
            if not everywhere:
                others = others - chosen
                number = number - 1
                grad[..., 2] += smoothing / number
            grad[..., 3] = -smoothing / number
            loss = (1 - smoothing) * loss + smoothing * (log_sum - others / number)
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx, upstream):
        (grad,) = ctx.saved_tensors
        upstream = upstream.unsqueeze(-1)
        return (grad * upstream).masked_fill_(upstream == 0, 0.0), None, None


def loss_of_stats(stats: Tensor, label_smoothing: float = 0.0, everywhere: bool = False) -> Tensor:
    """The statistics of all shards, [n, ..., 3 or 5] -> loss [...].

    Label smoothing spreads over the other classes, as Megatron-LM documents it, or ``everywhere``:
    over the target's too, as PyTorch does.
    """
    return _LossOfStats.apply(stats, label_smoothing, everywhere)


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0
) -> Tensor:
    """Loss per row of logits [..., v] against target int64 [...] in 0 .. v - 1: [...]; 0 where it
    is ``ignore_index``.

    Label smoothing spreads over the other v - 1 classes.
    """
    ignored = target == ignore_index
    stats = cross_entropy_stats(
        logits, target.masked_fill(ignored, 0), smoothing=label_smoothing > 0
    )
    return loss_of_stats(stats.unsqueeze(0), label_smoothing).masked_fill(ignored, 0.0)


# ---- with the output layer -----------------------------------------------------------------------
def _fake_exponentiate(logits: Tensor, target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(target), dtype=_wide(logits)), logits.new_empty(
        len(target), dtype=_wide(logits)
    )


@operation("exponentiate_", _fake_exponentiate)
def _exponentiate_(logits: Tensor, target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Exponentiate in place; on a CPU in blocks of rows that fit into its cache."""
    loss, total = (logits.new_empty(len(target), dtype=_wide(logits)) for _ in range(2))
    rows = (
        max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(target))
    )
    for part, place, losses, totals in zip(
        *(t.split(rows) for t in (logits, target, loss, total)), strict=True
    ):
        place = place.unsqueeze(-1)
        part[:, classes:] = -torch.inf
        shifted = part.to(loss.dtype)
        shifted.sub_(shifted.amax(-1, keepdim=True))
        losses.copy_(shifted.gather(-1, place).squeeze(-1)).neg_()
        torch.sum(shifted.exp_(), -1, out=totals)
        shifted.scatter_add_(-1, place, -totals.unsqueeze(-1))
        if shifted is not part:
            part.copy_(shifted)
    return loss.add_(total.log()), total


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves e = exp(logits - max) minus the row sum at the target: the gradient of the logits up to
    a factor per row.

    The factor is applied to the small operand of the backward's two products, which read e
    unchanged.
    """

    @staticmethod
    def forward(ctx, x, weight, target, classes, sink):
        exponents = F.linear(x, weight)
        loss, total = kernels(exponents).exponentiate_(exponents, target, classes)
        ctx.save_for_backward(x, weight, exponents, total)
        ctx.sink = sink
        return loss

    @staticmethod
    def backward(ctx, grad):
        x, weight, exponents, total = ctx.saved_tensors
        scale = (grad / total).unsqueeze(-1)
        grad_x = (exponents @ weight).mul_(scale)
        scaled = (x * scale).to(x.dtype)
        grad_weight = None
        if ctx.sink is not None:
            ctx.sink.matmul(weight, exponents, scaled)
        elif ctx.needs_input_grad[1]:
            grad_weight = exponents.t() @ scaled
        return grad_x, grad_weight, None, None, None


class _ChunkedStats(torch.autograd.Function):
    """Statistics of x weight^T with logits of some rows at a time; the backward recomputes them."""

    @staticmethod
    def forward(ctx, x, weight, target, start, classes, chunk, sink):
        parts = [
            kernels(x).cross_entropy_stats(F.linear(rows, weight), targets, start, classes, False)
            for rows, targets in zip(x.split(chunk), target.split(chunk), strict=True)
        ]
        stats = torch.cat(parts)
        ctx.save_for_backward(x, weight, target, stats)
        ctx.start = start
        ctx.classes = classes
        ctx.chunk = chunk
        ctx.sink = sink
        return stats

    @staticmethod
    def backward(ctx, grad):
        x, weight, target, stats = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_weight = None
        if ctx.sink is None and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=_wide(weight))
        parts = (tensor.split(ctx.chunk) for tensor in (x, target, stats, grad, grad_x))
        for rows, targets, stats_of_chunk, of_stats, into in zip(*parts, strict=True):
            logits = F.linear(rows, weight)
            kernels(logits).cross_entropy_grad_(
                logits, targets, stats_of_chunk, of_stats, ctx.start, ctx.classes
            )
            torch.mm(logits, weight, out=into)
            if ctx.sink is not None:
                ctx.sink.matmul(weight, logits, rows, now=True)
            elif grad_weight is not None:
                accumulate_(grad_weight, logits.t() @ rows)
        return (
            grad_x,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def linear_cross_entropy_stats(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    start: int,
    classes: int,
    chunk: int,
    sink: WeightGradientSink | None = None,
) -> Tensor:
    """``cross_entropy_stats`` of x [..., h] weight [v, h]^T and target int64 [...]: [..., 3].

    Logits exist for ``chunk`` rows at a time. A ``sink`` takes the weight gradient at once;
    autograd then returns none.
    """
    rows = x.reshape(-1, x.shape[-1])
    stats = _ChunkedStats.apply(rows, weight, target.flatten(), start, classes, chunk, sink)
    return stats.view(*target.shape, 3)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    classes: int | None = None,
    sink: WeightGradientSink | None = None,
    chunk: int = 0,
) -> Tensor:
    """Cross entropy of x [t, h] weight [V, h]^T against target int64 [t]: [t].

    classes: number of classes; later rows of ``weight`` are padding.
    sink:    takes the weight gradient; autograd then returns none.
    chunk:   compute the logits of so many rows at a time and recompute them in the backward; 0:
             store all logits.
    """
    classes = weight.shape[0] if classes is None else classes
    if x.dtype == torch.float16 and not chunk:
        # a row's sum of exponentials, which would stand at the target, may be too large
        chunk = max(1, x.shape[0])
    if chunk:
        stats = linear_cross_entropy_stats(
            x, weight, target, 0, classes=classes, chunk=chunk, sink=sink
        )
        return loss_of_stats(stats.unsqueeze(0))
    return _LinearCrossEntropy.apply(x, weight, target, classes, sink)

"""The memory-bound operations at training sizes, each beside what one would write without it in
plain PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5
RATE = 1e-3
BETAS = (0.9, 0.95)
DECAY = 0.1


@dataclass(frozen=True)
class Sizes:
    """Of a transformer: tokens of a micro-batch, widths, sequence and heads of one attention, and
    flat parameters.
    """

    tokens: int
    hidden: int
    ffn: int
    vocabulary: int
    sequence: int
    heads: int
    head_dim: int
    parameters: int


FULL = Sizes(
    tokens=8192,
    hidden=4096,
    ffn=14336,
    vocabulary=128256,
    sequence=2048,
    heads=32,
    head_dim=128,
    parameters=1 << 28,
)
TINY = Sizes(
    tokens=16, hidden=16, ffn=24, vocabulary=40, sequence=8, heads=2, head_dim=8, parameters=100
)


class Inputs:
    """Makes random tensors, always the same, on one device."""

    def __init__(self, sizes: Sizes, device: torch.device):
        self.sizes, self.device = sizes, device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(dtype)

    def wide(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=torch.float32)

    def below(self, limit: int, count: int) -> Tensor:
        return torch.randint(limit, (count,), generator=self._generator, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device)

    def hidden(self) -> Tensor:
        return self.normal(self.sizes.tokens, self.sizes.hidden)

    def ffn(self) -> Tensor:
        return self.normal(self.sizes.tokens, self.sizes.ffn)

    def scores(self) -> Tensor:
        return self.normal(1, self.sizes.heads, self.sizes.sequence, self.sizes.sequence)

    def flat(self, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(self.normal(self.sizes.parameters, dtype=dtype) for dtype in dtypes)


@dataclass(frozen=True)
class Case:
    """One operation of torch.ops.merak. make: its arguments. eager: the same results, and the same
    in-place changes.

    unread: bytes of its tensors that it need not move. comparable: False where the results are
            random.
    """

    op: str
    label: str
    make: Callable[[Inputs], tuple]
    eager: Callable[..., Any]
    unread: Callable[..., int] = lambda *arguments: 0
    comparable: bool = True

    @property
    def registered(self) -> bool:
        return hasattr(torch.ops.merak, self.op)

    def ours(self, *arguments: Any) -> Any:
        return getattr(torch.ops.merak, self.op)(*arguments)

    def moved(self, arguments: tuple, results: Any) -> int:
        """Bytes that have to be read or written: every argument, every result, and what changes in
        place again.
        """
        schema = getattr(torch.ops.merak, self.op).default._schema
        given = tensors_of(arguments)
        changed = [
            a
            for a, how in zip(arguments, schema.arguments, strict=True)
            if how.alias_info is not None
        ]
        return sum(
            map(size_of, (*given, *tensors_of(changed), *tensors_of(results)))
        ) - self.unread(*arguments)


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_of(values: Any) -> list[Tensor]:
    return [
        v
        for v in (values if isinstance(values, tuple | list) else [values])
        if isinstance(v, Tensor)
    ]


# ---- norms
def _norm_inputs(make: Inputs) -> tuple[Tensor, Tensor]:
    return make.hidden(), 1 + make.normal(make.sizes.hidden) / 8


def _rms_norm(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps), (x.float().square().mean(-1) + eps).rsqrt()


def _rms_backward_inputs(make: Inputs) -> tuple:
    x, weight = _norm_inputs(make)
    return make.hidden(), x, weight, (x.float().square().mean(-1) + EPS).rsqrt()


def _rms_backward(grad, x, weight, rstd):
    normed = x.float() * rstd.unsqueeze(-1)
    inner = grad.float() * weight
    grad_x = rstd.unsqueeze(-1) * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


def _add_rms_norm(x, residual, weight, eps):
    total = x + residual
    y, rstd = _rms_norm(total, weight, eps)
    return y, total, rstd


# ---- pointwise
def _swiglu(gate, up, activation):
    return F.silu(gate) * up


def _swiglu_backward(grad, gate, up, activation):
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate) * grad


def _bias_gelu(x, bias, activation):
    return F.gelu(x + bias, approximate="tanh")


def _dropout_inputs(make: Inputs) -> tuple:
    seed = torch.ones(1, dtype=torch.int64, device=make.device)
    return make.hidden(), make.normal(make.sizes.hidden), make.hidden(), 0.1, seed


def _bias_dropout_add(x, bias, residual, p, seed):
    return residual + F.dropout(x + bias, p)


def _rotary_inputs(make: Inputs) -> tuple:
    s = make.sizes
    angle = make.wide(s.sequence, 1, s.head_dim // 2)
    x = make.normal(s.tokens // s.sequence, s.sequence, s.heads, s.head_dim)
    return x, angle.cos().bfloat16(), angle.sin().bfloat16(), False, False


def _rotary(x, cos, sin, interleaved, inverse):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _rotary_into_inputs(make: Inputs) -> tuple:
    x, *angles = _rotary_inputs(make)
    return torch.zeros_like(x), x, *angles


def _rotary_(into, *given):
    into.copy_(_rotary(*given))


# ---- reductions
def _softmax(scores, mask, scale, causal):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
    return (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)


def _softmax_backward(grad, probabilities, scale, causal):
    return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype) * scale


def _beyond_the_diagonal(tensors: int) -> Callable[..., int]:
    """Half of each square of scores lies in the future: it need not be read."""
    return lambda scores, *rest: (
        tensors * size_of(scores) * (scores.shape[-1] - 1) // (2 * scores.shape[-1])
    )


def _logits(make: Inputs) -> tuple[Tensor, Tensor]:
    s = make.sizes
    return make.normal(s.tokens, s.vocabulary), make.below(s.vocabulary, s.tokens)


def _stats(logits, target, start, classes, smoothing):
    wide = logits.float()
    maximum = wide.amax(-1)
    total = (wide - maximum.unsqueeze(-1)).exp().sum(-1)
    return torch.stack((maximum, total, wide.gather(-1, target.unsqueeze(-1)).squeeze(-1)), -1)


def _grad_inputs(make: Inputs) -> tuple:
    logits, target = _logits(make)
    stats = _stats(logits, target, 0, 0, False)
    grad = torch.stack(
        (torch.zeros_like(stats[:, 0]), 1 / stats[:, 1], -torch.ones_like(stats[:, 0])), -1
    )
    return logits, target, stats, grad, 0, make.sizes.vocabulary


def _grad_(logits, target, stats, grad, start, classes):
    each = (logits.float() - stats[:, :1]).exp() * grad[:, 1:2]
    logits.copy_(each.scatter_add(-1, target.unsqueeze(-1), grad[:, 2:3]))


def _exponentiate_(logits, target, classes):
    wide = logits.float()
    loss = F.cross_entropy(wide, target, reduction="none")
    e = (wide - wide.amax(-1, keepdim=True)).exp()
    total = e.sum(-1)
    logits.copy_(e.scatter_add(-1, target.unsqueeze(-1), -total.unsqueeze(-1)))
    return loss, total


# ---- flat buffers
def _adamw_inputs(make: Inputs) -> tuple:
    master, first, second, grad = make.flat(*(4 * [torch.float32]))
    return (
        master,
        first,
        second.square_(),
        grad,
        master.bfloat16(),
        RATE,
        *BETAS,
        1e-8,
        DECAY,
        3,
        0.5,
    )


def _adamw_(master, first, second, grad, copy, lr, beta1, beta2, eps, weight_decay, step, scale):
    grad = grad * scale
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    master.mul_(1 - lr * weight_decay).addcdiv_(first, root, value=-lr / (1 - beta1**step))
    copy.copy_(master)


def _sum_of_squares(x):
    return torch.linalg.vector_norm(x).double().square()


def _accumulate_(into, x, scale):
    into.add_(x, alpha=scale)


def _cast_(into, x, scale):
    into.copy_(x)


def _add_rows_inputs(make: Inputs) -> tuple:
    s = make.sizes
    return make.wide(s.vocabulary, s.hidden), make.below(s.vocabulary, s.tokens), make.hidden()


def _add_rows_(into, index, rows):
    into.index_add_(0, index, rows.to(into.dtype))


_EXPERTS = 8  # of a token


def _routed_inputs(make: Inputs) -> tuple:
    count = make.sizes.tokens * _EXPERTS
    return make.normal(count, make.sizes.hidden), make.order(count), _EXPERTS


def _sums_of_rows(rows, places, k):
    return rows.index_select(0, places).unflatten(0, (-1, k)).sum(1)


def _untouched_rows(into, index, rows) -> int:
    return 2 * size_of(into) - 2 * min(len(index), len(into)) * into.shape[1] * into.element_size()


def _centred_inputs(make: Inputs) -> tuple[Tensor, ...]:
    """x, weight, mean, rstd of LayerNorm."""
    x, weight = _norm_inputs(make)
    wide = x.float()
    return x, weight, wide.mean(-1), (wide.var(-1, correction=0) + EPS).rsqrt()


def _merged(make: Inputs) -> Tensor:
    return torch.cat((make.ffn(), make.ffn()), -1)


# Operations that are compared, not timed: operation -> its arguments.
MORE: dict[str, Callable[[Inputs], tuple]] = {
    "layer_norm": lambda m: (*_norm_inputs(m), m.normal(m.sizes.hidden), EPS),
    "add_layer_norm": lambda m: (m.hidden(), *_norm_inputs(m), m.normal(m.sizes.hidden), EPS),
    "layer_norm_backward": lambda m: (m.hidden(), *_centred_inputs(m)),
    "add_layer_norm_backward": lambda m: (m.hidden(), m.hidden(), *_centred_inputs(m)),
    "add_rms_norm_backward": lambda m: (m.hidden(), *_rms_backward_inputs(m)),
    "gated_merged": lambda m: (_merged(m), "silu"),
    "gated_merged_backward": lambda m: (m.ffn(), _merged(m), "silu"),
    "bias_gelu_backward": lambda m: (m.ffn(), m.ffn(), m.normal(m.sizes.ffn), "gelu_tanh"),
    "bias_dropout_add_backward": lambda m: (
        m.hidden(),
        0.1,
        torch.ones(1, dtype=torch.int64, device=m.device),
        True,
    ),
    "cross_entropy_grad": lambda m: _grad_inputs(m),
}

CASES = (
    Case("rms_norm", "RMSNorm", lambda m: (*_norm_inputs(m), EPS), _rms_norm),
    Case("rms_norm_backward", "RMSNorm, backward", _rms_backward_inputs, _rms_backward),
    Case(
        "add_rms_norm",
        "residual add + RMSNorm",
        lambda m: (m.hidden(), *_norm_inputs(m), EPS),
        _add_rms_norm,
    ),
    Case("gated", "SwiGLU", lambda m: (m.ffn(), m.ffn(), "silu"), _swiglu),
    Case(
        "gated_backward",
        "SwiGLU, backward",
        lambda m: (m.ffn(), m.ffn(), m.ffn(), "silu"),
        _swiglu_backward,
    ),
    Case(
        "bias_gelu",
        "bias + GELU",
        lambda m: (m.ffn(), m.normal(m.sizes.ffn), "gelu_tanh"),
        _bias_gelu,
    ),
    Case(
        "bias_dropout_add",
        "bias + dropout + residual add",
        _dropout_inputs,
        _bias_dropout_add,
        comparable=False,
    ),
    Case("rotary", "rotary embedding", _rotary_inputs, _rotary),
    Case(
        "rotary_",
        "rotary embedding into another tensor",
        _rotary_into_inputs,
        _rotary_,
        lambda into, *given: size_of(into),
    ),
    Case(
        "masked_softmax",
        "causal softmax",
        lambda m: (m.scores(), None, 0.1, True),
        _softmax,
        _beyond_the_diagonal(1),
    ),
    Case(
        "masked_softmax_backward",
        "causal softmax, backward",
        lambda m: (m.scores(), _softmax(m.scores(), None, 0.1, True), 0.1, True),
        _softmax_backward,
        _beyond_the_diagonal(2),
    ),
    Case(
        "cross_entropy_stats",
        "cross entropy, statistics",
        lambda m: (*_logits(m), 0, m.sizes.vocabulary, False),
        _stats,
    ),
    Case("cross_entropy_grad_", "cross entropy, gradient in place", _grad_inputs, _grad_),
    Case(
        "exponentiate_",
        "cross entropy, all in place",
        lambda m: (*_logits(m), m.sizes.vocabulary),
        _exponentiate_,
    ),
    Case("adamw_", "AdamW, fp32 master, bf16 copy", _adamw_inputs, _adamw_),
    Case("sum_of_squares", "sum of squares", lambda m: m.flat(torch.float32), _sum_of_squares),
    Case(
        "accumulate_",
        "fp32 += bf16",
        lambda m: (*m.flat(torch.float32, torch.bfloat16), 0.5),
        _accumulate_,
    ),
    Case(
        "cast_",
        "fp32 -> bf16",
        lambda m: (*m.flat(torch.bfloat16, torch.float32), 1.0),
        _cast_,
        lambda into, x, scale: size_of(into),
    ),
    Case(
        "add_rows_", "embedding gradient into fp32", _add_rows_inputs, _add_rows_, _untouched_rows
    ),
    Case("sums_of_rows", "rows of 8 experts added up", _routed_inputs, _sums_of_rows),
)

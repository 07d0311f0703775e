"""The roofline: what each operation is charged, in bytes and FLOPs that are counted by hand."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron_merak import ops
from megatron_merak.cluster import Device
from megatron_merak.parallel.emulated_kernels import ChargedKernels

BYTES = Device("bytes", 1e30, 1e30, 1.0, 0, 1.0)  # a byte takes a second, arithmetic nothing
# an fp32 operation takes a second, a 16-bit one half
FLOPS = Device("flops", 2.0, 1.0, 1e30, 0, 1.0)


def charged(device, run):
    """Seconds of each kernel that ``run`` starts."""
    times = []
    with ChargedKernels(device, times.append):
        run()
    return [seconds for seconds in times if seconds > 1e-20]


def total(device, run):
    return pytest.approx(sum(charged(device, run)))


A, B, BIAS = torch.ones(4, 8), torch.ones(8, 16), torch.ones(16)
X, Y = torch.ones(10, 10), torch.ones(10, 10)
INDEX, TABLE = torch.tensor([1, 1, 3]), torch.ones(50, 10)
ROWS = torch.ones(3, 10)
SMALL, ENDS = torch.ones(10, 10, dtype=torch.bfloat16), torch.tensor([2, 4, 10])
INTO = torch.zeros(3, 4, 10)


def products(*operands):
    ops.add_products_(INTO, *operands)


TRAFFIC = {
    "add": (lambda: X + Y, 1200),
    "add in place": (lambda: X.add_(Y), 1200),
    "add out": (lambda: torch.add(X, Y, out=torch.empty(10, 10)), 1200),
    "scalar": (lambda: X * 2, 800),
    "broadcast": (lambda: X + Y[:1].expand(10, 10), 400 + 400 + 400),
    "row": (lambda: X + Y[0], 400 + 40 + 400),
    "fill": (lambda: X.zero_(), 400),
    "copy": (lambda: X.copy_(Y), 800),
    "clone": (lambda: X.clone(), 800),
    "cast": (lambda: X.bfloat16(), 600),
    # reshape copies
    "views": (lambda: X.t()[2:].unsqueeze(0).detach().reshape(10, 8).transpose(0, 1), 2 * 320),
    "free": (lambda: (X.view(100), X.view(-1).view(20, 5), torch.empty(100), torch.empty_like(X), X[3:]), 0),
    "sum": (lambda: X.sum(), 404),
    "mm": (lambda: A @ B, 4 * (32 + 128 + 64)),
    "addmm": (lambda: torch.addmm(BIAS, A, B), 4 * (16 + 32 + 128 + 64)),
    "addmm in place": (lambda: torch.ones(4, 16).addmm_(A, B), 4 * 64 + 4 * (64 + 32 + 128 + 64)),
    "addmm over it": (lambda: torch.ones(4, 16).addmm_(A, B, beta=0), 4 * 64 + 4 * (32 + 128 + 64)),
    "embedding": (lambda: F.embedding(INDEX, TABLE), 24 + 120 + 120),
    "rows added": (lambda: TABLE.index_add_(0, INDEX, ROWS), 24 + 3 * 120),
    "groups": (lambda: products(X[:, :4], X, ENDS, False), 4 * 40 + 400 + 24 + 4 * 3 * 40),
    "groups added": (lambda: products(X[:, :4], X, ENDS, True), 4 * 40 + 400 + 24 + 2 * 4 * 3 * 40),
    # products of all groups are written and read before they are added
    "groups in bf16": (lambda: products(SMALL[:, :4], SMALL, ENDS, True), 80 + 200 + 24 + (8 + 4) * 3 * 40),
    "list": (lambda: torch._foreach_add_([X, Y], 1.0), 1600),
    "optimizer": (
        lambda: torch._fused_adamw_(
            *([t.clone()] for t in (X, X, X, X)), [], [torch.tensor(1.0)],
            lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        ),
        # clones; weight and moments read and written, gradient read; the step count
        4 * 800 + 400 * 7 + 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic(name):
    run, expected = TRAFFIC[name]
    assert total(BYTES, run) == expected


Q, K, V = torch.ones(2, 4, 600, 8), torch.ones(2, 4, 600, 8), torch.ones(2, 4, 600, 8)
ARITHMETIC = {
    "mm": (lambda: A @ B, 2 * 4 * 8 * 16),
    "mm in bf16": (lambda: A.bfloat16() @ B.bfloat16(), 4 * 8 * 16),
    "addmm": (lambda: torch.addmm(BIAS, A, B), 2 * 4 * 8 * 16),
    "addmm in place": (lambda: torch.ones(4, 16).addmm_(A, B), 2 * 4 * 8 * 16),
    "baddbmm in place": (
        lambda: torch.ones(2, 4, 16).baddbmm_(A.expand(2, 4, 8), B.expand(2, 8, 16)),
        2 * 2 * 4 * 8 * 16,
    ),
    "batched": (lambda: Q[:, :, :16] @ K[:, :, :16].transpose(2, 3), 2 * 8 * 16 * 16 * 8),
    "linear": (lambda: F.linear(A, B.t(), BIAS), 2 * 4 * 8 * 16),
    "attention": (lambda: F.scaled_dot_product_attention(Q, K, V), 4 * 8 * 600 * 600 * 8),
    "causal": (
        lambda: ops.causal_attention(*(x.transpose(1, 2) for x in (Q, K, V))),
        2 * 8 * 600 * 600 * 8,
    ),
    "nothing": (lambda: F.gelu(X) + F.layer_norm(X, (10,)), 0),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_flops(name):
    run, expected = ARITHMETIC[name]
    assert total(FLOPS, run) == expected


def test_flops_of_a_backward():
    weight = torch.ones(16, 8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    assert total(FLOPS, lambda: F.linear(x, weight).sum().backward()) == 3 * 2 * 4 * 8 * 16
    q = Q.clone().requires_grad_()
    forward = 2 * 8 * 600 * 600 * 8
    once = lambda: F.scaled_dot_product_attention(q, K, V, is_causal=True).sum().backward()  # noqa: E731
    assert total(FLOPS, once) == 3.5 * forward


@pytest.mark.parametrize("rows", ["shared out evenly", "of one group"])
@pytest.mark.parametrize("product", ["torch's", "transformers'", "ours"])
def test_flops_of_grouped_products(rows, product):
    """Every row is multiplied with the weight of one group, forwards and twice backwards."""
    import transformers.integrations.moe  # noqa: F401

    x = torch.ones(10, 8, requires_grad=True)
    weights = torch.ones(2, 8, 16, requires_grad=True)
    ends = torch.tensor([5, 10] if rows == "shared out evenly" else [0, 10], dtype=torch.int32)
    call = {
        "torch's": torch._grouped_mm,
        "transformers'": torch.ops.transformers.grouped_mm_fallback,
        "ours": partial(ops.grouped_linear, transposed=True),
    }[product]
    out = torch.ones(10, 16)
    assert total(FLOPS, lambda: call(x, weights, ends).backward(out)) == 3 * 2 * 10 * 8 * 16


def test_every_kernel_is_started():
    slow = Device("slow", 1e30, 1e30, 1e30, 0, 1.0, 3.0)
    assert charged(slow, lambda: (X + Y, X.t(), X.mul_(2), torch.empty(4))) == [3.0, 3.0]


def test_a_model_computes_the_same_bits():
    def run():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.1)
        layer(torch.ones(3, 2, 16)).square().sum().backward()
        return [p.grad for p in layer.parameters()]

    plain = run()
    with ChargedKernels(FLOPS, lambda seconds: None):
        timed = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, timed, strict=True))

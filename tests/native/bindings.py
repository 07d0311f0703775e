"""Run in a process of its own: the CUDA bindings, registered for the CPU with kernels under the
SIMT shim.

python -m tests.native.bindings LIBRARY: calls every operation through torch, as tests/gpu does on a
GPU.
"""

import sys

import torch

from megatron_merak.ops.schemas import SCHEMAS
from tests.gpu import operators as run
from tests.gpu import reductions
from tests.native import test_activation_kernels as activation
from tests.native import test_norm_kernels as norm
from tests.native import test_residual_kernels as residual
from tests.native import test_rotary_kernels as rotary
from tests.native.shim import TYPES, shifted

CPU = "cpu"


def norms(dtype):
    for centred in (False, True):
        for added in (False, True):
            for wide in (False, True):
                of = norm.case(dtype, 5, 136, centred, added, wide)
                norm.compare(CPU, of, run.norm_forward, run.norm_backward)
                norm.compare(CPU, norm.unaligned(of), run.norm_forward, run.norm_backward)
    of = norm.case(dtype, 6, 40, centred=True)
    mixed = torch.ops.merak.layer_norm(of.x, of.weight, of.bias.float(), norm.EPS)[0]
    assert torch.equal(mixed, run.norm_forward(CPU, of)[0]), "weights of two types"
    columns, weight = of.x.t(), torch.ones(6, dtype=dtype)
    found = torch.ops.merak.rms_norm(columns.view(4, 10, 6), weight, norm.EPS)
    assert found[0].shape == (4, 10, 6) and found[1].shape == (4, 10)
    dense = torch.ops.merak.rms_norm(columns.contiguous().view(4, 10, 6), weight, norm.EPS)
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True)), "a strided input"


def activations(dtype):
    x, up, grad = (activation.numbers(dtype, 6, 40, seed=i) for i in range(3))
    for kind in activation.KINDS:
        activation.compare_gated(CPU, kind, x, up, grad, run.gated)
        activation.compare_gated(CPU, kind, x, up, grad, run.gated_merged)
        for bias in (None, up[0].clone(), up[0].float()):
            activation.compare_biased(CPU, kind, x, bias, grad, run.biased)
    activation.compare_gated(
        CPU, "silu", *activation.numbers(dtype, 6, 80).chunk(2, -1), grad, run.gated
    )
    both, upstream = (
        activation.numbers(dtype, 3, 5, 2, 12),
        activation.numbers(dtype, 3, 5, 2, 6, seed=1),
    )
    for view in (
        both,
        both.transpose(0, 1),
        both[:, 1:3],
        both.movedim(-1, 0).contiguous().movedim(0, -1),
    ):
        grad = upstream.transpose(0, 1) if view.shape[0] == 5 else upstream[:, : view.shape[1]]
        for op, arguments in (
            (torch.ops.merak.gated_merged, ()),
            (torch.ops.merak.gated_merged_backward, (grad,)),
        ):
            found, dense = (op(*arguments, of, "silu") for of in (view, view.contiguous()))
            assert torch.equal(found, dense) and found.shape[:-1] == view.shape[:-1]


def residuals(dtype):
    x, other = (residual.numbers(dtype, 5, 24, seed=i) for i in range(2))
    for bias in (None, other[0].clone(), other[0].float()):
        for p, seed in ((0.0, None), (0.3, 5)):
            residual.compare(CPU, x, bias, other, p, seed, run.bias_dropout_add)
            residual.compare(CPU, shifted(x), bias, None, p, seed, run.bias_dropout_add)


def rotations(dtype):
    fused, angles = rotary.numbers(dtype, 5, 2, 6, 64).transpose(0, 1), rotary.angles(dtype, 5, 32)
    for x in (
        fused,
        fused.contiguous(),
        fused[:, :, 1:4],
        shifted(fused),
        fused.transpose(2, 3).contiguous().mT,
    ):
        for interleaved in (False, True):
            rotary.compare(CPU, x, *angles, interleaved, True, run.rotary)
    rotary.compare(CPU, fused, angles[0], angles[1].float(), False, False, run.rotary)
    deep = rotary.numbers(dtype, 2, 2, 1, 2, 2, 2, 2, 2, 8).transpose(0, 7).transpose(1, 4)
    cos, sin = (rotary.numbers(dtype, 2, 1, 2, 1, 4, seed=i) for i in range(2))
    found, dense = (
        torch.ops.merak.rotary(of, cos, sin, False, False) for of in (deep, deep.contiguous())
    )
    assert torch.equal(found, dense), "more dimensions than a launch takes"
    for x, into in ((deep, torch.empty_like(found)), (fused[:, :, 1:4], fused[:, :, 1:4])):
        tables = (cos, sin) if x is deep else angles
        expected = torch.ops.merak.rotary(x, *tables, False, True)
        torch.ops.merak.rotary_(into, x, *tables, False, True)
        assert torch.equal(into, expected)


def softmax(dtype):
    for keys in (1, 33, 1000, 2500):
        for causal in (False, True):
            reductions.masked_softmax(CPU, dtype, causal, 3, keys)
    reductions.rows_that_see_nothing(CPU)


def losses(dtype):
    for smoothing in (False, True):
        for columns, classes, start in ((7, 7, 0), (1000, 990, 500)):
            reductions.cross_entropy(CPU, dtype, smoothing, 5, columns, classes, start)
    for columns, classes in ((9, 9), (1100, 1000)):
        reductions.exponentiate(CPU, dtype, columns, classes)


def flat(dtype):
    for count in (1, 1023, 4099):
        copy = None if dtype is torch.float32 else dtype
        for moments in reductions.MOMENTS:
            reductions.adamw(CPU, count, dtype, copy, moments)
        reductions.sum_of_squares(CPU, dtype, count)
    for source in TYPES:
        reductions.scaled_copies_and_sums(CPU, dtype, source, (1, 8, 1003))
    reductions.rows_add_up_in_order(CPU, 50, 100, 40)
    reductions.rows_of_tokens_add_up_in_order(CPU, dtype, 7, 3, 40)


def refusals():
    x = torch.ones(2, 8)
    for call in (
        lambda: torch.ops.merak.rms_norm(x.double(), x[0].double(), 1e-5),
        lambda: torch.ops.merak.gated(x, x, "relu"),
        lambda: torch.ops.merak.gated(x, x[:1], "silu"),
        lambda: torch.ops.merak.rotary(x, torch.ones(2, 5), torch.ones(2, 5), False, False),
        lambda: torch.ops.merak.rotary_(
            x.mT, x.mT, torch.ones(8, 1), torch.ones(8, 1), False, False
        ),
        lambda: torch.ops.merak.bias_dropout_add(x, None, None, 2.0, torch.tensor([1])),
        lambda: torch.ops.merak.masked_softmax(x, None, 1.0, True),
        lambda: torch.ops.merak.cross_entropy_stats(
            x, torch.zeros(3, dtype=torch.int64), 0, 8, False
        ),
        lambda: torch.ops.merak.adamw_(x, x, x[0], x, None, 0.1, 0.9, 0.9, 0.1, 0.1, 1, 1.0),
        lambda: torch.ops.merak.adamw_(x, x.half(), x, x, None, 0.1, 0.9, 0.9, 0.1, 0.1, 1, 1.0),
        lambda: torch.ops.merak.add_rows_(x, torch.zeros(3, dtype=torch.int64), x),
    ):
        try:
            call()
        except RuntimeError:
            continue
        raise AssertionError("taken without complaint")


def main() -> None:
    library = torch.library.Library("merak", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.merak, name):
            library.define(name + schema)
    torch.ops.load_library(sys.argv[1])
    for dtype in TYPES:
        for check in (norms, activations, residuals, rotations, softmax, losses, flat):
            check(dtype)
    refusals()


if __name__ == "__main__":
    main()

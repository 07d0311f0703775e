"""Norms against the formula in float64, PyTorch's own modules and HuggingFace's."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatron_merak.ops import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tests.ops.truth import KERNELS, TYPES, assert_rounded, gradients, in_double, random, threads

EPS = 1e-5
twin = torch.ops.merak_torch


def rms_formula(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def layer_formula(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


# name -> the operation's first result, formula, number of vectors beside x
NORMS = {
    "rms_norm": (lambda ops: lambda x, *vectors: ops.rms_norm(x, *vectors, EPS)[0], rms_formula, 1),
    "layer_norm": (
        lambda ops: lambda x, *vectors: ops.layer_norm(x, *vectors, EPS)[0],
        layer_formula,
        2,
    ),
}
# Widths that do not fill vectors, more rows than a block of sums has, one row, none.
SHAPES = [(2, 5, 24), (200, 33), (1, 515), (7, 5), (3, 130, 64), (0, 8), (2, 0, 8)]


def inputs(shape, dtype, vectors=1, weights=None):
    x, *rest, upstream = random(shape, *[shape[-1:]] * vectors, shape, dtype=dtype)
    weight, *bias = [(0.3 * each.float()).to(weights or dtype) for each in rest]
    return [3 * x + 0.5, 1 + weight, *bias], upstream


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_the_gradient_of_its_formula(name):
    norm, formula, vectors = NORMS[name]
    face = {"rms_norm": rms_norm, "layer_norm": layer_norm}[name]
    arguments, _ = inputs((3, 2, 7), torch.float64, vectors)
    arguments = [x.double().requires_grad_() for x in arguments]
    assert torch.autograd.gradcheck(lambda *a: face(*a, EPS), arguments)
    assert torch.allclose(face(*arguments, EPS), formula(*arguments), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_kernels_round_once(name, shape, dtype):
    """Everything but the results is fp32; sums over up to 400 rows are random walks of their
    roundings.
    """
    norm, formula, vectors = NORMS[name]
    arguments, upstream = inputs(shape, dtype, vectors)
    found = gradients(norm(torch.ops.merak), arguments, upstream)
    truth = in_double(formula, arguments, upstream)
    roundings = 1 if compiled() else 4
    for ours, exact, like in zip(found, truth, [arguments[0], *arguments], strict=True):
        assert ours.dtype == like.dtype and ours.is_contiguous()
        assert_rounded(ours, exact, 24, roundings)


def compiled():
    return torch._C._dispatch_has_kernel_for_dispatch_key("merak::rms_norm", "CPU")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NORMS)
def test_twins_in_training_dtypes(name, dtype):
    norm, formula, vectors = NORMS[name]
    arguments, upstream = inputs((2, 5, 24), dtype, vectors)
    found = gradients(norm(twin), arguments, upstream)
    for ours, exact in zip(found, in_double(formula, arguments, upstream), strict=True):
        assert ours.dtype == dtype
        assert_rounded(ours, exact, 24, roundings=4)


@pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("name", NORMS)
def test_weights_of_another_type(name, ops):
    norm, formula, vectors = NORMS[name]
    arguments, upstream = inputs((40, 16), torch.bfloat16, vectors, weights=torch.float32)
    found = gradients(norm(ops), arguments, upstream)
    for ours, exact, like in zip(
        found, in_double(formula, arguments, upstream), [arguments[0], *arguments], strict=True
    ):
        assert ours.dtype == like.dtype
        assert_rounded(ours, exact, 24, roundings=4)


def strided():
    """Tensors [4, 6, 16] that are not dense: heads of a fused projection, transposed, every second
    column, expanded.
    """
    wide = random((4, 9, 16))[0]
    yield "evenly spaced rows", random((24, 40))[0][:, 8:24].unflatten(0, (4, 6))
    yield "heads of a wider product", wide[:, 2:8]
    yield "transposed", random((6, 4, 16))[0].transpose(0, 1)
    yield "columns transposed", random((4, 16, 6))[0].transpose(1, 2)
    yield "every second", random((4, 6, 32))[0][..., ::2]
    yield "expanded", random((1, 1, 16))[0].expand(4, 6, 16)
    yield "rows repeat", random((4, 1, 16))[0].expand(4, 6, 16)


@pytest.mark.parametrize(
    ("kind", "x"), list(strided()), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("name", NORMS)
def test_strided_inputs_and_gradients(name, kind, x):
    norm, _, vectors = NORMS[name]
    rest, _ = inputs((4, 6, 16), torch.float32, vectors)
    for view, upstream in ((x, x.contiguous()), (x.contiguous(), x)):
        found = gradients(norm(torch.ops.merak), [view, *rest[1:]], upstream)
        dense = gradients(
            norm(torch.ops.merak), [view.contiguous(), *rest[1:]], upstream.contiguous()
        )
        assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True))


def test_rms_norm_equals_llama():
    (x, weight), upstream = inputs((2, 5, 24), torch.float32)
    module = LlamaRMSNorm(24, EPS)
    theirs = gradients(
        lambda x, w: torch.func.functional_call(module, {"weight": w}, (x,)), (x, weight), upstream
    )
    for ours, other in zip(
        gradients(lambda x, w: rms_norm(x, w, EPS), (x, weight), upstream), theirs, strict=True
    ):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
def test_a_row_of_zeros_has_no_direction(ops):
    weight = torch.linspace(0.5, 2, 24)
    arguments = torch.zeros(1, 24), weight
    out, grad, grad_weight = gradients(
        lambda x, w: ops.rms_norm(x, w, EPS)[0], arguments, torch.ones(1, 24)
    )
    assert out.count_nonzero() == 0 and grad_weight.count_nonzero() == 0
    torch.testing.assert_close(grad[0], weight / EPS**0.5)


@pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("name", NORMS)
def test_what_is_not_finite_stays_in_its_row(name, ops):
    norm, _, vectors = NORMS[name]
    arguments, _ = inputs((4, 40), torch.float32, vectors)
    arguments[0][1, 7], arguments[0][2, 3] = torch.nan, -torch.inf
    out = norm(ops)(*arguments)
    assert out[0].isfinite().all() and out[3].isfinite().all()
    assert out[1].isnan().all() and out[2, 3].isnan()


@pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
def test_statistics_are_fp32(ops):
    """2048 equal bfloat16 values: squares summed in bfloat16 would stall at 256 of them."""
    x, weight = (
        torch.full((1, 2048), 3.0, dtype=torch.bfloat16),
        torch.ones(2048, dtype=torch.bfloat16),
    )
    out, rstd = ops.rms_norm(x, weight, EPS)
    assert torch.equal(out, torch.ones_like(out)) and rstd.dtype == torch.float32
    _, mean, rstd = ops.layer_norm(x, weight, 0 * weight, EPS)
    assert torch.equal(mean, torch.full_like(mean, 3.0)) and rstd.dtype == torch.float32


def test_layer_norm_of_a_small_spread_about_a_large_mean():
    """Variance as mean(x^2) - mean(x)^2 would have no correct digit; PyTorch's has four."""
    if not compiled():
        pytest.skip("no kernels")
    x = 4096 + torch.randint(-4, 5, (3, 64), generator=torch.Generator().manual_seed(1)).float() / 4
    arguments = x, torch.ones(64), torch.zeros(64)
    assert_rounded(layer_norm(*arguments, EPS), layer_formula(*(t.double() for t in arguments)), 32)


def test_results_do_not_depend_on_threads():
    arguments, upstream = inputs((1500, 96), torch.float32, 2)
    for name, (norm, _, vectors) in NORMS.items():
        one, *more = threads(
            lambda n=norm, v=vectors: gradients(n(torch.ops.merak), arguments[: 1 + v], upstream)
        )
        assert all(torch.equal(a, b) for other in more for a, b in zip(one, other, strict=True)), (
            name
        )


def test_layer_norm_is_pytorchs():
    """Bitwise where PyTorch computes it."""
    (x, weight, bias), upstream = inputs((2, 5, 24), torch.float32, 2)
    expected = gradients(
        lambda *a: F.layer_norm(a[0], (24,), *a[1:], EPS), (x, weight, bias), upstream
    )
    out, mean, rstd = twin.layer_norm(x, weight, bias, EPS)
    found = out, *twin.layer_norm_backward(upstream, x, weight, mean, rstd)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    for ours, theirs in zip(
        gradients(lambda *a: layer_norm(*a, EPS), (x, weight, bias), upstream),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)


# ---- of a sum ------------------------------------------------------------------------------------
OF_SUMS = {"rms_norm": add_rms_norm, "layer_norm": add_layer_norm}


@pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NORMS)
def test_the_norm_of_a_sum_is_the_norm_of_the_rounded_sum(name, dtype, ops):
    norm, _, vectors = NORMS[name]
    (x, *rest), _ = inputs((70, 33), dtype, vectors)
    (residual,) = random((70, 33), dtype=dtype, seed=5)
    y, total, *statistics = getattr(ops, f"add_{name}")(x, residual, *rest, EPS)
    assert torch.equal(total, x + residual)
    apart = getattr(ops, name)(x + residual, *rest, EPS)
    assert all(torch.equal(a, b) for a, b in zip((y, *statistics), apart, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, *TYPES])
@pytest.mark.parametrize("reads", ["both", "norm", "sum"])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_a_sum_and_of_its_norm_meet(name, reads, dtype):
    norm, formula, vectors = NORMS[name]
    (x, *rest), upstream = inputs((70, 33), torch.float32, vectors)
    residual, more = random((70, 33), (70, 33), seed=5)
    x, residual, upstream, more, *rest = (t.to(dtype) for t in (x, residual, upstream, more, *rest))

    def joined(x, residual, *vectors):
        y, total = OF_SUMS[name](x, residual, *vectors, EPS)
        return (y if reads != "sum" else 0 * more) * upstream + (
            total if reads != "norm" else 0 * more
        ) * more

    def apart(x, residual, *vectors):
        total = x + residual
        total = total + (total.to(dtype) - total).detach()  # as it is rounded
        y = formula(total, *vectors)
        wide = upstream.double(), more.double()
        return (y if reads != "sum" else 0 * y) * wide[0] + (
            total if reads != "norm" else 0 * total
        ) * wide[1]

    arguments = (x, residual, *rest)
    leaves = [t.detach().requires_grad_() for t in arguments]
    found = torch.autograd.grad(joined(*leaves).sum(), leaves, allow_unused=True)
    exact = in_double(apart, arguments, torch.ones(70, 33))[1:]
    for ours, truth, like in zip(found, exact, arguments, strict=True):
        if ours is None:
            assert reads == "sum" and not truth.any()
        elif dtype == torch.float64:
            torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
        else:
            assert ours.dtype == like.dtype
            assert_rounded(ours, truth, 24, roundings=4)


@pytest.mark.parametrize("ops", KERNELS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NORMS)
def test_both_gradients_are_added_as_where_norm_and_sum_are_apart(name, dtype, ops):
    """To the bit, so that it changes nothing where the two may be fused and where not."""
    _, _, vectors = NORMS[name]
    (x, weight, *bias), upstream = inputs((71, 130), dtype, vectors)
    (more,) = random((71, 130), dtype=dtype, seed=5)
    _, *statistics = getattr(ops, name)(x, weight, *bias, EPS)
    alone, *of_weights = getattr(ops, f"{name}_backward")(upstream, x, weight, *statistics)
    both = getattr(ops, f"add_{name}_backward")(upstream, more, x, weight, *statistics)
    wanted = (alone + more, *of_weights)
    assert all(torch.equal(a, b) for a, b in zip(both, wanted, strict=True))


def test_keeps_its_input_and_one_number_per_row():
    (x, weight), _ = inputs((4, 24), torch.float32)
    x, weight = x.requires_grad_(), weight.requires_grad_()

    def kept(fn):
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.update({t.data_ptr(): t}) or t, lambda t: t
        ):
            fn()
        return sorted(t.numel() for t in saved.values())

    assert kept(lambda: rms_norm(x, weight, EPS)) == [4, 24, 96]
    assert kept(lambda: add_rms_norm(x, x, weight, EPS)) == [4, 24, 96]
    assert kept(lambda: layer_norm(x, weight, weight, EPS)) == [4, 4, 24, 96]
    assert kept(lambda: add_layer_norm(x, x, weight, weight, EPS)) == [4, 4, 24, 96]


def test_kernels_refuse_what_they_would_misread():
    if not compiled():
        pytest.skip("no kernels")
    (x, weight), upstream = inputs((4, 24), torch.float32)
    rstd = torch.ones(4)
    with pytest.raises(RuntimeError, match="one element type"):
        torch.ops.merak.rms_norm_backward(upstream.bfloat16(), x, weight, rstd)
    with pytest.raises(RuntimeError, match="24 elements expected, not 23"):
        torch.ops.merak.rms_norm(x, weight[1:], EPS)
    with pytest.raises(RuntimeError, match="one shape"):
        torch.ops.merak.add_rms_norm(x, x[:2], weight, EPS)
    with pytest.raises(RuntimeError, match="4 elements expected, not 3"):
        torch.ops.merak.rms_norm_backward(upstream, x, weight, rstd[1:])

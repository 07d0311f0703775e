"""The CUDA kernels of the norms, on the CPU, against their formulas in float64."""

from types import SimpleNamespace

import pytest
import torch

from tests.native.shim import NEEDED, TYPES, LaunchError, load, near, shifted

pytestmark = NEEDED
EPS = 1e-5
# One warp for each row, and rows in a block: 8, 136; several warps: 1000 and 1024, with two rows in
# a block; no whole pack: 1, 7, 1001; the widest that is kept in registers, and wider.
SIZES = [
    (1, 8),
    (5, 1),
    (9, 7),
    (13, 136),
    (6, 1001),
    (5, 1000),
    (3, 1024),
    (4, 8192),
    (3, 8191),
    (3, 8200),
    (2, 9001),
]


@pytest.fixture(scope="module")
def kernels():
    return load("norm")


def case(dtype, rows, width, centred=False, added=False, wide=False, seed=0):
    """Inputs of a norm, of every kind that it may have; weights of fp32 if ``wide``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    of_weight = torch.float32 if wide else dtype
    return SimpleNamespace(
        x=(3 * normal(rows, width) + 1).to(dtype),
        residual=normal(rows, width).to(dtype) if added else None,
        weight=(1 + 0.3 * normal(width)).to(of_weight),
        bias=normal(width).to(of_weight) if centred else None,
        grad=normal(rows, width).to(dtype),
        grad_sum=normal(rows, width).to(dtype) if added else None,
    )


def places(of):
    """How many rows of x lie side by side, and how far the first of these are apart."""
    return getattr(of, "places", (1, of.x.shape[1]))


def unaligned(inputs):
    return SimpleNamespace(
        **{k: None if t is None else shifted(t) for k, t in vars(inputs).items()}
    )


def forward(kernels, of):
    rows, width = of.x.shape
    y, total = torch.empty_like(of.x), None if of.residual is None else torch.empty_like(of.x)
    mean = None if of.bias is None else torch.empty(rows)
    rstd = torch.empty(rows)
    code = TYPES[of.x.dtype], TYPES[of.weight.dtype]
    kernels(
        "merak_norm",
        code[0],
        of.x,
        *places(of),
        of.residual,
        of.weight,
        of.bias,
        code[1],
        y,
        total,
        mean,
        rstd,
        rows,
        width,
        EPS,
    )
    return y, of.x if total is None else total, mean, rstd


def backward(kernels, of, total, mean, rstd):
    rows, width = of.x.shape
    code = TYPES[of.x.dtype], TYPES[of.weight.dtype]
    parts = torch.full(
        (2, kernels.count("merak_norm_parts", code[0], rows, width), width), torch.nan
    )
    grad_x, grad_weight = torch.empty_like(of.x), torch.empty_like(of.weight)
    grad_bias = None if mean is None else torch.empty_like(of.weight)
    kernels(
        "merak_norm_backward", code[0], of.grad, of.grad_sum, total, *places(of), of.weight, code[1], mean, rstd,
        grad_x, parts, grad_weight, grad_bias, rows, width,
    )  # fmt: skip
    return grad_x, grad_weight, grad_bias


def compare(kernels, of, forward=forward, backward=backward):
    """Results and gradients of one case against the formulas."""
    width = of.x.shape[1]
    y, total, mean, rstd = forward(kernels, of)
    if of.residual is not None:
        assert torch.equal(total, (of.x.float() + of.residual.float()).to(of.x.dtype))
    x, weight = total.double(), of.weight.double()
    centre = (
        x.mean(-1, keepdim=True)
        if of.bias is not None
        else torch.zeros(len(x), 1, dtype=torch.float64)
    )
    r = ((x - centre).square().mean(-1, keepdim=True) + EPS).rsqrt()
    normed = (x - centre) * r
    bias = 0 if of.bias is None else of.bias.double()
    # Sums of `width` numbers over warps and lanes have at most 16 + 10 terms in a row, and 1 / rstd
    # halves errors; the looping kernels add width / 512 in a row.
    operations = 32 + width // 512
    spread = (x.abs() + x.abs().mean(-1, keepdim=True)) * r
    near(rstd, r.squeeze(-1), r.squeeze(-1) * (1 + (centre * r).square().squeeze(-1)), operations)
    if mean is not None:
        near(mean, centre.squeeze(-1), x.abs().mean(-1), operations)
    near(
        y,
        normed * weight + bias,
        spread * weight.abs() + (bias if of.bias is None else bias.abs()),
        operations,
    )

    mean, rstd = centre.squeeze(-1).float() if mean is not None else None, r.squeeze(-1).float()
    grad_x, grad_weight, grad_bias = backward(kernels, of, total, mean, rstd)
    up = of.grad.double()
    inner = up * weight
    shift = inner.mean(-1, keepdim=True) if of.bias is not None else 0
    truth = r * (inner - shift - normed * (inner * normed).mean(-1, keepdim=True))
    size = (
        inner.abs()
        + inner.abs().mean(-1, keepdim=True)
        + spread * (inner * spread).abs().mean(-1, keepdim=True)
    )
    if of.grad_sum is not None:  # the norm's own, rounded, and then the sum: to the bit
        alone = SimpleNamespace(**vars(of) | {"grad_sum": None})
        of_norm, *_ = backward(kernels, alone, total, mean, rstd)
        assert torch.equal(grad_x, of_norm + of.grad_sum)
        grad_x = of_norm
    near(grad_x, truth, r * size, operations)
    near(grad_weight, (up * normed).sum(0), (up * spread).abs().sum(0), 16 + len(x))
    if grad_bias is not None:
        near(grad_bias, up.sum(0), up.abs().sum(0), 16 + len(x))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize("kind", ["rms", "layer", "add_rms", "add_layer"])
def test_norm(kernels, kind, rows, width, dtype):
    compare(kernels, case(dtype, rows, width, centred="layer" in kind, added="add" in kind))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 136), (3, 1001), (2, 8200)])
def test_weights_in_float32(kernels, dtype, rows, width):
    compare(kernels, case(dtype, rows, width, centred=True, wide=True))


@pytest.mark.parametrize("width", [136, 8200])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_unaligned_addresses_change_nothing(kernels, dtype, width):
    """The same arithmetic in the same order, to the bit, loads aside."""
    inputs = case(dtype, 5, width, centred=True, added=True)
    first, second = forward(kernels, inputs), forward(kernels, unaligned(inputs))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(
        backward(kernels, inputs, *first[1:]), backward(kernels, unaligned(inputs), shifted(first[1]), *first[2:]),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [8, 7, 136, 8200])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_heads_of_a_wider_product(kernels, dtype, width):
    """Two of four heads of each of three tokens, read where they are: the same to the bit."""
    inputs = case(dtype, 6, width, centred=True)
    wide = torch.full((3, 4, width), torch.nan, dtype=dtype)
    wide[:, 1:3] = inputs.x.view(3, 2, width)
    heads = SimpleNamespace(**vars(inputs) | {"places": (2, 4 * width)})
    y, x, *statistics = forward(kernels, inputs)
    wanted = [y, *statistics, *backward(kernels, inputs, x, *statistics)]
    heads.x = wide.flatten(0, 1)[1:7]  # begins where the first head does
    y, x, *statistics = forward(kernels, heads)
    found = [y, *statistics, *backward(kernels, heads, x, *statistics)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_any_number_of_rows_and_any_order_of_threads(kernels, rows):
    """More rows than the blocks of the backward hold, and fewer; the order of warps decides
    nothing.
    """
    inputs = case(torch.float32, rows, 520, centred=True)
    compare(kernels, inputs)
    y, total, mean, rstd = forward(kernels, inputs)
    first = backward(kernels, inputs, total, mean, rstd)
    for seed in range(3):
        kernels.seed(seed)
        assert torch.equal(forward(kernels, inputs)[0], y)
        for a, b in zip(backward(kernels, inputs, total, mean, rstd), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("width", [136, 8200])
def test_rows_do_not_touch(kernels, width):
    """A row that is not finite spoils itself and the weights' gradients, and no other row."""
    inputs = case(torch.float32, 7, width, centred=True)
    y, total, mean, rstd = forward(kernels, inputs)
    grad_x = backward(kernels, inputs, total, mean, rstd)[0]
    for bad in (torch.nan, torch.inf):
        inputs.x[3, 5] = bad
        found, total, mean, rstd = forward(kernels, inputs)
        found_grad = backward(kernels, inputs, total, mean, rstd)[0]
        rest = torch.arange(7) != 3
        assert torch.equal(found[rest], y[rest]) and torch.equal(found_grad[rest], grad_x[rest])
        assert not found[3].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_zeros_and_huge_values(kernels, dtype):
    """A row of zeros has no direction; squares of fp16's and bf16's largest sums are still finite
    in fp32.
    """
    inputs = case(dtype, 3, 136)
    inputs.x[0] = 0
    inputs.x[1] = 6e4 if dtype == torch.float16 else 1e17
    y, _, _, rstd = forward(kernels, inputs)
    assert y[0].count_nonzero() == 0 and abs(rstd[0].item() * EPS**0.5 - 1) < 1e-6
    near(y[1], inputs.weight.double(), 1.0)


def test_layer_norm_far_from_zero(kernels):
    """The squares of x itself would lose the variance: 1e4 squared has no room for 1 beside it."""
    inputs = case(torch.float32, 4, 1000, centred=True)
    inputs.x += 1e4
    compare(kernels, inputs)
    y = forward(kernels, inputs)[0].double()
    normed = (y - inputs.bias.double()) / inputs.weight.double()
    assert (normed.square().mean(-1) - 1).abs().max() < 5e-3


def test_nothing_to_do(kernels):
    empty = case(torch.float32, 0, 16, centred=True)
    y, total, mean, rstd = forward(kernels, empty)
    _, grad_weight, grad_bias = backward(kernels, empty, total, mean, rstd)
    assert grad_weight.count_nonzero() == grad_bias.count_nonzero() == 0


def test_types_that_do_not_fit_are_refused(kernels):
    inputs = case(torch.float32, 2, 16)
    inputs.weight = inputs.weight.half()
    with pytest.raises(LaunchError):
        forward(kernels, inputs)

"""The CUDA kernels for flat buffers on a CPU: AdamW against float64, exact sums, rounded copies,
rows in order.
"""

import math

import pytest
import torch

from tests.native.shim import NEEDED, TYPES, LaunchError, load

pytestmark = NEEDED
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 3, 4, 5, 8, 63, 1023, 1024, 1025, 4099)
RATE, BETA1, BETA2, EPS, DECAY = 3e-3, 0.9, 0.999, 1e-8, 0.1


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def at_offset(tensor, elements):
    return torch.empty(tensor.numel() + elements, dtype=tensor.dtype)[elements:].copy_(tensor)


def adamw(kernels, master, first, second, grad, copy, step, scale=1.0):
    moments = TYPES[first.dtype], first, TYPES[second.dtype], second
    types = TYPES[grad.dtype], 0 if copy is None else TYPES[copy.dtype]
    how = RATE, BETA1, BETA2, EPS, DECAY, step, scale
    kernels("merak_adamw", master, *moments, types[0], grad, types[1], copy, len(master), *how)


def exact_adamw(master, first, second, grad, step, scale=1.0):
    g = grad.double() * scale
    first.mul_(BETA1).add_(g, alpha=1 - BETA1)
    second.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
    root = second.sqrt() / math.sqrt(1 - BETA2**step) + EPS
    master.mul_(1 - RATE * DECAY).sub_(RATE / (1 - BETA1**step) * first / root)


def check_adamw(
    kernels, count, grad_dtype=torch.float32, copy_dtype=torch.bfloat16, offset=0, steps=4
):
    """fp32: a few roundings a step, each of 2^-24 of the largest that a value, or what is added to
    it, ever was.
    """
    state = [at_offset(t, offset) for t in (randn(count), torch.zeros(count), torch.zeros(count))]
    truth = [t.double() for t in state]
    largest = [t.abs() for t in truth]
    copy = None if copy_dtype is None else torch.zeros(count + offset, dtype=copy_dtype)[offset:]
    for step in range(1, steps + 1):
        grad = at_offset(randn(count, seed=step, dtype=grad_dtype), offset)
        adamw(kernels, *state, grad, copy, step, scale=0.37)
        exact_adamw(*truth, grad, step, scale=0.37)
        added = 3 * RATE, (1 - BETA1) * 0.37 * grad.double().abs(), 0.0
        largest = [
            most.maximum(t.abs() + a) for most, t, a in zip(largest, truth, added, strict=True)
        ]
    for found, exact, most in zip(state, truth, largest, strict=True):
        assert bool(((found.double() - exact).abs() <= 6 * steps * 2.0**-24 * most).all())
    if copy is not None:
        assert torch.equal(copy, state[0].to(copy_dtype))


def sum_of_squares(kernels, x):
    parts = kernels.count("merak_sum_of_squares_parts", TYPES[x.dtype], x.numel())
    room, total = (
        torch.full((parts,), float("nan"), dtype=torch.float64),
        torch.full((), -1.0, dtype=torch.float64),
    )
    kernels("merak_sum_of_squares", TYPES[x.dtype], x, x.numel(), room, total)
    return total.item()


def scale_into(kernels, name, into, x, scale):
    kernels(f"merak_{name}", TYPES[into.dtype], into, TYPES[x.dtype], x, x.numel(), scale)


def add_rows(kernels, into, index, rows):
    places, order = index.sort(stable=True)
    types = TYPES[into.dtype], TYPES[rows.dtype]
    kernels(
        "merak_add_rows", types[0], into, places, order, types[1], rows, len(index), *into.shape
    )


def check_add_rows(kernels, table, count, width, into=torch.float32, rows=torch.bfloat16, offset=0):
    """Exactly the sum in order, in fp32, rounded once."""
    given = at_offset(randn(table * width, seed=1, dtype=into), offset).view(table, width)
    index = torch.randint(table, (count,), generator=torch.Generator().manual_seed(width))
    added = randn(count, width, seed=2, dtype=rows)
    expected = given.float().clone()
    for k, row in enumerate(index.tolist()):
        expected[row] += added[k].float()
    add_rows(kernels, given, index, added)
    assert torch.equal(given, expected.to(into))


def check_sums_of_rows(kernels, tokens, k, width, dtype=torch.bfloat16, offset=0):
    """Exactly the sum in order, in fp32, rounded once."""
    count = tokens * k + 3
    rows = at_offset(randn(count * width, seed=1, dtype=dtype), offset).view(count, width)
    places = torch.randint(count, (tokens * k,), generator=torch.Generator().manual_seed(width))
    expected = torch.zeros(tokens, width)
    for token, of_token in enumerate(places.view(tokens, k).tolist()):
        for place in of_token:
            expected[token] += rows[place].float()
    found = torch.full((tokens, width), float("nan"), dtype=dtype)
    sums_of_rows(kernels, rows, places, k, found)
    assert torch.equal(found, expected.to(dtype))


def sums_of_rows(kernels, rows, places, k, into):
    operands = (TYPES[rows.dtype], rows, places, k, into)
    kernels("merak_sums_of_rows", *operands, len(into), *rows.shape)


@pytest.fixture(scope="module")
def kernels():
    return load("flat")


@pytest.mark.parametrize("count", SIZES)
def test_adamw_of_any_size(kernels, count):
    check_adamw(kernels, count)
    check_adamw(kernels, count, offset=1)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("copy_dtype", [None, *DTYPES])
def test_adamw_of_any_types(kernels, grad_dtype, copy_dtype):
    check_adamw(kernels, 103, grad_dtype, copy_dtype)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_moments_are_rounded_where_they_are_stored_and_nowhere_else(kernels, first, second):
    for count, offset in ((3, 0), (4, 0), (1025, 0), (1025, 1)):
        exact = [randn(count), torch.zeros(count), torch.zeros(count)]
        kinds = torch.float32, first, second
        stored = [at_offset(t.to(kind), offset) for t, kind in zip(exact, kinds, strict=True)]
        for step in range(1, 5):
            grad = randn(count, seed=step)
            copy = torch.zeros(count, dtype=torch.bfloat16)
            adamw(kernels, *exact, grad, None, step, scale=0.37)
            adamw(kernels, *stored, at_offset(grad, offset), copy, step, scale=0.37)
            for found, wide in zip(stored, exact, strict=True):
                wide.copy_(wide.to(found.dtype))
                assert torch.equal(found, wide.to(found.dtype)), (count, step)
            assert torch.equal(copy, stored[0].to(copy.dtype))


def test_moments_of_fp16_are_refused(kernels):
    state = [torch.zeros(8), torch.zeros(8, dtype=torch.float16), torch.zeros(8)]
    with pytest.raises(LaunchError):
        adamw(kernels, *state, torch.ones(8), None, 1)


def test_an_update_depends_neither_on_place_nor_on_neighbours(kernels):
    count = 57
    values = [randn(count, seed=k).abs_() for k in range(4)]
    results = []
    for before in (0, 1, 4, 1021):
        state = [
            torch.cat((randn(before, seed=9).abs_(), t, randn(11, seed=8).abs_())) for t in values
        ]
        adamw(kernels, *state, None, 3)
        results.append([t[before : before + count] for t in state[:3]])
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_the_decay_of_a_small_second_moment_is_not_lost(kernels):
    """1 - 0.999 in fp32 is 5e-5 off; after one step the second moment is that much of the
    gradient's square.
    """
    state = [torch.zeros(8) for _ in range(3)]
    adamw(kernels, *state, torch.ones(8), None, 1)
    torch.testing.assert_close(
        state[2].double(), torch.full((8,), 1 - 0.999, dtype=torch.float64), rtol=2e-7, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, *SIZES, 20001])
def test_sums_of_squares_are_those_of_fp64(kernels, dtype, count):
    x = randn(count, seed=count, dtype=dtype)
    assert sum_of_squares(kernels, x) == pytest.approx(
        math.fsum(v * v for v in x.tolist()), rel=1e-14
    )


def test_a_long_sum_of_squares_has_several_packs_for_each_thread(kernels):
    x = randn(3_000_001, seed=2)
    assert sum_of_squares(kernels, x) == pytest.approx(x.double().square().sum().item(), rel=1e-13)


def test_a_sum_of_squares_has_the_same_bits_at_any_address_and_does_not_overflow(kernels):
    x, huge = randn(5000, seed=3), torch.full((10,), 1e30)
    assert sum_of_squares(kernels, x) == sum_of_squares(kernels, at_offset(x, 1))
    assert sum_of_squares(kernels, huge) == pytest.approx(10 * huge[0].item() ** 2, rel=1e-14)
    assert math.isnan(sum_of_squares(kernels, torch.tensor([1.0, float("nan")])))
    assert sum_of_squares(kernels, torch.tensor([1.0, float("inf")])) == math.inf


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_scaled_copies_and_sums_round_once(kernels, into, source):
    for count, offset in ((1, 0), (7, 0), (8, 0), (2055, 0), (2055, 1)):
        x = at_offset(randn(count, seed=1, dtype=source), offset)
        held = at_offset(randn(count, seed=2, dtype=into), offset)
        found = at_offset(held, offset)
        scale_into(kernels, "cast", found, x, 0.3)
        assert torch.equal(found, (x.float() * torch.tensor(0.3)).to(into))
        found.copy_(held)
        # exact: one rounding whether or not it is a fused product
        scale_into(kernels, "accumulate", found, x, 0.5)
        assert torch.equal(found, (held.float() + x.float() * 0.5).to(into))


@pytest.mark.parametrize("into", DTYPES)
@pytest.mark.parametrize("rows", DTYPES)
def test_rows_of_any_types_add_up_in_order(kernels, into, rows):
    check_add_rows(kernels, 5, 23, 40, into, rows)


@pytest.mark.parametrize("width", [1, 8, 13, 1024, 1032, 2500])
@pytest.mark.parametrize(("table", "count"), [(1, 9), (7, 1), (4, 12)])
def test_rows_of_any_width(kernels, table, count, width):
    check_add_rows(kernels, table, count, width)


def test_rows_at_any_address(kernels):
    check_add_rows(kernels, 3, 10, 16, offset=1)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_index_out_of_range_fails_the_launch(kernels, wrong):
    table = torch.zeros(6, 8)[1:5]  # in room of its own, should the kernel write past it after all
    with pytest.raises(LaunchError, match="out of range"):
        add_rows(kernels, table, torch.tensor([0, wrong]), torch.ones(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 13, 1024, 1032, 2500])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (5, 2), (3, 8), (4, 6)])
def test_rows_of_tokens_add_up_in_order(kernels, tokens, k, width, dtype):
    check_sums_of_rows(kernels, tokens, k, width, dtype)


def test_rows_of_tokens_at_any_address(kernels):
    check_sums_of_rows(kernels, 3, 2, 16, offset=1)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_place_out_of_range_fails_the_launch(kernels, wrong):
    with pytest.raises(LaunchError, match="out of range"):
        places = torch.tensor([0, wrong])
        sums_of_rows(kernels, torch.ones(6, 8)[1:5], places, 2, torch.zeros(1, 8))


def test_nothing_to_do(kernels):
    empty = torch.empty(0)
    adamw(kernels, empty, empty, empty, empty, None, 1)
    scale_into(kernels, "cast", empty, empty, 1.0)
    nowhere = torch.empty(0, dtype=torch.int64)
    add_rows(kernels, torch.zeros(3, 4), nowhere, torch.empty(0, 4))
    sums_of_rows(kernels, torch.zeros(3, 4), nowhere, 2, torch.empty(0, 4))

"""Passes over flat buffers, compiled and in PyTorch: AdamW, norms, sums of tensors of different
types.
"""

import math
from itertools import pairwise, product

import pytest
import torch

from megatron_merak.ops import PROBLEMS, accumulate_, adamw_, add_rows_, cast_, sum_of_squares

COMPILED = not PROBLEMS["_ops_cpu"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLEMENTATIONS = {"ours": torch.ops.merak, "torch": torch.ops.merak_torch}
implementations = pytest.mark.parametrize("ops", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# ---- AdamW ---------------------------------------------------------------------------------------
def state_of(size, seed=0):
    """Master, first and second moment as they are in the middle of a training, and a gradient."""
    return (
        draw(size, seed=seed),
        0.1 * draw(size, seed=seed + 1),
        0.01 * draw(size, seed=seed + 2).square(),
        draw(size, seed=seed + 3),
    )


def exact(master, exp_avg, exp_avg_sq, grad, step, scale, lr, betas, eps, weight_decay):
    """The paper's update in float64."""
    master, exp_avg, exp_avg_sq, grad = (x.double() for x in (master, exp_avg, exp_avg_sq, grad))
    grad = grad * scale
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    exp_avg_sq = betas[1] * exp_avg_sq + (1 - betas[1]) * grad**2
    root = (exp_avg_sq / (1 - betas[1] ** step)).sqrt() + eps
    return (
        master * (1 - lr * weight_decay) - lr * exp_avg / (1 - betas[0] ** step) / root,
        exp_avg,
        exp_avg_sq,
    )


def run(
    ops, state, copy=None, step=3, scale=1.0, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
):
    ops.adamw_(*state, copy, lr, *betas, eps, weight_decay, step, scale)


@implementations
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200, 5000])
@pytest.mark.parametrize("dtype", TYPES)
def test_adamw_is_the_papers(ops, size, dtype):
    """float32 roundings of about five operations, each relative to what it makes."""
    for step, scale, decay, beta1 in ((1, 1.0, 0.1, 0.9), (7, 0.3, 0.0, 0.9), (2, 1.0, 0.1, 0.3)):
        options = OPTIONS | {"weight_decay": decay, "betas": (beta1, 0.95)}
        *state, grad = state_of(size)
        state, grad = [x.clone() for x in state], grad.to(dtype)
        truth = exact(*state, grad, step, scale, **options)
        run(ops, (*state, grad), step=step, scale=scale, **options)
        for ours, other in zip(state, truth, strict=True):
            torch.testing.assert_close(ours.double(), other, rtol=1e-6, atol=1e-7)


@implementations
def test_adamw_is_torchs_fused_one_to_the_bit(ops):
    master, exp_avg, exp_avg_sq, _ = state_of(640)
    parameter = torch.nn.Parameter(master.clone())
    theirs = torch.optim.AdamW(
        [parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    ours = [parameter.detach().clone(), torch.zeros(640), torch.zeros(640)]
    for step in range(1, 6):
        parameter.grad = draw(640, seed=10 * step)
        run(ops, (*ours, parameter.grad), step=step)
        theirs.step()
        held = theirs.state[parameter]
        assert torch.equal(ours[0], parameter), step
        assert torch.equal(ours[1], held["exp_avg"]) and torch.equal(ours[2], held["exp_avg_sq"]), (
            step
        )


@implementations
@pytest.mark.parametrize("dtype", TYPES)
def test_the_copy_is_the_rounded_master(ops, dtype):
    for size in (3, 64, 130):
        state, copy = state_of(size), torch.zeros(size, dtype=dtype)
        run(ops, state, copy)
        assert torch.equal(copy, state[0].to(dtype)) and copy.count_nonzero()


MOMENTS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


@implementations
@pytest.mark.parametrize("moments", MOMENTS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_moments_are_rounded_where_they_are_stored_and_nowhere_else(ops, moments, dtype):
    for size in (0, 1, 63, 64, 200):
        master, first, second, _ = state_of(size)
        stored = [master, first.to(moments[0]), second.to(moments[1])]
        exact = [x.float().clone() for x in stored]
        for step in range(1, 4):
            grad = draw(size, seed=10 * step).to(dtype)
            copy = torch.zeros(size, dtype=torch.bfloat16)
            run(ops, (*stored, grad), copy, step=step, scale=0.7)
            run(ops, (*exact, grad), step=step, scale=0.7)
            assert torch.equal(stored[0], exact[0]), (size, step)
            for found, wide in zip(stored[1:], exact[1:], strict=True):
                wide.copy_(wide.to(found.dtype))
                assert torch.equal(found, wide.to(found.dtype)), (size, step)
            assert torch.equal(copy, master.to(torch.bfloat16))


@pytest.mark.skipif(not COMPILED, reason="torch's kernel cuts vector registers")
def test_an_update_with_rounded_moments_depends_neither_on_place_nor_on_threads():
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            master, first, second, grad = state_of(200_001)
            results.append((master, first.bfloat16(), second.bfloat16()))
            adamw_(*results[-1], grad, step=2, scale=0.7, **OPTIONS)
    finally:
        torch.set_num_threads(threads)
    master, first, second, grad = state_of(200_001)
    parts = (master, first.bfloat16(), second.bfloat16())
    for start, stop in pairwise((0, 1, 18, 64, 129, 640, 200_001)):
        own = (x[start:stop] for x in parts)
        adamw_(*own, grad[start:stop], step=2, scale=0.7, **OPTIONS)
    for other in (*results[1:], parts):
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.skipif(not COMPILED, reason="of the kernel")
def test_moments_of_fp16_are_refused():
    master, first, second, grad = state_of(70)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        adamw_(master, first.half(), second, grad, step=1, **OPTIONS)


def test_a_values_update_does_not_depend_on_its_place():
    """torch's kernel rounds what does not fill a vector register otherwise: of it this holds for
    whole registers.
    """
    whole = state_of(1000)
    parts = [x.clone() for x in whole]
    adamw_(*whole, step=2, scale=0.7, **OPTIONS)
    places = (0, 1, 18, 64, 129, 640, 1000) if COMPILED else (0, 64, 128, 640, 1000)
    for start, stop in pairwise(places):
        adamw_(*(x[start:stop] for x in parts), step=2, scale=0.7, **OPTIONS)
    assert all(torch.equal(ours, other) for ours, other in zip(parts, whole, strict=True))


@pytest.mark.skipif(not COMPILED, reason="torch's threads cut vector registers")
def test_an_update_does_not_depend_on_threads():
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(state_of(200_001))
            adamw_(*results[-1], step=2, scale=0.7, **OPTIONS)
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_zeros_stay_zeros_and_nan_spoils_only_itself():
    state = [torch.zeros(70) for _ in range(4)]
    state[3][5] = torch.nan
    adamw_(*state, step=1, **OPTIONS)
    assert state[0].isnan().nonzero().tolist() == [[5]] and not state[0].nan_to_num().any()


# ---- norm ----------------------------------------------------------------------------------------
@implementations
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 70_000])
def test_sum_of_squares(ops, size, dtype):
    x = draw(size, dtype=dtype)
    found = ops.sum_of_squares(x)
    assert found.dtype == torch.float64 and found.shape == ()
    # The twin rounds the norm of each 64 to fp32.
    precision = 1e-7 if COMPILED and ops is torch.ops.merak else 1e-6
    assert found.item() == pytest.approx(x.double().square().sum().item(), rel=precision)


def test_a_sum_of_many_squares_is_exact():
    x = torch.full((6_000_001,), 0.1)
    assert sum_of_squares(x).item() == pytest.approx(
        6_000_001 * float(torch.tensor(0.1)) ** 2, rel=1e-7
    )


@pytest.mark.skipif(not COMPILED, reason="torch's sums depend on the number of threads")
def test_the_sum_does_not_depend_on_threads():
    x, threads, found = draw(300_001), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(sum_of_squares(x).item())
    finally:
        torch.set_num_threads(threads)
    assert found == [found[0]] * 3


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(bad):
    x = draw(100)
    x[77] = bad
    assert not math.isfinite(sum_of_squares(x).item())


# ---- sums of tensors of different types ----------------------------------------------------------
@implementations
@pytest.mark.parametrize(("into", "of"), list(product(TYPES, TYPES)))
def test_accumulate_and_cast_round_once(ops, into, of):
    for shape in ((5, 33), (0,), (1,)):
        sums, x = draw(*shape, dtype=into), draw(*shape, seed=5, dtype=of)
        for scale in (1.0, 0.5, -3.0):
            added, cast = sums.clone(), torch.empty_like(sums)
            ops.accumulate_(added, x, scale)
            ops.cast_(cast, x, scale)
            torch.testing.assert_close(added, (sums.double() + scale * x.double()).to(into))
            assert torch.equal(cast, (x.float() * scale).to(into))


def test_low_precision_rows_add_up_in_fp32():
    sums, x = torch.full((4, 3), 1000.0), torch.full((4, 3), 0.0078125, dtype=torch.bfloat16)
    for _ in range(8):
        accumulate_(sums, x)
    assert torch.equal(sums, torch.full((4, 3), 1000.0625))


@implementations
@pytest.mark.parametrize(
    ("into", "of"), [(torch.float32, x) for x in TYPES] + [(torch.bfloat16, torch.bfloat16)]
)
def test_rows_are_added_at_their_index(ops, into, of):
    for rows, width in ((0, 4), (1, 1), (7, 19), (50, 64)):
        table = torch.arange(6.0 * width).remainder(9).view(6, width).to(into)
        index = torch.arange(rows).mul(5).remainder(6)
        # exact sums in every type
        given = torch.arange(rows * width).remainder(4).view(rows, width).to(of)
        expected = table.double().index_add_(0, index, given.double()).to(into)
        ops.add_rows_(table, index, given)
        assert torch.equal(table, expected)
    again = table.clone()
    add_rows_(table, index, given)
    add_rows_(again, index.int(), given)
    assert torch.equal(table, again)


def test_tables_and_rows_that_are_not_dense():
    table, rows = torch.zeros(4, 6), torch.arange(6.0).view(3, 2).t()
    add_rows_(table[:, ::2], torch.tensor([3, 3]), rows)
    assert table.tolist()[3] == [1.0, 0.0, 5.0, 0.0, 9.0, 0.0] and not table[:3].any()
    sums = torch.ones(3, 4)
    accumulate_(sums.t(), torch.arange(12.0).view(4, 3), 2.0)
    assert torch.equal(sums, 1 + 2 * torch.arange(12.0).view(4, 3).t())
    cast_(sums[:, 1], torch.tensor([7.0, 8.0, 9.0], dtype=torch.float16))
    assert sums[:, 1].tolist() == [7.0, 8.0, 9.0] and sums[0, 0] == 1


@pytest.mark.parametrize("place", [4, -1])
def test_an_index_out_of_range_is_refused(place):
    table = torch.zeros(4, 2)
    with pytest.raises((RuntimeError, IndexError)):
        add_rows_(table, torch.tensor([0, place]), torch.ones(2, 2, dtype=torch.bfloat16))


@implementations
def test_opcheck(ops):
    *state, grad = state_of(10)
    torch.library.opcheck(ops.adamw_, (*state, grad, None, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 1.0))
    copy = torch.zeros(10, dtype=torch.bfloat16)
    torch.library.opcheck(ops.adamw_, (*state, grad, copy, 1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 0.5))
    master, *moments = state
    rounded = [x.bfloat16() for x in moments]
    how = (1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 0.5)
    torch.library.opcheck(ops.adamw_, (master, *rounded, grad, copy, *how))
    torch.library.opcheck(ops.sum_of_squares, (grad,))
    torch.library.opcheck(ops.accumulate_, (grad, copy, 2.0))
    torch.library.opcheck(ops.cast_, (copy, grad, 2.0))
    torch.library.opcheck(ops.add_rows_, (draw(4, 3), torch.tensor([1, 1]), draw(2, 3).bfloat16()))

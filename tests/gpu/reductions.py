"""Softmax, cross entropy and flat buffers against their PyTorch twins in float64, on a device that
has the kernels.
"""

import torch

# A rounding of the result, and for fp32 what approximate exponentials and sums of many terms leave.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
DTYPES = tuple(TOLERANCE)
_STORED = (torch.float32, torch.bfloat16)
MOMENTS = tuple((first, second) for first in _STORED for second in _STORED)  # of AdamW


def randn(device, *shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_close(found, truth):
    if not truth.numel():
        return
    scale = truth.abs().max().clamp(min=1e-30)
    off = ((found.double() - truth.double()).abs().max() / scale).item()
    assert off <= TOLERANCE[found.dtype], f"{off:.2e} of the largest value"


def copies(arguments):
    """Clones that keep their strides."""
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]


def wide(arguments):
    return [
        a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments
    ]


def check(name, *arguments, changed=()):
    """Results, and arguments that change in place, against the twin in fp64; and that the schema
    tells what changes.
    """
    operation = getattr(torch.ops.merak, name).default
    torch.library.opcheck(
        operation, tuple(copies(arguments)), test_utils=("test_schema", "test_faketensor")
    )
    given, truths = copies(arguments), wide(copies(arguments))
    found, truth = operation(*given), getattr(torch.ops.merak_torch, name)(*truths)
    pairs = zip(
        *(r if isinstance(r, tuple) else () if r is None else (r,) for r in (found, truth)),
        strict=True,
    )
    for ours, theirs in pairs:
        assert_close(ours, theirs)
    for place in changed:
        assert_close(given[place], truths[place])


def masked_softmax(device, dtype, causal, queries, keys):
    scores, mask = (
        3 * randn(device, 2, 3, queries, keys, dtype=dtype),
        randn(device, 2, 1, queries, keys, seed=1) > -1,
    )
    check("masked_softmax", scores, mask, 0.3, causal)
    check("masked_softmax", scores, None, 0.3, causal)
    probabilities = torch.ops.merak.masked_softmax(scores, mask, 0.3, causal)
    grad = randn(device, 2, 3, queries, keys, seed=2, dtype=dtype)
    check("masked_softmax_backward", grad, probabilities, 0.3, causal)


def rows_that_see_nothing(device):
    scores, mask = (
        randn(device, 1, 2, 4, 64),
        torch.ones(1, 1, 4, 64, dtype=torch.bool, device=device),
    )
    mask[0, 0, 1] = False
    out = torch.ops.merak.masked_softmax(scores, mask, 1.0, False)
    assert out[:, :, 1].count_nonzero() == 0 and bool(out.isfinite().all())


def cross_entropy(device, dtype, smoothing, rows, columns, classes, start):
    logits = 3 * randn(device, rows, columns, dtype=dtype)
    target = torch.arange(rows, device=device) * 37 % columns + start // 2
    arguments = logits, target, start, classes, smoothing
    stats = torch.ops.merak.cross_entropy_stats(*arguments)
    truth = torch.ops.merak_torch.cross_entropy_stats(*wide(arguments))
    torch.testing.assert_close(stats.double(), truth, rtol=2e-5, atol=2e-2 if smoothing else 0)
    grad = randn(device, *stats.shape, seed=1) / stats[:, 1:2]
    check("cross_entropy_grad", logits, target, stats, grad, start, classes)
    check("cross_entropy_grad_", logits, target, stats, grad, start, classes, changed=(0,))
    check(
        "cross_entropy_grad_",
        logits.t().contiguous().t(),
        target,
        stats,
        grad,
        start,
        classes,
        changed=(0,),
    )


def exponentiate(device, dtype, columns, classes):
    target = torch.arange(9, device=device) * 31 % classes
    check(
        "exponentiate_", 3 * randn(device, 9, columns, dtype=dtype), target, classes, changed=(0,)
    )


def adamw(device, count, grad, copy, moments):
    state = [
        randn(device, count),
        randn(device, count, seed=1).to(moments[0]),
        randn(device, count, seed=2).square().to(moments[1]),
    ]
    gradient = randn(device, count, seed=3, dtype=grad)
    copied = None if copy is None else torch.zeros(count, dtype=copy, device=device)
    truths = [t.double() for t in (*state, gradient)]
    how = (1e-3, 0.9, 0.999, 1e-8, 0.1, 5, 0.7)
    torch.ops.merak.adamw_(*state, gradient, copied, *how)
    torch.ops.merak_torch.adamw_(*truths, None, *how)
    for ours, truth in zip(state, truths[:3], strict=True):
        rounding = 2.0**-8 if ours.dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(ours.double(), truth, rtol=rounding, atol=1e-6)
    if copied is not None:
        assert torch.equal(copied, state[0].to(copy))


def sum_of_squares(device, dtype, count):
    x = randn(device, count, dtype=dtype)
    found = [torch.ops.merak.sum_of_squares(x) for _ in range(3)]
    assert (
        found[0].dtype == torch.float64
        and torch.equal(found[0], found[1])
        and torch.equal(found[0], found[2])
    )
    torch.testing.assert_close(found[0], x.double().square().sum(), rtol=1e-13, atol=0)


def scaled_copies_and_sums(device, into, source, counts):
    for count in counts:
        held, x = randn(device, count, dtype=into), randn(device, count, seed=1, dtype=source)
        check("accumulate_", held, x, 0.5, changed=(0,))
        check("cast_", held, x, 0.5, changed=(0,))
    turned = randn(device, 64, 32, dtype=into).t()
    check("accumulate_", turned, randn(device, 32, 64, seed=1, dtype=source), 0.5, changed=(0,))


def rows_add_up_in_order(device, table, count, width):
    """The same bits as one row after the other in fp32, however often."""
    index = torch.randint(table, (count,), generator=torch.Generator().manual_seed(0))
    rows, held = (
        randn(device, count, width, seed=1, dtype=torch.bfloat16),
        randn(device, table, width),
    )
    found = held.clone()
    torch.ops.merak.add_rows_(found, index.to(device), rows)
    expected = held.cpu().index_add_(0, index, rows.cpu().float())
    assert torch.equal(found.cpu(), expected)


def rows_of_tokens_add_up_in_order(device, dtype, tokens, k, width):
    """The same bits as one row after the other in fp32, rounded once."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(tokens, (tokens * k,), generator=generator)
    rows = randn(device, tokens, width, seed=1, dtype=dtype)
    found = torch.ops.merak.sums_of_rows(rows, places.to(device), k)
    expected = torch.zeros(tokens, width)
    for which in places.view(tokens, k).unbind(1):
        expected += rows.cpu().float()[which]
    assert torch.equal(found.cpu(), expected.to(dtype))

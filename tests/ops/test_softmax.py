"""Masked softmax, compiled and in PyTorch, against its formula in float64."""

import pytest
import torch

from megatron_merak.ops import masked_softmax

# Of a probability, or of its gradient where the largest is 1: float32 a few units in the last
# place, the others one rounding of the result.
TOLERANCES = [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)]
IMPLEMENTATIONS = {"ours": torch.ops.merak, "torch": torch.ops.merak_torch}
implementations = pytest.mark.parametrize("ops", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def formula(scores, mask, scale, causal):
    """Rows without a key are zero."""
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril(scores.shape[-1] - scores.shape[-2]) if causal else seen
    seen = seen if mask is None else seen & mask
    hidden = (scores * scale).masked_fill(~seen, -torch.inf)
    return hidden.softmax(-1).masked_fill(~(hidden > -torch.inf).any(-1, keepdim=True), 0.0)


def problem(shape, dtype, spread=3.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return [(spread * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2)]


def masks(batch, heads, queries, keys):
    generator = torch.Generator().manual_seed(queries * keys)

    def draw(*shape):
        return torch.rand(shape, generator=generator) < 0.7

    return {
        "none": None,
        "keys": draw(batch, 1, 1, keys),
        "heads": draw(1, heads, queries, keys),
        "expanded": draw(1, 1, queries, keys).expand(batch, heads, queries, keys),
        "transposed": draw(1, 1, keys, queries).transpose(2, 3),
        "nothing": torch.zeros(1, 1, 1, keys, dtype=torch.bool),
        "some rows": (torch.arange(queries) % 2 == 0)
        .view(1, 1, queries, 1)
        .expand(1, 1, queries, keys),
    }


SHAPES = [
    (2, 3, 5, 7),
    (1, 2, 16, 16),
    (2, 1, 33, 65),
    (1, 1, 1, 1),
    (1, 2, 7, 3),
    (1, 1, 3, 300),
    (0, 2, 3, 4),
]


@implementations
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_formula(ops, shape, causal, dtype, tolerance):
    scores, upstream = problem(shape, dtype)
    for name, mask in masks(*shape).items():
        exact = scores.double().requires_grad_()
        truth = formula(exact, mask, 0.3, causal)
        (slope,) = torch.autograd.grad(truth, exact, upstream.double())
        found = ops.masked_softmax(scores, mask, 0.3, causal)
        grad = ops.masked_softmax_backward(upstream, found, 0.3, causal)
        # A gradient is made of a row's products: their sizes, not its own, bound its rounding.
        steepest = 0.3 * upstream.abs().max().item() if upstream.numel() else 0.0
        for ours, other, size in (
            (found, truth.detach(), 1.0),
            (grad, slope.nan_to_num(0.0), 2 * steepest),
        ):
            assert ours.dtype == dtype and ours.is_contiguous(), name
            assert ((ours.double() - other).abs() <= tolerance * size).all(), name


@implementations
@pytest.mark.parametrize(("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_in_16_bits_a_probability_is_rounded_once(ops, dtype, digits):
    """What comes of --attention-softmax-in-fp32: within half a unit in the last place of each one,
    over a long row.
    """
    scores, _ = problem((1, 2, 3, 5000), dtype)
    truth = formula(scores.double(), None, 0.5, False)
    found = ops.masked_softmax(scores, None, 0.5, False).double()
    assert ((found - truth).abs() <= truth * (2**-digits + 1e-5) + 2**-25).all()


@implementations
def test_hidden_and_impossible_scores(ops):
    """-inf, huge values of either sign, and rows of which nothing is left."""
    scores = torch.full((1, 1, 5, 20), -torch.inf)
    scores[0, 0, 1, 3] = -3e38
    scores[0, 0, 2, :] = 3e38
    scores[0, 0, 3, 4:6] = torch.tensor([88.0, -1e30])
    scores[0, 0, 4, :] = -3e38
    found = ops.masked_softmax(scores, None, 1.0, False)[0, 0]
    expected = torch.zeros(5, 20)
    expected[1, 3] = expected[3, 4] = 1
    expected[2] = expected[4] = 0.05
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@implementations
def test_nan_spoils_its_row_and_no_other(ops):
    scores = torch.zeros(1, 1, 3, 18)
    scores[0, 0, 1, 17] = torch.nan
    found = ops.masked_softmax(scores, None, 1.0, False)[0, 0]
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
    hidden = torch.ones(1, 1, 1, 18, dtype=torch.bool)
    hidden[..., 17] = False
    assert ops.masked_softmax(scores, hidden, 1.0, False).isfinite().all()


def test_a_row_does_not_depend_on_what_stands_around_it():
    """Bitwise: alone, among others, and with later keys that it does not see."""
    scores, _ = problem((1, 2, 40, 40), torch.float32)
    whole = masked_softmax(scores, None, 0.5, causal=True)
    for query in (0, 1, 15, 16, 39):
        alone = masked_softmax(
            scores[:, 1:, query : query + 1, : query + 1].contiguous(), None, 0.5
        )
        assert torch.equal(alone[0, 0, 0], whole[0, 1, query, : query + 1])


def test_strided_scores_and_gradients():
    (scores, upstream), mask = problem((2, 3, 6, 8), torch.float32), masks(2, 3, 6, 8)["keys"]
    results = []
    for layout in (lambda x: x, lambda x: x.transpose(1, 3).contiguous().transpose(1, 3)):
        x = layout(scores).detach().requires_grad_()
        out = masked_softmax(x, mask, 0.7, causal=True)
        results.append((out.detach(), *torch.autograd.grad(out, x, layout(upstream))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_its_gradient_is_that_of_its_formula():
    scores = torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = masks(1, 2, 3, 5)["heads"]
    assert torch.autograd.gradcheck(lambda x: masked_softmax(x, mask, 0.7, causal=True), (scores,))


@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (3, 1, 4, 5), (2, 3, 5, 5)])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(RuntimeError):
        masked_softmax(torch.zeros(2, 3, 4, 5), torch.ones(shape, dtype=torch.bool))


@implementations
def test_opcheck(ops):
    scores, upstream = problem((2, 3, 4, 5), torch.float32)
    mask = masks(2, 3, 4, 5)["keys"]
    for causal in (False, True):
        torch.library.opcheck(
            ops.masked_softmax, (scores.clone().requires_grad_(), mask, 0.5, causal)
        )
        torch.library.opcheck(ops.masked_softmax, (scores.transpose(0, 1), None, 0.5, causal))
        torch.library.opcheck(
            ops.masked_softmax_backward, (upstream, scores.softmax(-1), 0.5, causal)
        )

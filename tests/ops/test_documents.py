"""Documents found in masks, and attention on each by itself beside attention on all of them with
the mask.
"""

import pytest
import torch

from megatron_merak.ops import attention, documents


def packed(lengths, window=None):
    """[s, s] bool: causal inside each document, as far as ``window``."""
    number = torch.cat([torch.full((n,), place) for place, n in enumerate(lengths)])
    place = torch.arange(len(number))
    mask = (number[:, None] == number) & (place[:, None] >= place)
    return mask if window is None else mask & (place[:, None] - place < window)


MASKS = {
    "causal": packed([3, 1, 4]),
    "window": packed([3, 1, 4], 2),
    "both ways": packed([3, 1, 4]) | packed([3, 1, 4]).T,
    "one": packed([8]),
    "later tokens see one before": packed([3, 1, 4])
    | (torch.arange(8)[:, None] == 5) & (torch.arange(8) == 1),
    "an earlier token sees a later one": packed([3, 1, 4])
    | (torch.arange(8)[:, None] == 2) & (torch.arange(8) == 3),
    "each itself": packed([1] * 8),
}
FOUND = {
    "causal": [1, 0, 3, 4, 8],
    "window": [0, 0, 3, 4, 8],
    "both ways": [0, 0, 3, 4, 8],
    "one": [1, 0, 8],
    "later tokens see one before": [0, 0, 8],
    "an earlier token sees a later one": [0, 0, 4, 8],
    "each itself": [1, 0, 1, 2, 3, 4, 5, 6, 7, 8],
}


@pytest.mark.parametrize("name", MASKS)
def test_documents_are_found(name):
    assert documents(MASKS[name][None, None]).tolist() == [FOUND[name]]


def test_a_token_that_sees_nothing_leaves_the_row_whole():
    mask = MASKS["causal"].clone()
    mask[3] = False
    assert documents(mask[None, None]).tolist() == [[0, 0, 8]]


def test_rows_have_documents_of_their_own():
    mask = torch.stack([MASKS["causal"], MASKS["one"], MASKS["window"]])[:, None]
    assert documents(mask).tolist() == [[1, 0, 3, 4, 8], [1, 0, 8, 8, 8], [0, 0, 3, 4, 8]]


@pytest.mark.parametrize(
    "names", [(name,) for name in MASKS] + [("causal", "one", "window")], ids=str
)
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_inside_documents_is_attention_with_the_mask(names, rows):
    torch.manual_seed(0)
    if len(names) not in (1, rows):
        pytest.skip("as many masks as rows")
    mask = torch.stack([MASKS[name] for name in names])[:, None]
    shapes = (rows, 4, 8, 6), (rows, 2, 8, 6), (rows, 2, 8, 6)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    grad = torch.randn(shapes[0], dtype=torch.float64)
    for scale in (None, 0.3):
        whole, apart = (
            attention(*operands, mask, 0.0, scale, found) for found in (None, documents(mask))
        )
        torch.testing.assert_close(apart, whole, rtol=1e-12, atol=1e-12)
        for one, other in zip(
            *(torch.autograd.grad(x, operands, grad) for x in (apart, whole)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_long_documents_take_other_kernels():
    torch.manual_seed(0)
    mask = packed([300, 530, 40])[None, None]
    operands = [torch.randn(1, n, 870, 8, requires_grad=True) for n in (2, 1, 1)]
    whole, apart = (attention(*operands, mask, apart=found) for found in (None, documents(mask)))
    torch.testing.assert_close(apart, whole, rtol=1e-5, atol=1e-6)


def test_dropout_draws_as_it_did():
    mask, operands = MASKS["causal"][None, None], [torch.ones(1, 1, 8, 4)] * 3
    made = []
    for found in (None, documents(mask)):
        torch.manual_seed(3)
        made.append(attention(*operands, mask, 0.5, None, found))
    assert torch.equal(*made)

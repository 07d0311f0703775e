"""Heads out of one product: the bits of slices, turned apart from it, and nothing kept but the
product.
"""

import pytest
import torch

from megatron_merak.ops import rotary, rotary_angles, split_heads

HEADS, GROUPS, DIM = 4, 2, 8


def sliced(qkv, angles):
    parts = qkv.unflatten(-1, (-1, DIM))
    query, key, value = parts.split((HEADS, GROUPS, GROUPS), 2)
    return (
        (query, key, value)
        if angles is None
        else (rotary(query, *angles), rotary(key, *angles), value)
    )


def product(dtype):
    """As the layer makes it: not a leaf, and read by nobody else."""
    x = torch.randn(2, 5, (HEADS + 2 * GROUPS) * DIM, dtype=dtype, requires_grad=True)
    return x, x * 1


@pytest.mark.parametrize("rotated", [None, 8, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_their_gradients(dtype, rotated):
    x, qkv = product(dtype)
    angles = None if rotated is None else rotary_angles(5, rotated, 100.0)
    expected, found = sliced(x, angles), split_heads(qkv, HEADS, GROUPS, angles)
    # Gradients as attention gives them: heads first, and some of a broadcast sum.
    upstream = [
        torch.randn_like(part.transpose(1, 2).contiguous()).transpose(1, 2) for part in expected
    ]
    upstream[1] = upstream[1][:, :, :, :1].expand_as(upstream[1])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert {part.untyped_storage().data_ptr() for part in found} == {
        qkv.untyped_storage().data_ptr()
    }
    wanted = torch.autograd.grad(expected, x, upstream)[0]
    grad = torch.autograd.grad(found, x, upstream)[0]
    assert (
        torch.equal(grad, wanted)
        and grad.is_contiguous()
        and grad.count_nonzero() > 0.9 * grad.numel()
    )


def test_a_head_without_a_gradient_has_zeros():
    x, qkv = product(torch.float32)
    split_heads(qkv, HEADS, GROUPS, rotary_angles(5, DIM, 100.0))[2].sum().backward()
    assert x.grad.unflatten(-1, (-1, DIM)).sum((0, 1, 3)).tolist() == [0.0] * 6 + [80.0] * 2


def test_a_product_that_a_backward_still_reads_is_not_turned_unseen():
    x, qkv = product(torch.float32)
    squares = qkv.square()
    split_heads(qkv, HEADS, GROUPS, rotary_angles(5, DIM, 100.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_gradcheck():
    angles = [table.double() for table in rotary_angles(3, 4, 100.0)]
    x = torch.randn(2, 3, 4 * DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: split_heads(x * 1, 2, 1, angles), (x,))

"""Matrices of weights in 4 bits: the values of the published tables, and none is kept for a backward."""

import pytest
import torch

from megatron_merak.ops import (
    FourBit,
    adapted_linear,
    joined_linear,
    matrices,
    places,
    stored_bytes,
)
from tests.four_bit import needs_bitsandbytes

pytestmark = needs_bitsandbytes

# Dettmers et al., QLoRA, 2023, appendix E
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# a sign, two bits of exponent and one of mantissa, over the largest
_FP4 = [value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)]
FP4 = (*_FP4, *[-value for value in _FP4])


def stored(kind, rows, columns, nested=False, seed=0):
    """A random weight as ranks store it, its packed values, and its scales as bitsandbytes has them."""
    from bitsandbytes.functional import dequantize_blockwise, quantize_4bit

    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
    how = FourBit(kind, 64, rows, columns, "float32", nested)
    memory = torch.zeros(stored_bytes(how), dtype=torch.uint8)
    parts = {"": packed, "absmax": state.absmax}
    scales = state.absmax
    if nested:
        outer = state.state2
        parts |= {"nested_absmax": outer.absmax, "nested_quant_map": outer.code}
        parts["nested_offset"] = state.offset
        scales = dequantize_blockwise(state.absmax, outer) + state.offset
    for name, place in places(how).items():
        place.of(memory).copy_(parts[name].view(place.shape))
    return memory, how, packed.view(-1), scales


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize(("kind", "table"), [("nf4", NF4), ("fp4", FP4)], ids=["nf4", "fp4"])
def test_a_value_is_the_table_times_the_scale_of_its_block(kind, table, nested):
    memory, how, packed, scales = stored(kind, 48, 192, nested)
    (found,) = matrices([memory], [how], torch.float32)
    codes = torch.stack([packed >> 4, packed & 15], 1).reshape(-1).long()
    values = torch.tensor(table)[codes].view(-1, 64) * scales.view(-1, 1)
    assert torch.equal(found, values.view(48, 192))


def test_matrices_of_one_input_are_side_by_side():
    one, how_one, *_ = stored("nf4", 48, 128)
    other, how_other, *_ = stored("fp4", 32, 128, seed=1)
    plain = torch.randn(8, 128)
    found = matrices([one, plain, other], [how_one, None, how_other], torch.float32)
    assert found[1] is plain
    assert found[0].data_ptr() + found[0].nbytes == found[2].data_ptr()
    for memory, how, values in ((one, how_one, found[0]), (other, how_other, found[2])):
        assert torch.equal(matrices([memory], [how], torch.float32)[0], values)


def test_no_backward_keeps_a_matrix():
    one, how_one, *_ = stored("nf4", 48, 128)
    other, how_other, *_ = stored("nf4", 32, 128, seed=1)
    x = torch.randn(4, 128, requires_grad=True)
    down = torch.randn(2, 128, requires_grad=True)
    up = torch.randn(48, 2, requires_grad=True)
    formats = [how_one, how_other]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        sums = adapted_linear(
            x, [one, other, down, up], [None, None], [], [0], [0.5], formats=formats
        )
        product = joined_linear(x, [one, other], formats=formats)
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept]
    assert max(sizes) <= max(one.nbytes, x.nbytes)
    assert sum(tensor is one or tensor.data_ptr() == one.data_ptr() for tensor in kept) == 2
    (sums.sum() + product.sum()).backward()
    whole = torch.cat(matrices([one, other], formats, torch.float32))
    wanted = 2 * whole.sum(0) + 0.5 * (up.detach().sum(0) @ down.detach())
    torch.testing.assert_close(x.grad, wanted.expand(4, -1), rtol=1e-5, atol=1e-5)

"""Which gathered values are not kept, of graphs drawn by hand."""

from dataclasses import replace

import pytest
import torch

from megatron_merak import ops
from megatron_merak.graph.ir.marks import all_gather, copy_in
from megatron_merak.graph.lowering.flow import Flow
from megatron_merak.graph.lowering.regathered import is_regathered
from tests.graph.sketch import Sketch

aten = torch.ops.aten


def plain(x, weight):
    return aten.linear.default, x, weight


def side_by_side(x, weight):
    return ops.joined_linear, x, [weight]


def of_one_input(x, weight):
    return ops.linears, x, [weight], [None]


@pytest.mark.parametrize("frozen", [plain, side_by_side, of_one_input])
def test_frozen_layers_read_a_gathered_value_that_others_gather_again(frozen):
    """They keep none of it."""
    s = Sketch()
    own = s.call(aten.mul.Tensor, s.input("x"), s.weight("before"), unit=0)
    gathered = s.call(all_gather, own, unit=1)
    copy = s.call(copy_in, gathered, unit=1, sharded=True)
    call = frozen(copy, s.weight("frozen", 4, 4))
    readers = [
        s.call(aten.linear.default, copy, s.weight("trained", 4, 4), unit=1, sharded=True),
        s.call(*call, unit=1, sharded=True),
    ]
    program = s.done(*readers, names=("loss", "other"))
    program = replace(program, trainable=program.trainable - {"frozen"})
    assert is_regathered(Flow(program), copy, [copy, *readers])
    assert not is_regathered(Flow(replace(program, trainable=frozenset())), copy, readers)

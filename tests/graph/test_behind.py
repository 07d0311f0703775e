"""What is computed behind an exchange of rows, of graphs drawn by hand."""

import pytest
import torch

from megatron_merak.graph.behind import put_behind_exchanges
from megatron_merak.graph.ir.marks import copy_in, exchange_rows, reduce_sum
from megatron_merak.graph.lowering.split import split
from tests.graph.sketch import Sketch

aten = torch.ops.aten


class Mixture(Sketch):
    """A layer whose rows go to an expert and back, and are added to what ``beside`` makes of the input
    and, if it ``waits``, of the rows that are back.
    """

    def __init__(self, beside, waits=False):
        super().__init__()
        counts = self.input("counts", torch.int64)
        x = self.call(aten.mul.Tensor, self.input("x"), self.weight("before"), unit=0)
        self.norm = self.one(aten.mul.Tensor, x, self.weight("norm"), name="normed")
        rows = self.one(aten.flip.default, self.norm, [0], name="rows")
        got = self.one(exchange_rows, rows, counts, name="got")
        sent = self.one(aten.linear.default, got, self.weight("expert", 4, 4), name="sent")
        self.back = self.one(exchange_rows, sent, counts, name="back")
        shared = beside(self, self.back if waits else self.norm)
        loss = self.one(aten.add.Tensor, self.back, shared)
        self.program = self.done(loss)
        put_behind_exchanges(self.program)
        self.behind = {
            node.name: node.meta["behind"].name
            for node in self.graph.nodes
            if "behind" in node.meta
        }

    def one(self, *args, **options):
        return self.call(*args, unit=1, **options)

    @property
    def parts(self):
        return split(self.program, range(1, 2)).parts

    def segments(self):
        """(number, parameters) of each segment."""
        return [(part.index, part.parameters) for part in self.parts]


def shared(s, x):
    hidden = s.one(aten.linear.default, x, s.weight("shared", 4, 4), name="hidden")
    return s.one(aten.tanh.default, hidden, name="shared_result")


def test_a_product_beside_an_exchange_is_a_segment_between_its_launch_and_the_wait():
    layer = Mixture(shared)
    assert layer.behind == {"hidden": "got", "shared_result": "got"}
    # numbers, from which random ones follow, are those that they would be without it
    numbers = [(0, ("norm",)), (0, ("shared",)), (1, ("expert",)), (2, ())]
    assert layer.segments() == numbers
    launches, beside, waits, _ = layer.parts
    assert "got" in [out.value for out in launches.outs]
    assert [read.value for read in beside.ins] == ["alias_default"]
    assert [read.value for read in waits.ins] == ["got"]


def test_what_has_one_reader_is_read_as_it_is():
    """Of several the first ones get an alias, whose gradient is added up in the order that it had."""

    def alone(s, x):
        own = s.one(aten.tanh.default, s.one(aten.exp.default, x, name="own"), name="also")
        return shared(s, own)

    layer = Mixture(alone)
    assert layer.behind == dict.fromkeys(["own", "also", "hidden", "shared_result"], "got")
    aliases = [node for node in layer.graph.nodes if node.target is aten.alias.default]
    assert [(node.args[0].name, node.next.name) for node in aliases] == [("normed", "own")]


def dropped(s, x):
    return s.one(aten.dropout.default, shared(s, x), 0.5, True)


def in_place(s, x):
    return s.one(aten.add_.Tensor, shared(s, x), 1.0)


def without_product(s, x):
    return s.one(aten.mul.Tensor, x, s.weight("shared"))


def of_parameters(s, x):
    product = s.one(aten.mm.default, s.weight("a", 4, 4), s.weight("b", 4, 4))
    return s.one(aten.mul.Tensor, x, s.one(aten.sum.dim_IntList, product, [0]))


@pytest.mark.parametrize("beside", [dropped, in_place, without_product, of_parameters])
def test_other_work_stays_where_it_is(beside):
    layer = Mixture(beside)
    assert layer.behind == {} and len(layer.segments()) == 3


def test_what_needs_the_rows_waits_for_them():
    layer = Mixture(shared, waits=True)
    assert layer.behind == {} and layer.segments() == [
        (0, ("norm",)),
        (1, ("expert",)),
        (2, ("shared",)),
    ]


def test_ranks_of_a_layer_wait_for_the_sum_of_a_shared_expert_where_it_is_read():
    """Not where they wait for rows: the experts compute while it is added up."""

    def sharded(s, x):
        entered = s.one(copy_in, x, sharded=True, name="entered")
        weight = s.weight("shared", 4, 4)
        part = s.one(aten.linear.default, entered, weight, sharded=True, name="part")
        total = s.one(reduce_sum, part, name="total")
        return s.one(aten.tanh.default, total, name="late")

    layer = Mixture(sharded)
    assert layer.behind == {"entered": "got", "part": "got"}
    assert layer.segments() == [(0, ("norm",)), (1, ("shared",)), (2, ("expert",)), (3, ())]
    *_, waits, last = layer.parts
    assert [read.value for read in waits.ins] == ["got"]
    # in a backward rows are sent before the gradient of the sum, which is waited for later
    assert [read.value for read in last.ins] == ["back", "total"]

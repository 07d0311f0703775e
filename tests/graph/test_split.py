"""Captured models run by the engine as segments, against the eager model; and the splitting of
small graphs.
"""

import operator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_merak.errors import TraceError
from megatron_merak.graph.ir.marks import copy_in, reduce_sum, stack
from megatron_merak.graph.lowering.split import split
from megatron_merak.segment import Collective, In, Out
from tests.graph.lockstep import NO_GRADIENT, part
from tests.graph.sketch import Sketch
from tests.graph.stages import Family, Stages, unequal, worst
from tests.graph.tiny import gradients
from tests.ranks import run_ranks

aten = torch.ops.aten

# family: the tied table, whose two gradients are added in another order than in the eager model
BITWISE = {
    "llama": (),
    "qwen3": (),
    "phi3": (),
    "mixtral": (),
    "clip": (),
    "gpt2": ("transformer.wte.weight",),
    "gemma2": ("model.embed_tokens.weight",),
    "bert": ("bert.embeddings.word_embeddings.weight",),
}
WAYS = [(1, False), (1, True), (2, True), (3, False)]  # ranges, recomputed


@pytest.mark.parametrize("name", BITWISE)
def test_every_bit_of_the_eager_model(name, monkeypatch):
    """Where weights of rows stay behind the product of their experts, as the model has them."""
    monkeypatch.setattr("megatron_merak.graph.lowering.rewrite.prepare_rows", lambda graph: None)
    family = Family(name)
    loss, grads = gradients(family.model, family.batch)
    for count, recompute in WAYS:
        found_loss, found = Stages(family, count, recompute).step(family.batch)
        assert torch.equal(found_loss, loss)
        differ = unequal(found, grads)
        assert worst(differ, BITWISE[name]) == 0 and worst(differ) < 1e-6, differ


@pytest.mark.parametrize("name", ["t5", "bart", "whisper", "bloom"])
def test_values_with_many_readers_have_their_gradients_in_another_order_only(name):
    family = Family(name, dtype=torch.float64)
    loss, grads = gradients(family.model, family.batch)
    for count, recompute in WAYS:
        found_loss, found = Stages(family, count, recompute).step(family.batch)
        assert abs(found_loss - loss) < 1e-12
        differ = unequal(found, grads)
        assert worst(differ) < 1e-10, differ


def test_random_numbers_do_not_depend_on_ranges_or_recomputation():
    family = Family("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    loss, grads = Stages(family).step(family.batch)
    for count, recompute in WAYS:
        again_loss, again = Stages(family, count, recompute).step(family.batch)
        assert torch.equal(loss, again_loss) and all(
            torch.equal(again[name], grads[name]) for name in grads
        )
    other = Family("gpt2")
    assert not torch.equal(loss, Stages(other).step(other.batch)[0])
    for seen, known in ((family, True), (other, False)):
        parts = split(seen.rewritten, range(seen.units)).parts
        assert all(p.random == known for p in parts[:-1]) and not parts[-1].random


def test_evaluation_draws_nothing_and_keeps_nothing():
    family = Family("gpt2", training=False, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    stages = Stages(family, 2)
    assert not any(part.random for parts in stages.parts for part in parts.parts)
    with torch.no_grad():
        loss = family.model(**family.batch)["loss"]
    states, values = stages.forward(family.batch, training=False)
    assert torch.equal(values["loss"], loss)
    assert all(state.tape == {} and state.leftovers() == [] for state in states)


FAMILIES = ("llama", "qwen3", "gemma2", "mixtral", "t5")


def two_ranks(rank, world_size):
    group = dist.group.WORLD
    found = {name: _against_eager(Family(name, rank, world_size), group) for name in FAMILIES}
    return found | {"gpt2": _with_dropout(rank, world_size, group)}


def _against_eager(family, group):
    """The losses of all ways to run a family, its gradients having been compared with those of the
    whole model.
    """
    loss, grads = gradients(family.model, family.batch)
    wanted = {
        name: part(g, family.sharding.tensors[name], family.rank, family.tp)
        for name, g in grads.items()
    }
    losses = []
    for count, recompute in ((1, False), (2, True)):
        found_loss, found = Stages(family, count, recompute, group).step(family.batch)
        assert abs(found_loss - loss) < 1e-5
        nothing = [name for name, grad in grads.items() if grad.abs().max() < NO_GRADIENT]
        differ = unequal(found, wanted)
        assert worst(differ, nothing) < 1e-4, (family.captured.how, differ)
        losses.append(float(found_loss))
    return losses


def _with_dropout(rank, world_size, group):
    family = Family("gpt2", rank, world_size, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    loss, grads = Stages(family, 1, False, group).step(family.batch)
    again_loss, again = Stages(family, 2, True, group).step(family.batch)
    assert torch.equal(again_loss, loss) and all(
        torch.equal(again[name], grads[name]) for name in grads
    )
    whole = [name for name, tensor in family.sharding.tensors.items() if tensor.dim is None]
    return [float(loss), *(float(grads[name].sum()) for name in whole)]


def test_two_ranks_of_six_families():
    first, second = run_ranks(two_ranks, 2, timeout=110)
    assert first == second, "what is replicated differs between ranks"


# ---- small graphs --------------------------------------------------------------------------------
def shape_of(part):
    return part.unit, part.sharded, part.ins, part.outs


def test_levels_alternate_and_marks_become_edges():
    s = Sketch()
    x, w, v = s.input("x"), s.weight("w"), s.weight("v")
    a = s.call(aten.mul.Tensor, x, w, unit=0, name="a")
    entered = s.call(copy_in, a, unit=0, sharded=True)
    b = s.call(aten.mul.Tensor, entered, v, unit=0, sharded=True, name="b")
    every = s.call(stack, b, unit=0, name="every")
    c = s.call(aten.sub.Tensor, every, b, unit=0, sharded=True, name="c")
    total = s.call(reduce_sum, c, unit=0, name="total")
    loss = s.call(aten.add.Tensor, total, a, unit=0, name="d")
    parts = split(s.done(loss), range(1))
    assert [shape_of(p) for p in parts.parts] == [
        (0, False, (), (Out("a"),)),
        (0, True, (In("a", Collective.ALL_REDUCE),), (Out("every", Collective.STACK), Out("b"))),
        (0, True, (In("every"), In("b")), (Out("total", Collective.ALL_REDUCE),)),
        (0, False, (In("total"), In("a")), (Out("loss"),)),
    ]
    assert parts.results == ("loss",) and parts.sources == parts.targets == ()
    assert [p.parameters for p in parts.parts] == [("w",), ("v",), (), ()] and parts.parameters == (
        "w",
        "v",
    )


def test_only_a_matrix_product_nobody_keeps_is_reduced_in_place():
    s = Sketch()
    x, w, v = s.input("x"), s.weight("w", 4, 4), s.weight("v", 4, 4)
    a = s.call(aten.linear.default, x, w, unit=0, sharded=True)
    b = s.call(
        aten.tanh.default,
        s.call(aten.linear.default, x, v, unit=0, sharded=True),
        unit=0,
        sharded=True,
    )
    sums = [s.call(reduce_sum, each, unit=0) for each in (a, b)]
    parts = split(s.done(s.call(aten.add.Tensor, *sums, unit=0)), range(1)).parts
    assert [out.inplace for out in parts[0].outs] == [True, False]


def test_a_value_copied_into_several_segments_is_reduced_once():
    """The first of them hands its copy on, so that the partial gradients are added before they are
    reduced.
    """
    s = Sketch()
    x, w = s.input("x"), s.weight("w")
    a = s.call(aten.mul.Tensor, x, w, unit=0, name="a")
    entered = s.call(copy_in, a, unit=0, sharded=True, name="entered")
    b = s.call(
        reduce_sum, s.call(aten.tanh.default, entered, unit=0, sharded=True), unit=0, name="b"
    )
    again = s.call(copy_in, b, unit=1, sharded=True, name="again")
    c = s.call(aten.add.Tensor, entered, again, unit=1, sharded=True)
    loss = s.call(reduce_sum, c, unit=1, name="d")
    parts = split(s.done(loss), range(2))
    assert [p.ins for p in parts.parts] == [
        (),
        (In("a", Collective.ALL_REDUCE),),
        (In("entered"), In("b", Collective.ALL_REDUCE)),
    ]
    assert parts.parts[1].outs == (Out("entered"), Out("b", Collective.ALL_REDUCE))


def test_crossing_values_include_those_that_pass_through_in_the_order_of_the_graph():
    s = Sketch()
    x, w = s.input("x"), s.weight("w")
    first = s.call(aten.mul.Tensor, x, w, unit=0, name="first")
    picks = s.call(aten.argsort.default, first, unit=0, name="picks")
    second = s.call(aten.tanh.default, first, unit=0, name="second")
    third = s.call(aten.exp.default, second, unit=1, name="third")
    fourth = s.call(aten.gather.default, first, 1, picks, unit=2)
    loss = s.call(aten.add.Tensor, fourth, third, unit=2)
    program = s.done(loss, picks, names=("loss", "order"))
    middle, last = split(program, range(1, 2)), split(program, range(2, 3))
    assert [(v.name, v.grad) for v in middle.sources] == [
        ("first", True),
        ("picks", False),
        ("second", True),
    ]
    assert [(v.name, v.grad) for v in middle.targets] == [
        ("first", True),
        ("picks", False),
        ("third", True),
    ]
    assert (
        middle.targets == last.sources
        and middle.results == ()
        and last.results == ("loss", "picks")
    )
    assert [i.value for i in middle.parts[0].ins] == ["second"] and middle.sources[
        1
    ].dtype == torch.int64
    assert [(i.value, i.grad) for i in last.parts[0].ins] == [
        ("first", True),
        ("picks", False),
        ("third", True),
    ]


def test_gradients_stop_where_the_model_stops_them():
    s = Sketch()
    x, w, frozen = s.input("x"), s.weight("w"), s.weight("frozen")
    s.parameters.remove("frozen")
    a = s.call(aten.mul.Tensor, x, w, unit=0, name="a")
    b = s.call(aten.detach.default, a, unit=0, name="b")
    c = s.call(aten.mul.Tensor, x, frozen, unit=0, name="c")
    d = s.call(aten.gt.Scalar, a, 0.0, unit=0, name="d")
    loss = s.call(aten.where.self, d, s.call(aten.add.Tensor, a, b, unit=1), c, unit=1)
    target = {value.name: value.grad for value in split(s.done(loss), range(1)).targets}
    assert target == {"a": True, "b": False, "c": False, "d": False}


def test_what_depends_on_parameters_alone_is_computed_where_it_is_used():
    s = Sketch()
    x, w, v, u = s.input("x"), s.weight("w"), s.weight("v"), s.weight("u")
    a = s.call(aten.mul.Tensor, x, u, unit=0)
    shifted = s.call(aten.add.Tensor, w, 1.0, unit=0, name="shifted")
    entered = s.call(copy_in, a, unit=0, sharded=True)
    b = s.call(reduce_sum, s.call(aten.mul.Tensor, entered, v, unit=0, sharded=True), unit=0)
    loss = s.call(aten.mul.Tensor, b, shifted, unit=0)
    parts = split(s.done(loss), range(1)).parts
    assert [p.parameters for p in parts] == [("u",), ("v",), ("w",)] and len(parts[0].outs) == 1


def test_memory_written_in_another_segment_is_refused():
    s = Sketch()
    x, w = s.input("x"), s.weight("w")
    a = s.call(aten.mul.Tensor, x, w, unit=0, name="a")
    b = s.call(aten.exp.default, a, unit=0)
    c = s.call(aten.add_.Tensor, b, 1.0, unit=1)
    with pytest.raises(TraceError, match="changed in place in another segment"):
        split(s.done(s.call(aten.mul.Tensor, b, c, unit=1)), range(2))


def test_memory_written_inside_one_segment_is_fine():
    s = Sketch()
    x, w = s.input("x"), s.weight("w")
    a = s.call(aten.mul.Tensor, x, w, unit=0)
    b = s.call(aten.exp.default, a, unit=0)
    row = s.call(aten.select.int, b, 0, 0, unit=0)
    s.call(aten.zero_.default, row, unit=0)
    loss = s.call(aten.sum.default, b, unit=1)
    parts = split(s.done(loss), range(2))
    held = {"w": torch.nn.Parameter(torch.ones(4))}
    (made,) = parts.segments(held)[0].fn(parts.prelude({"x": torch.ones(2, 4)}))
    assert made[0].tolist() == [0.0] * 4 and made[1, 0] > 2


def test_the_prelude_computes_what_is_read_and_what_is_fixed_once():
    s = Sketch()
    x, labels, spare = s.input("x"), s.input("labels", torch.int64), s.input("spare")
    table, w = s.constant("table", torch.arange(4.0)), s.weight("w")
    angles = s.call(aten.cos.default, table, name="angles")
    mask = s.call(aten.ge.Scalar, labels, 0, name="mask")
    s.call(aten.exp.default, spare, name="unread")
    first = s.call(aten.mul.Tensor, s.call(aten.mul.Tensor, x, w, unit=0), angles, unit=0)
    loss = s.call(aten.sum.default, s.call(aten.mul.Tensor, first, mask, unit=1), unit=1)
    program = s.done(loss)
    early, late = split(program, range(1)), split(program, range(1, 2))
    assert early.prelude.reads == ("x",) and late.prelude.reads == ("labels",)
    made = early.prelude({"x": torch.ones(2, 4)})
    assert set(made) == {"x", "angles"} and torch.equal(made["angles"], torch.arange(4.0).cos())
    assert made["angles"] is early.prelude({"x": torch.zeros(2, 4)})["angles"]
    found = late.prelude({"labels": torch.tensor([[-100, 3, 4, 5]])})
    assert found["mask"].tolist() == [[False, True, True, True]]


class Recorded:
    def __init__(self):
        self.calls = []

    def matmul(self, weight, grad_output, input):
        self.calls.append(("matmul", weight, grad_output.t() @ input))

    def rows(self, weight, index, grad_output):
        self.calls.append(
            ("rows", weight, torch.zeros_like(weight).index_add_(0, index, grad_output))
        )

    def getter(self, input):
        return None


@pytest.mark.parametrize(
    ("target", "order", "weight"),
    [
        (aten.linear.default, ("x", "w"), (3, 4)),
        (aten.linear.default, ("x", "w", "b"), (3, 4)),
        (aten.mm.default, ("x", "w"), (4, 3)),
        (aten.matmul.default, ("x", "w"), (4, 3)),
        (aten.addmm.default, ("b", "x", "w"), (4, 3)),
        (aten.embedding.default, ("w", "i"), (5, 4)),
        (aten.embedding.default, ("w", "i", 2), (5, 4)),
    ],
)
def test_weight_gradients_go_to_the_sink(target, order, weight):
    s = Sketch()
    nodes = {"x": s.input("x"), "w": s.weight("w", *weight), "b": s.weight("b", 3)}
    nodes["i"] = s.constant("i", torch.tensor([[1, 2], [2, 4]]))
    made = s.call(target, *(nodes.get(name, name) for name in order), unit=0)
    loss = s.call(aten.sum.default, s.call(aten.square.default, made, unit=0), unit=0)
    parts = split(s.done(loss), range(1))
    held = {n: torch.nn.Parameter(torch.randn(shape)) for n, shape in (("w", weight), ("b", (3,)))}
    sink, batch = Recorded(), {"x": torch.randn(2, 4)}
    for recorded in (None, sink):
        (segment,) = parts.segments(held, recorded)
        names = ["w", "b"] if "b" in order else ["w"]
        (value,) = segment.fn(parts.prelude(batch))
        grads = torch.autograd.grad(value, [held[name] for name in names], allow_unused=True)
        if recorded is None:
            wanted = grads
    assert grads[0] is None and len(sink.calls) == 1 and sink.calls[0][1] is held["w"]
    torch.testing.assert_close(sink.calls[0][2], wanted[0])
    assert len(names) == 1 or torch.equal(grads[1], wanted[1])


def test_code_drops_values_early_and_runs_on_the_device_of_the_rank():
    s = Sketch()
    x, w = s.input("x"), s.weight("w")
    positions = s.graph.call_function(aten.arange.default, (4,), {"device": torch.device("cpu")})
    positions.meta.update(val=torch.arange(4), unit=0)
    pieces = s.call(aten.split.Tensor, s.call(aten.mul.Tensor, x, w, unit=0), 2, 1, unit=0)
    left, right = (s.call(operator.getitem, pieces, i, unit=0) for i in range(2))
    both = s.call(aten.mul.Tensor, left, right, unit=0)
    loss = s.call(
        aten.sum.default,
        s.call(aten.add.Tensor, s.call(aten.sum.default, both, unit=0), positions, unit=0),
    )
    loss.meta["unit"] = 0
    (part,) = split(s.done(loss), range(1), torch.device("meta")).parts
    lines = part.code.__self__.code.splitlines()
    dropped = {
        name: line
        for line in lines
        for name in line.partition(";  ")[2].removesuffix(" = None").split(" = ")
    }
    assert "getitem_1 = " in dropped["split_tensor"] and "mul_tensor_1 = " in dropped["getitem"]
    assert any("arange" in line and "device(type='meta')" in line for line in lines)


def test_the_same_program_on_every_rank():
    """Names and order of what crosses and of what is reduced: collectives and transfers are paired
    by them.
    """
    programs = [split(Family("t5", rank, 2).rewritten, range(3, 9)) for rank in range(2)]
    seen = [
        SimpleNamespace(
            edges=[(p.unit, p.index, p.ins, p.outs, p.parameters, p.common) for p in parts.parts],
            borders=(parts.sources, parts.targets),
        )
        for parts in programs
    ]
    assert seen[0] == seen[1] and seen[0].borders[0]
    names = [out.value for _, _, _, outs, _, _ in seen[0].edges for out in outs]
    assert any(name.startswith("copy_in") for name in names), (
        "cross attention shares the copy of the encoder's output"
    )

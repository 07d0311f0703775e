"""Segments: what fusing keeps, and what a list means when it runs as one autograd graph."""

import pytest
import torch

from megatron_merak.segment import Collective, Common, In, Out, Segment, fuse, run_serial


def seg(index, fn, ins, outs, unit=3, **more):
    return Segment(unit, index, fn, tuple(map(In, ins)), tuple(map(Out, outs)), **more)


def chain(weight):
    """x -> (2 x, x + 1) -> product with the batch's scale and a weight."""
    return [
        seg(0, lambda common, x: (2 * x, x + 1), ["x"], ["a", "b"]),
        seg(
            1,
            lambda common, a, b: (a * b * common["scale"],),
            ["a", "b"],
            ["c"],
            random=True,
            sharded=True,
        ),
        seg(
            2,
            lambda common, c, x: (c * weight + x,),
            ["c", "x"],
            ["y"],
            parameters=(weight,),
            random=True,
        ),
    ]


def test_a_fused_segment_does_the_work_of_its_parts():
    weight, x = torch.nn.Parameter(torch.tensor(5.0)), torch.tensor(3.0, requires_grad=True)
    values = [
        run_serial(segments, Common({"scale": torch.tensor(10.0)}), {"x": x})
        for segments in (chain(weight), [fuse(chain(weight))])
    ]
    assert values[0]["y"].item() == values[1]["y"].item() == 6 * 4 * 10 * 5 + 3
    assert set(values[0]) == {"x", "a", "b", "c", "y"} and set(values[1]) == {"x", "y"}
    for v in values:  # d/dx of 50 (2 x)(x + 1) + x, and of the weight
        assert [g.item() for g in torch.autograd.grad(v["y"], (x, weight))] == [
            50 * (4 * 3 + 2) + 1,
            6 * 4 * 10,
        ]


def test_a_fused_segment_names_what_it_reads_and_holds():
    weight = torch.nn.Parameter(torch.tensor(5.0))
    segments = chain(weight) + [
        seg(3, lambda common, y: (y * weight,), ["y"], ["z"], parameters=(weight,))
    ]
    fused = fuse(segments)
    assert [i.value for i in fused.ins] == ["x"] and [o.value for o in fused.outs] == ["z"]
    assert fused.parameters == (weight,) and (fused.unit, fused.index) == (3, 0)
    assert not fused.sharded and not fused.random


def test_fusing_changes_no_seed():
    """Every random part seeds for itself, as the part that it was."""
    weight, seeded = torch.nn.Parameter(torch.tensor(5.0)), []
    segments = chain(weight)
    fuse(segments).fn(Common({"scale": torch.tensor(1.0)}, seeded.append), torch.tensor(1.0))
    assert seeded == segments[1:]


def test_edges_are_neither_fused_nor_run_serially():
    edge = Segment(0, 0, lambda common, x: (x,), (In("x"),), (Out("y", Collective.ALL_REDUCE),))
    partial = Segment(0, 0, lambda common, x: (x,), (In("x", Collective.ALL_REDUCE),), (Out("y"),))
    for segments in ([edge], [partial]):
        with pytest.raises(AssertionError):
            fuse(segments)
    with pytest.raises(AssertionError, match="collectives='call'"):
        run_serial([edge], Common({}), {"x": torch.zeros(1)})


def test_without_a_seed_function_nothing_is_seeded():
    before = torch.get_rng_state()
    Common({}).seed(None)
    assert torch.equal(before, torch.get_rng_state())

"""What the fuzzer would see: each of these faults, planted in a rule, is found by the modules of
the default run.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_merak import ops
from megatron_merak.graph.capture import guards
from megatron_merak.graph.fusion import pointwise as fuse_pointwise
from megatron_merak.graph.lowering import rewrite, split
from megatron_merak.graph.sharding import local, rules_product, shard
from megatron_merak.graph.sharding.placement import Decision
from megatron_merak.graph.sharding.rules_shape import slice_
from megatron_merak.graph.sharding.rules_value import along, argument, reduction
from tests.fuzz.check import Mismatch, Subject, check, ways
from tests.fuzz.grammar import recipe, source
from tests.fuzz.test_fuzz import MODULES


def rule(name: str, faulty: Callable):
    return mock.patch.dict(shard.RULES, {name: faulty})


def any_dimension(p, node):
    return Decision(p.input_layout(node))


def unscaled(p, node):
    return replace(reduction(p, node), scale=1.0)


def over_heads(p, node):
    last = argument(node, "dim") % len(p.shape(node)) == len(p.shape(node)) - 1
    return along(p, node) if last else any_dimension(p, node)


def first_entries(p, node):
    made = slice_(p, node)
    if made.args is None or len(made.args) != 4:
        return made
    x, dim, start, stop = made.args
    return replace(made, args=(x, dim, 0, stop - start))


def heads_in_turn(x, dim, heads, repeats, rank, tp):
    share = heads // tp
    return x.index_select(dim, torch.arange(rank * share, (rank + 1) * share) % x.shape[dim])


def rows_of_others(index, weight, start, padding=None):
    return F.embedding((index - start).clamp(0, weight.shape[0] - 1), weight)


def bias_everywhere(m, added):
    def write(writer, node):
        partial = writer.call(m.bare, (writer.operand(m.a), writer.operand(m.b)), like=node)
        return writer.sum(
            writer.call(torch.ops.aten.add.Tensor, (partial, writer.get(added)), like=node)
        )

    return write


def swapped(graph, root, match):
    return fuse_pointwise.put(
        graph, root, fuse_pointwise.ops.gated, match["up"], match["gate"], "silu"
    )


def swapped_rows():
    rows = [
        (name, pattern, swapped if name == "gated silu" else build, *others)
        for name, pattern, build, *others in fuse_pointwise.ROWS
    ]
    return mock.patch.object(fuse_pointwise, "ROWS", tuple(rows))


# fault -> (how to plant it, what a module that may show it has in its source)
FAULTS = {
    "softmax along the sharded dimension": (lambda: rule("softmax", any_dimension), "softmax(-1)"),
    "softmax over sharded heads": (lambda: rule("softmax", over_heads), "softmax(1)) @"),
    "cumsum along the sharded dimension": (lambda: rule("cumsum", any_dimension), "cumsum(2)"),
    "maximum of a shard": (lambda: rule("amax", lambda p, node: Decision(None)), "amax("),
    "mean that is not scaled": (lambda: rule("mean", unscaled), "mean(-1"),
    "padding that is not replaced": (
        lambda: mock.patch.object(local, "fill", lambda part, *_: part),
        "67",
    ),
    "gradient that is not summed": (
        lambda: mock.patch.object(rewrite.GraphWriter, "enter", lambda self, whole: whole),
        "",
    ),
    "partial gradient of a replicated weight": (
        lambda: mock.patch.object(rewrite, "_separate_partial", lambda *_, **__: ()),
        "",
    ),
    "weight read in two ways counted twice": (
        lambda: mock.patch.object(local, "grad_on_rank_0", lambda x, _: x),
        "",
    ),
    "slice of another place": (lambda: rule("slice", first_entries), "[..., "),
    "heads of another group": (
        lambda: mock.patch.object(local, "take_heads", heads_in_turn),
        "enable_gqa",
    ),
    "rows of another rank": (lambda: mock.patch.object(ops, "embedding_part", rows_of_others), ""),
    "bias added on every rank": (
        lambda: mock.patch.object(rules_product, "_write_row", bias_everywhere),
        "",
    ),
    "gate and value swapped": (swapped_rows, "F.silu("),
    "random work that is not seeded": (
        lambda: mock.patch.object(split, "is_random", lambda node: False),
        "dropout",
    ),
    "another case of a branch": (
        lambda: mock.patch.object(guards.Guards, "broken", lambda *_: ""),
        "if int(",
    ),
}


@cache
def subject(seed: int) -> Subject:
    made = Subject(recipe(seed), ways(seed)[0].dtype)
    made.wanted()
    return made


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault):
    plant, hint = FAULTS[fault]
    for seed in range(MODULES):
        if hint not in source(recipe(seed)):
            continue
        made = subject(seed)
        for way in ways(seed):
            try:
                with plant():
                    check(made, way)
            except Mismatch:
                return
    raise AssertionError(f"no module shows {fault}")

"""The probe on real ranks: a profile that plans read, sizes that it chooses, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_merak.cluster import CLUSTERS, DEVICES, profiled, read_profile
from megatron_merak.errors import ConfigError
from megatron_merak.planner import plan
from megatron_merak.probe.passes import OF, Reference, passes_of
from megatron_merak.probe.shapes import ModelShape, attention_grid, product_grid
from megatron_merak.probe.table import table
from tests.ranks import run_ranks

SHAPE = "64:32:2:1:48:96:32"


def probed(rank, world_size):
    """Two ranks of a host, and one of another."""
    from megatron_merak.parallel.launch import World
    from megatron_merak.parallel.nodes import Nodes
    from megatron_merak.probe import passes
    from megatron_merak.probe.measure import probe

    torch.set_num_threads(1)
    passes.OF["cpu"] = passes.OF["cpu"][:1]
    world = World(rank, world_size, torch.device("cpu"), ranks_here=2)
    said = []
    found = probe(
        world,
        dist.group.WORLD,
        Nodes((2, 1)),
        [ModelShape.of(SHAPE)],
        ["float32"],
        seconds=0.2,
        say=said.append,
    )
    return found, table(found), said


def test_ranks_measure_one_profile(tmp_path):
    results = run_ranks(probed, 3)
    found, text, said = results[0]
    assert all(result[0] == found for result in results[1:])
    assert any(line.startswith("all-reduce of") for line in said)
    measured = {(row.m, row.n, row.k) for row in found.device.rates.products}
    assert {*ModelShape.of(SHAPE).products} <= measured
    assert {(row.length, row.features) for row in found.device.rates.attention} == {
        (32, 16),
        (64, 64),
    }
    sides = {(time.where, time.ranks) for time in found.links}
    assert sides == {("inside", 2), ("between", 2)}
    assert {time.what for time in found.links} == {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "message",
    }
    assert "link within a host" in text and "link between hosts" in text and "2 ranks at" in text
    path = tmp_path / "profile.json"
    path.write_text(found.to_json())
    assert read_profile(path) == found
    cluster = profiled(CLUSTERS["cpu"], str(path))
    config = Reference(llama=True, hidden=64, length=32, samples=1).config("float32")
    with_it, without = plan(config, 1, cluster), plan(config, 1)
    assert math.isfinite(with_it.predicted_time) and with_it.predicted_time > 0
    assert with_it.predicted_time != without.predicted_time


def test_passes_are_what_the_planner_counts_of_a_step():
    """Steps that a device takes by its own figures give these figures back."""
    device = replace(DEVICES["cpu"], memory_bandwidth=3e9, dispatch=2e-5)
    cluster = replace(CLUSTERS["cpu"], device=device)
    steps = [(each, plan(each.config("float32"), 1, cluster).predicted_time) for each in OF["cpu"]]
    other = replace(device, memory_bandwidth=7e9, dispatch=1e-6)
    found = passes_of(other, "float32", 3e9, steps)
    assert (found.memory_bandwidth, found.dispatch) == pytest.approx((3e9, 2e-5), rel=1e-3)
    # a device whose host runs ahead has none
    ahead = passes_of(replace(other, dispatch=0.0), "float32", 3e9, steps)
    assert ahead.dispatch == 0.0 and 0 < ahead.memory_bandwidth < 3e9
    # no step shorter than its products makes passes that take no time
    short = passes_of(other, "float32", 3e9, [(each, 1e-9) for each, _ in steps])
    assert short.memory_bandwidth <= 2 * 3e9 * 1.001


def test_sizes_are_as_many_as_time_allows_and_mixed():
    few, many = (product_grid(1e11, budget, 7) for budget in (0.1, 2.0))
    assert len(few) < len(many) and {*few} < {*many}
    largest = max(map(math.prod, many))
    assert 3 * 7 * 2 * sum(map(math.prod, many)) / 1e11 <= 2.0
    assert all(math.prod(side) <= largest for side in few)
    assert len({m for m, _, _ in many[:20]}) >= 3  # the beginning has sizes of all kinds
    assert many == product_grid(1e11, 2.0, 7)
    heads = attention_grid(1e10, 1.0, 7, 512)
    assert {head.length for head in heads} >= {64, 128, 256}


def test_shapes_are_read_or_refused():
    shape = ModelShape.of("4096:4096:32:8:14336:128256:2048")
    assert (4096, 6144, 4096) in shape.products and (4096, 14336, 4096) in shape.products
    assert (shape.attention.samples, shape.attention.length) == (2, 2048)
    assert ModelShape.of("512:64:4:4:128:1000").length == 512
    for text in ("", "1:2:3", "1:2:3:4:5:x", "64:30:4:4:128:1000", "0:32:2:1:48:96"):
        with pytest.raises(ConfigError, match="--shape .*it is no shape"):
            ModelShape.of(text)


def test_what_the_command_refuses(tmp_path, capsys):
    from megatron_merak.cli.probe import main

    into = ["--into", str(tmp_path / "profile.json")]
    for words, message in (
        ([], "--into"),
        ([*into, "--nproc-per-node", "0"], "--nproc-per-node 0"),
        ([*into, "--seconds", "600"], "--seconds 600.0"),
        ([*into, "--seconds", "nan"], "--seconds nan"),
        ([*into, "--shape", "1"], "--shape 1"),
        (["--into", str(tmp_path)], "--into"),
    ):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert message in told and len(told.splitlines()) == 1, told

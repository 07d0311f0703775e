"""Initial weights: a function of (seed, name) alone, the same full tensors whatever the layout."""

import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron_merak.config import Config, ParallelConfig, TrainConfig
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import TensorSharding
from megatron_merak.planner import plan
from megatron_merak.stages import init_native as materialize
from megatron_merak.stages.init_native import draw, initialise, initialise_all
from megatron_merak.stages.native_model import NativeModel
from megatron_merak.tensor_parallel.layout import Init, ParameterLayout, Piece
from tests.models.families import FAMILIES
from tests.ranks import run_ranks

EMBEDDING = Piece(
    TensorSharding("model.embed_tokens.weight", (1000, 64), 0, padded=1024), Init("normal", 0.02)
)


def test_values_never_change():
    """A changed value would give every run with this seed other weights."""
    full = draw(EMBEDDING, 1234)
    frozen = torch.tensor(
        [[-0.01386213, -0.00774295, -0.01104093], [0.01566094, -0.05030913, 0.02601373]]
    )
    torch.testing.assert_close(
        torch.stack((full[0, :3], full[999, 61:])), frozen, rtol=1e-6, atol=0
    )


def test_values_depend_on_seed_and_name():
    full = draw(EMBEDDING, 1234)
    assert full.std().item() == pytest.approx(0.02, rel=0.02) and abs(full.mean().item()) < 3e-4
    other = replace(EMBEDDING, sharding=replace(EMBEDDING.sharding, name="lm_head.weight"))
    assert not torch.equal(draw(EMBEDDING, 1235), full) and not torch.equal(draw(other, 1234), full)
    before = torch.get_rng_state()
    draw(EMBEDDING, 1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("kind", "value"), [("ones", 1), ("zeros", 0)])
def test_constants(kind, value):
    assert torch.equal(
        draw(replace(EMBEDDING, init=Init(kind)), 5), torch.full((1000, 64), float(value))
    )


@pytest.mark.parametrize("tp", [2, 4, 16])
def test_ranks_hold_slices_of_one_tensor_and_zeros_for_padding(tp):
    """At 16 ranks the last holds padding alone."""
    parts = []
    for rank in range(tp):
        parameter = torch.zeros(1024 // tp, 64)
        ((_, view),) = ParameterLayout((EMBEDDING,)).views(parameter, rank, tp)
        initialise(view, EMBEDDING, 1234, rank, tp)
        parts.append(parameter)
    whole = torch.cat(parts)
    assert torch.equal(whole[:1000], draw(EMBEDDING, 1234)) and whole[1000:].count_nonzero() == 0


def test_tensors_drawn_side_by_side_are_those_drawn_in_turn():
    """Threads draw while others do, each from a generator of its own; their number is bounded by
    memory too.
    """
    pieces = [
        replace(EMBEDDING, sharding=replace(EMBEDDING.sharding, name=f"layer.{i}"))
        for i in range(12)
    ]
    found = [torch.zeros(512, 64, dtype=torch.bfloat16) for _ in pieces]
    barrier, threads = threading.Barrier(4), set()

    def drawn(piece, seed):
        threads.add(threading.get_ident())
        barrier.wait(timeout=60)  # returns when four threads are at it at once
        return draw(piece, seed)

    with mock.patch.object(materialize, "draw", drawn):
        initialise_all(list(zip(pieces, found, strict=True)), 5, 0, 2, workers=4)
    assert len(threads) == 4
    for piece, view in zip(pieces, found, strict=True):
        assert torch.equal(view, draw(piece, 5)[:512].to(torch.bfloat16))
    with (
        mock.patch.object(materialize, "_MEMORY", 1),
        mock.patch.object(materialize, "ThreadPoolExecutor", None),
    ):
        initialise_all([(pieces[0], found[1])], 5, 0, 2, workers=4)
    assert torch.equal(found[0], found[1])


def test_what_fails_in_a_thread_fails():
    with pytest.raises(RuntimeError, match="size of tensor"):
        initialise_all([(EMBEDDING, torch.zeros(3, 64))] * 2, 5, 0, 2, workers=2)


def config_of(name, tp, pp, bf16=False):
    return Config(
        model=FAMILIES[name],
        parallel=ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp),
        train=TrainConfig(micro_batch_size=1, global_batch_size=4, seed=7, bf16=bf16),
    )


def owned(name, rank, world_size, tp, pp, bf16=False):
    """What this rank owns of the freshly built model, and of padding."""
    config = config_of(name, tp, pp, bf16)
    made = plan(config, world_size)
    model = NativeModel(config, made, build_mesh(made.grid, rank, torch.device("cpu")))
    return [
        (s.name, s.shape, s.dim, s.intervals, s.tensor.clone())
        for s in model.shards(model.buffer.data)
        if s.owner
    ]


def assemble(results):
    """Full tensors from all ranks' parts; every element is owned once."""
    full, owners = {}, {}
    for name, shape, dim, intervals, tensor in (shard for result in results for shard in result):
        target = full.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
        count, at = owners.setdefault(name, torch.zeros(shape)), 0
        for start, stop in intervals or [(0, shape[0])]:
            target.narrow(dim or 0, start, stop - start).copy_(
                tensor.narrow(dim or 0, at, stop - start)
            )
            count.narrow(dim or 0, start, stop - start).add_(1)
            at += stop - start
    assert all((count == 1).all() for count in owners.values()), "a part has no owner, or two"
    return full


LAYOUTS = [(2, 1), (1, 2), (2, 2), (1, 1), (1, 4)]


def layouts(rank, world_size):
    """Every layout of four ranks, data parallelism filling up, in one launch."""
    return {
        (name, *degrees): owned(name, rank, world_size, *degrees)
        for name in FAMILIES
        for degrees in LAYOUTS
    }


def test_full_weights_do_not_depend_on_the_layout():
    results = run_ranks(layouts, 4)
    for name, config in FAMILIES.items():
        expected = assemble([owned(name, 0, 1, 1, 1)])
        norms = [
            tensor
            for key, tensor in expected.items()
            if tensor.dim() == 1 and key.endswith(".weight")
        ]
        assert len(norms) >= 2 * config.num_layers + 1 and all(
            (tensor == 1).all() for tensor in norms
        )
        for degrees in LAYOUTS:
            full = assemble([result[name, *degrees] for result in results])
            assert full.keys() == expected.keys()
            assert all(torch.equal(full[key], expected[key]) for key in full), degrees


def test_bf16_weights_are_the_rounded_ones():
    full = assemble([owned("llama", 0, 1, 1, 1)])
    rounded = assemble([owned("llama", 0, 1, 1, 1, bf16=True)])
    assert all(torch.equal(full[name].bfloat16(), rounded[name]) for name in full)


def test_output_projections_are_scaled_by_depth():
    weights = assemble([owned("gpt2", 0, 1, 1, 1)])
    ratio = (
        weights["transformer.h.0.attn.c_proj.weight"].std()
        / weights["transformer.h.0.attn.c_attn.weight"].std()
    )
    assert ratio.item() == pytest.approx((2 * FAMILIES["gpt2"].num_layers) ** -0.5, rel=0.1)

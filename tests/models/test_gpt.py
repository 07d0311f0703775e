"""The native GPT against HuggingFace's models: loss and every gradient, alone and over
tensor-parallel ranks, its layers calling their own collectives or the engine owning them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_merak.models.gpt import GPT, GPTPrelude, build_unit
from megatron_merak.models.layers import Placement
from megatron_merak.runtime.engine import Interpreter, State
from megatron_merak.runtime.weights import Gradient, WeightGradients
from megatron_merak.segment import Common, fuse
from megatron_merak.stages.init_native import take
from megatron_merak.tensor_parallel import model_parallel_seed
from tests.models.families import FAMILIES, batch, huggingface, load, pieces, reference
from tests.oplog import OpLog
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def group_of(world_size):
    return dist.group.WORLD if world_size > 1 else None


def grads_of(units, rank, tp, of):
    return {
        piece.sharding.name: (piece, view.clone()) for piece, view in pieces(units, rank, tp, of)
    }


def weights_of(name):
    return {key: parameter.detach() for key, parameter in huggingface(name).named_parameters()}


def standalone(name, weights, rank, tp, parts=False, **changes):
    gpt = GPT(replace(FAMILIES[name], **changes), Placement(group_of(tp), sequence_parallel=parts))
    load(gpt.units, weights, rank, tp)
    loss = gpt(batch())
    loss.backward()
    return loss.detach(), grads_of(gpt.units, rank, tp, lambda parameter: parameter.grad)


def through_engine(name, weights, rank, tp, parts=False, recompute=(), selective=False, **changes):
    config = replace(FAMILIES[name], **changes)
    place = Placement(
        group_of(tp), "edge", sequence_parallel=parts, recompute_activations=selective
    )
    units = [build_unit(i, config, place) for i in range(config.num_layers + 2)]
    if not config.untie_embeddings_and_output_weights:
        units[-1].output.weight = units[0].tokens.weight
    load(units, weights, rank, tp)
    parameters = dict.fromkeys(p for unit in units for p in unit.parameters())
    grads = {p: torch.zeros_like(p, requires_grad=False) for p in parameters}
    sink = WeightGradients({p: Gradient(grad) for p, grad in grads.items()})
    for unit in units:
        for module in unit.modules():
            if hasattr(module, "sink"):
                module.sink = sink
    segments = [
        s for unit in units for s in (unit.segments() if tp > 1 else [fuse(unit.segments())])
    ]
    engine = Interpreter(
        segments, [(unit,) for unit in recompute], ("loss",), group_of(tp), weights=sink, device=CPU
    )
    state = State(Common(GPTPrelude(config, CPU)(batch())), training=True)
    engine.forward(state)
    loss = state.values.pop("loss")
    state.add_grad("loss", torch.ones(()))
    engine.backward(state)
    assert state.values == {} and state.leftovers() == []
    partial = {p for s in segments if s.sharded and tp > 1 for p in s.parameters}
    for unit in units:
        for local, parameter in unit.named_parameters():
            if not unit.layouts[local].sharded and parameter in partial:
                dist.all_reduce(grads[parameter])
    return loss, grads_of(units, rank, tp, lambda parameter: grads[parameter])


def both(rank, tp, weights, parts=False):
    results = {}
    for name, config in FAMILIES.items():
        layers, given = (
            tuple(range(1, config.num_layers + 1)),
            (name, weights[name], rank, tp, parts),
        )
        again = through_engine(*given, layers), through_engine(*given, selective=True)
        results[name] = standalone(*given), through_engine(*given), *again
    return results


def in_chunks(rank, tp, weights, parts=False):
    """Both ways of a model whose head computes five rows of logits at a time."""
    given = ("llama", weights["llama"], rank, tp, parts)
    return [run(*given, cross_entropy_chunk_size=5) for run in (standalone, through_engine)]


def count(rank, tp, weights, parts=False):
    """Collectives of a stand-alone model by kind, forward and backward."""
    config = FAMILIES["llama"]
    gpt = GPT(config, Placement(dist.group.WORLD, sequence_parallel=parts))
    load(gpt.units, weights, rank, tp)
    with OpLog() as forward:
        loss = gpt(batch())
    with OpLog() as backward:
        loss.backward()
    return Counter(forward.collectives), Counter(backward.collectives)


def over_ranks(rank, tp, weights, parts):
    others = {
        "collectives": count(rank, tp, weights["llama"], parts),
        "chunks": in_chunks(rank, tp, weights, parts),
    }
    return both(rank, tp, weights, parts) | others


# Tensor-parallel size, and whether its ranks divide the sequence.
LAYOUTS = [(1, False), (2, False), (2, True)]


@pytest.fixture(scope="module")
def measured():
    weights = {name: weights_of(name) for name in FAMILIES}
    ranks = {(2, parts): run_ranks(over_ranks, 2, weights, parts) for parts in (False, True)}
    return {(1, False): [both(0, 1, weights) | {"chunks": in_chunks(0, 1, weights)}]} | ranks


@pytest.fixture(scope="module")
def truth():
    return {name: reference(huggingface(name), batch()) for name in FAMILIES}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_every_gradient_equal_huggingface(measured, truth, name, layout):
    tp, _ = layout
    loss, grads = truth[name]
    for rank, results in enumerate(measured[layout]):
        for our_loss, ours in results[name]:
            torch.testing.assert_close(our_loss, loss, rtol=2e-6, atol=0)
            assert set(ours) == set(grads)
            for tensor, (piece, grad) in ours.items():
                expected = take(grads[tensor], piece, rank, tp)
                scale = grads[tensor].abs().max()
                assert (grad - expected).abs().max() <= 5e-6 * scale, (tensor, rank)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_and_one_autograd_graph_agree(measured, name, layout):
    """Bitwise, but for a tied table, whose two uses are added in another order."""
    tied = not FAMILIES[name].untie_embeddings_and_output_weights
    for results in measured[layout]:
        (loss, grads), *engines = results[name]
        for engine_loss, engine_grads in engines:
            assert torch.equal(loss, engine_loss)
            for tensor, (_, grad) in grads.items():
                if tied and tensor.endswith(("wte.weight", "embed_tokens.weight")):
                    torch.testing.assert_close(engine_grads[tensor][1], grad, rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(engine_grads[tensor][1], grad), tensor


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_in_chunks_computes_the_same(measured, layout):
    for results in measured[layout]:
        loss, grads = results["llama"][0]
        for chunked_loss, chunked_grads in results["chunks"]:
            torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
            for tensor, (_, grad) in grads.items():
                assert (chunked_grads[tensor][1] - grad).abs().max() <= 5e-6 * grad.abs().max(), (
                    tensor
                )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputation_changes_no_bit(measured, name, layout):
    for results in measured[layout]:
        _, (loss, grads), *recomputed = results[name]
        for again, grads_again in recomputed:  # layers, and activations alone
            assert torch.equal(loss, again)
            assert all(torch.equal(grads[tensor][1], grads_again[tensor][1]) for tensor in grads)


def test_every_tensor_of_the_family_has_a_layout():
    for name, config in FAMILIES.items():
        units = [build_unit(i, config, Placement()) for i in range(config.num_layers + 2)]
        named = {
            piece.sharding.name: piece.sharding.shape
            for unit in units
            for layout in unit.layouts.values()
            for piece in layout.pieces
        }
        assert named == {key: tuple(p.shape) for key, p in huggingface(name).named_parameters()}
        for unit in units:
            assert set(unit.layouts) == {local for local, _ in unit.named_parameters()}


def test_number_of_collectives(measured):
    """Forward: embedding, two per layer, statistics of the loss. Backward: two per layer, and the
    head's.
    """
    sums, gather, layers = "allreduce_", "_allgather_base_", 2
    forward, backward = Counter({sums: 1 + 2 * layers, gather: 1}), Counter({sums: 2 * layers + 1})
    assert [results["collectives"] for results in measured[2, False]] == [(forward, backward)] * 2


def test_number_of_collectives_on_parts_of_the_sequence(measured):
    """Every all-reduce of the residual stream becomes a gathering and a reduce-scatter; the loss's
    gathering remains, and in the backward every norm's weight has an all-reduce."""
    sums, gather, scatter, layers = "allreduce_", "_allgather_base_", "_reduce_scatter_base_", 2
    forward = Counter({scatter: 1 + 2 * layers, gather: 2 * layers + 2})
    backward = Counter({gather: 1 + 2 * layers, scatter: 2 * layers + 1, sums: 2 * layers + 1})
    assert [results["collectives"] for results in measured[2, True]] == [(forward, backward)] * 2


def test_dropout_is_off_in_eval_mode():
    config = replace(FAMILIES["gpt2"], hidden_dropout=0.3, attention_dropout=0.3)
    gpt = GPT(config, Placement()).eval()
    load(gpt.units, weights_of("gpt2"), 0, 1)
    expected, _ = reference(huggingface("gpt2"), batch())
    torch.testing.assert_close(gpt(batch()).detach(), expected, rtol=2e-6, atol=0)
    losses = [gpt.train()(batch()).item() for _ in range(2)]
    assert losses[0] != losses[1]


def test_later_tokens_do_not_matter():
    gpt = GPT(FAMILIES["llama"], Placement())
    load(gpt.units, weights_of("llama"), 0, 1)
    data = batch()
    data["loss_mask"] = torch.zeros(2, 12).index_fill_(1, torch.arange(6), 1.0)
    changed = data | {"tokens": data["tokens"].clone().index_fill_(1, torch.arange(6, 12), 1)}
    assert torch.equal(gpt(data), gpt(changed))


def test_an_empty_mask_gives_zero_and_no_nan():
    gpt = GPT(FAMILIES["gpt2"], Placement())
    load(gpt.units, weights_of("gpt2"), 0, 1)
    loss = gpt(batch() | {"loss_mask": torch.zeros(2, 12)})
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.count_nonzero() == 0 for p in gpt.parameters())


def _parts_dropped(rank, tp):
    """Which elements dropout zeroes in an embedding of ones: this rank's part, on a stream of its
    own.
    """
    config = replace(FAMILIES["llama"], hidden_dropout=0.5)
    place = Placement(
        dist.group.WORLD, rng=model_parallel_seed(5, rank, CPU), sequence_parallel=True
    )
    embedding = build_unit(0, config, place)
    torch.nn.init.ones_(embedding.tokens.weight)
    (segment, embed) = embedding.segments()
    x = embed.fn(Common(batch()), *segment.fn(Common(batch())))[0]
    assert x.shape == embedding.border_shape(2, 12) == (2, 12 // tp, 32)
    return (x == 0).detach()


def test_on_parts_of_the_sequence_ranks_draw_their_own_masks():
    first, second = run_ranks(_parts_dropped, 2)
    assert not torch.equal(first, second)
    assert 0.3 < first.float().mean() < 0.7


def test_of_one_rank_sequence_parallelism_means_nothing():
    place = Placement(sequence_parallel=True)
    assert not place.on_parts
    assert build_unit(1, FAMILIES["gpt2"], place).border_shape(2, 13) == (2, 13, 32)

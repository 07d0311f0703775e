"""The GPT that flags describe, as the engine runs it, against HuggingFace's models: loss and every
gradient, alone and over tensor-parallel ranks.
"""

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config, ParallelConfig, TrainConfig
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.planner import plan as make_plan
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.training.gpt_blueprint import gpt_blueprint
from tests.graph.stages import Stages, unequal
from tests.models.chains import GPTChain
from tests.models.families import (
    CONVERTIBLE,
    FAMILIES,
    LENGTH,
    batch,
    gpt,
    huggingface,
    load,
    named,
    reference,
    weights_of,
)
from tests.oplog import OpLog
from tests.parity.rig import part_of, spoil
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LAYERS = 2
DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.3}

# What of a layer the backward computes again, by flags.
RECOMPUTED = {
    "nothing": {},
    "layers": {"recompute_granularity": "full"},
    "activations": {"recompute_granularity": "selective"},
}


@dataclass(frozen=True)
class Layout:
    """tp: tensor-parallel ranks. parts: whether they divide sequences."""

    tp: int = 1
    parts: bool = False

    def config(self, name, ways=None, **changes) -> Config:
        """ways: further fields of ParallelConfig. changes: of the shape."""
        parallel = ParallelConfig(
            tensor_model_parallel_size=self.tp, sequence_parallel=self.parts, **(ways or {})
        )
        return Config(
            model=replace(CONVERTIBLE[name], **changes),
            parallel=parallel,
            train=TrainConfig(micro_batch_size=2, global_batch_size=2),
        )


ONE = Layout()
TWO = Layout(2)
PARTS = Layout(2, parts=True)
LAYOUTS = (ONE, TWO, PARTS)
# Biases and experts stand between their activations and the products behind these.
WHOLE_LAYERS = ("llama-biased", "mixtral", "qwen3_moe", "qwen2_moe")
CASES = [(name, ONE) for name in CONVERTIBLE]
CASES += [(name, layout) for name in FAMILIES for layout in (TWO, PARTS)]


def plain(name, weights, samples, **changes):
    """Loss and gradients of the module in one autograd graph."""
    model = gpt(name, weights, **changes)
    loss = model(**model.batch_of(samples))
    loss.backward()
    return loss.detach(), {key: each.grad for key, each in model.named_parameters()}


def empty(samples):
    """The samples without any target."""
    return samples | {"loss_mask": torch.zeros(2, LENGTH)}


def recomputations(name):
    """The ways to recompute that there are for a shape."""
    return {
        again: ways
        for again, ways in RECOMPUTED.items()
        if again != "activations" or name not in WHOLE_LAYERS
    }


class Rank:
    """Models on this rank, of one capture per shape."""

    def __init__(self, rank, tp, weights):
        self.meshes = {
            layout: build_mesh(Grid(tp=tp), rank, CPU) for layout in LAYOUTS if layout.tp == tp
        }
        self.tp = tp
        self.weights = weights
        self.traced = {}

    def model(self, name, layout, ways=None, **changes) -> GPTModel:
        """The model of a layout, with this rank's parts of the weights."""
        mesh = self.meshes[layout]
        config = layout.config(name, ways, **changes)
        if config.model not in self.traced:
            self.traced[config.model] = traced_gpt(config, mesh)
        traced = self.traced[config.model]
        blueprint = gpt_blueprint(traced, config, self.tp, CLUSTERS["cpu"])
        model = GPTModel(blueprint, config, mesh)
        load(model, self.weights[name])
        return model


def step(model, samples):
    """The loss per target, and this rank's shards of its gradient."""
    spoil(model.buffer)
    loss = model.gradients(model.from_samples([samples]))
    shards = model.shards(model.buffer.main_grad)
    return loss, [replace(shard, tensor=shard.tensor.clone()) for shard in shards]


def collectives(model):
    """Those of one forward, and of the backward of a step."""
    samples = model.from_samples([batch()])
    with OpLog() as forward:
        model.mean_loss([batch()])
    with OpLog() as both:
        model.gradients(samples)
    return Counter(forward.collectives), Counter(both.collectives) - Counter(forward.collectives)


def on_ranks(rank, tp, weights):
    """What this rank finds in every layout of ``tp`` ranks."""
    own = Rank(rank, tp, weights)
    found = {}
    for layout in own.meshes:
        steps = {}
        for name in weights:
            for again, ways in recomputations(name).items():
                steps[name, again] = step(own.model(name, layout, ways), batch())
        dropped = own.model("llama", layout, **DROPOUT)
        found[layout] = {
            "steps": steps,
            "chunks": step(own.model("llama", layout, cross_entropy_chunk_size=5), batch()),
            "dropped": step(dropped, batch()),
            "not dropped": dropped.mean_loss([batch()]),
            "empty": step(dropped, empty(batch())),
            "collectives": collectives(own.model("llama", layout)),
        }
    return found


@pytest.fixture(scope="module")
def weights():
    return {name: weights_of(name) for name in CONVERTIBLE}


@pytest.fixture(scope="module")
def measured(weights):
    """By layout, what each rank found."""
    alone = on_ranks(0, 1, weights)
    ranks = run_ranks(on_ranks, 2, {name: weights[name] for name in FAMILIES}, timeout=280)
    found = {ONE: [alone[ONE]]}
    for layout in (TWO, PARTS):
        found[layout] = [rank[layout] for rank in ranks]
    return found


@pytest.fixture(scope="module")
def truth():
    """Of each family, the loss per target and its gradients as HuggingFace's model has them."""
    found = {}
    count = batch()["loss_mask"].sum()
    for name in CONVERTIBLE:
        loss, grads = reference(huggingface(name), batch())
        found[name] = loss / count, named(name, {key: each / count for key, each in grads.items()})
    return found


def close(shards, grads):
    """Whether shards are those of the gradients, as far as rounding to fp32 lets them be."""
    assert {shard.name for shard in shards} == set(grads)
    for shard in shards:
        expected = part_of(grads[shard.name], shard)
        scale = grads[shard.name].abs().max()
        assert (shard.tensor - expected).abs().max() <= 5e-6 * scale, shard.name


def same(one, other):
    """Whether two steps have the same bits."""
    assert one[0] == other[0]
    for first, second in zip(one[1], other[1], strict=True):
        assert first.name == second.name
        assert torch.equal(first.tensor, second.tensor), first.name


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loss_and_every_gradient_equal_huggingface(measured, truth, name, layout):
    loss, grads = truth[name]
    for rank in measured[layout]:
        for again in recomputations(name):
            found, shards = rank["steps"][name, again]
            assert found == pytest.approx(loss.item(), rel=2e-6)
            close(shards, grads)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_recomputation_changes_no_bit(measured, name, layout):
    for rank in measured[layout]:
        for again in recomputations(name):
            same(rank["steps"][name, again], rank["steps"][name, "nothing"])


@pytest.mark.parametrize("name", [name for name in CONVERTIBLE if name not in WHOLE_LAYERS])
def test_every_activation_is_recomputed_that_a_flag_names(name, weights):
    model = Rank(0, 1, weights).model(name, ONE, RECOMPUTED["activations"])
    assert model.blueprint.fused["recomputed activation"] == LAYERS
    model = Rank(0, 1, weights).model(name, ONE, RECOMPUTED["layers"])
    assert model.plan.stages[0].runs == tuple((unit,) for unit in range(1, LAYERS + 1))


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_the_engine_and_one_autograd_graph_agree(name, weights, monkeypatch):
    """Bitwise, but for a tied table, whose two uses are added in another order, where weights of rows
    stay behind the product of their experts.
    """
    monkeypatch.setattr("megatron_merak.graph.lowering.rewrite.prepare_rows", lambda graph: None)
    loss, grads = plain(name, weights[name], batch())
    chain = GPTChain(gpt(name, weights[name]), batch())
    assert chain.units == LAYERS + 2
    tied = not CONVERTIBLE[name].untie_embeddings_and_output_weights
    for stages, recompute in ((1, False), (1, True), (2, True), (chain.units, False)):
        engine_loss, found = Stages(chain, stages, recompute).step(chain.batch)
        assert torch.equal(engine_loss, loss)
        differ = unequal(found, grads)
        if tied:
            (table,) = [key for key in grads if key.endswith(("wte.weight", "embed_tokens.weight"))]
            assert differ.pop(table, 0.0) < 1e-6
        assert differ == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_in_chunks_computes_the_same(measured, truth, layout):
    for rank in measured[layout]:
        loss, shards = rank["chunks"]
        whole_loss, whole = rank["steps"]["llama", "nothing"]
        assert loss == pytest.approx(whole_loss, rel=1e-6)
        for shard, other in zip(shards, whole, strict=True):
            difference = (shard.tensor - other.tensor).abs().max()
            assert difference <= 5e-6 * other.tensor.abs().max(), shard.name
        close(shards, truth["llama"][1])


def test_number_of_collectives(measured):
    """Forward: embedding, two per layer, statistics of the loss. Backward: two per layer, and the
    head's.
    """
    sums = "allreduce_"
    gather = "_allgather_base_"
    forward = Counter({sums: 1 + 2 * LAYERS, gather: 1})
    backward = Counter({sums: 2 * LAYERS + 1})
    assert [rank["collectives"] for rank in measured[TWO]] == [(forward, backward)] * 2


def test_number_of_collectives_on_parts_of_the_sequence(measured):
    """Every all-reduce of the residual stream becomes a gathering and a reduce-scatter; the loss's
    gathering remains. In the backward every norm's weight has an all-reduce, and what linear layers
    read is gathered again: two times per layer, and by the head.
    """
    sums = "allreduce_"
    gather = "_allgather_base_"
    scatter = "_reduce_scatter_base_"
    around = 2 * LAYERS + 1
    forward = Counter({scatter: around, gather: around + 1})
    backward = Counter({gather: 2 * around, scatter: around, sums: around})
    assert [rank["collectives"] for rank in measured[PARTS]] == [(forward, backward)] * 2


def test_one_rank_communicates_nothing(measured):
    assert measured[ONE][0]["collectives"] == (Counter(), Counter())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_drops_nothing(measured, truth, layout):
    loss, _ = truth["llama"]
    for rank in measured[layout]:
        assert rank["not dropped"] == pytest.approx(loss.item(), rel=2e-6)
        assert abs(rank["dropped"][0] - loss.item()) > 1e-3


def test_parts_of_the_sequence_have_their_parts_of_the_masks(measured):
    """A rank drops of its part what it drops of it without sequence parallelism."""
    for whole, parts in zip(measured[TWO], measured[PARTS], strict=True):
        loss, shards = whole["dropped"]
        again, found = parts["dropped"]
        assert again == pytest.approx(loss, rel=2e-6)
        for shard, other in zip(found, shards, strict=True):
            difference = (shard.tensor - other.tensor).abs().max()
            assert difference <= 5e-6 * other.tensor.abs().max(), shard.name


def test_later_tokens_do_not_matter(weights):
    data = batch()
    early = torch.arange(LENGTH // 2)
    late = torch.arange(LENGTH // 2, LENGTH)
    data["loss_mask"] = torch.zeros(2, LENGTH).index_fill_(1, early, 1.0)
    changed = data | {"tokens": data["tokens"].clone().index_fill_(1, late, 1)}
    unlike = data | {"tokens": data["tokens"].clone().index_fill_(1, early[-1:], 1)}
    loss, _ = plain("llama", weights["llama"], data)
    assert torch.equal(loss, plain("llama", weights["llama"], changed)[0])
    assert not torch.equal(loss, plain("llama", weights["llama"], unlike)[0])
    model = Rank(0, 1, weights).model("llama", ONE)
    assert model.mean_loss([data]) == model.mean_loss([changed])
    assert model.mean_loss([data]) != model.mean_loss([unlike])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_targets_give_zero_and_no_nan(measured, layout):
    for rank in measured[layout]:
        loss, shards = rank["empty"]
        assert loss == 0
        assert len(shards) == len(rank["steps"]["llama", "nothing"][1])
        assert all(shard.tensor.count_nonzero() == 0 for shard in shards)


def test_of_one_rank_sequence_parallelism_means_nothing():
    """Sequences may have any length then."""
    parts = Layout(1, parts=True)
    own = make_plan(parts.config("gpt2", seq_length=13), 1)
    assert not own.sequence_parallel
    assert own == make_plan(ONE.config("gpt2", seq_length=13), 1)

"""A stored plan of the GPT that flags describe: its own shardings are priced by formulas, others
from the graph, and those that the graph cannot be computed with are refused by name.
"""

from dataclasses import replace
from math import prod

import pytest
import torch

from megatron_merak import arguments
from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import Config
from megatron_merak.errors import PlanError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import TensorSharding, held_parameters
from megatron_merak.planner import plan as make_plan
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.training.gpt_blueprint import by_formulas, gpt_blueprint
from megatron_merak.training.plan_file import decided
from tests.parity.rig import assemble, spoil
from tests.ranks import run_ranks

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 97 --seq-length 16
    --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --mock-data --train-iters 1"""
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"""
BATCH = "--micro-batch-size 2 --global-batch-size 2"
QKV = "transformer.h.0.attn.c_attn.weight"
FEED = "transformer.h.0.mlp.c_fc.weight"
TABLE = "transformer.wte.weight"
NORM = "transformer.ln_f.weight"


def read(line):
    words = line.split()
    parser = arguments.build_parser(config=Config)
    config, _ = arguments.read(parser, words, Config, decided(Config, words))
    return config


def made(tp, more=""):
    """The configuration of a shape on ``tp`` ranks, and its blueprint without a stored plan."""
    config = read(f"{FLAGS} {more} {BATCH} --tensor-model-parallel-size {tp}")
    return config, by_formulas(traced_gpt(config), config, make_plan(config, tp))


def followed(path, plan, shardings, more="", ranks=None):
    """The configuration and the blueprint of a run that is given a plan with these shardings."""
    path.write_text(replace(plan, shardings=tuple(shardings)).to_json())
    return applied(path, plan.grid.tp, more, ranks)


def applied(path, tp, more="", ranks=None):
    config = read(f"{FLAGS} {more} --plan {path}")
    return config, gpt_blueprint(traced_gpt(config, ranks), config, tp, CLUSTERS["cpu"])


def changed(shardings, name, change):
    return [replace(each, **change) if each.name == name else each for each in shardings]


@pytest.mark.parametrize("more", ["", LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("tp", [1, 2])
def test_its_own_shardings_are_accepted_in_any_order(tp, more, tmp_path):
    _, own = made(tp, more)
    plan = own.plan
    for shardings in ((), plan.shardings):
        _, blueprint = followed(tmp_path / "plan.json", plan, shardings, more)
        assert blueprint.plan == plan
        assert blueprint.sharding.tensors == own.sharding.tensors
    _, blueprint = followed(tmp_path / "plan.json", plan, plan.shardings[::-1], more)
    assert blueprint.sharding.tensors == own.sharding.tensors


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (TABLE, {"dim": None, "padded": None}),
        (TABLE, {"padded": 512}),
        ("transformer.wpe.weight", {"dim": 0}),
    ],
)
def test_others_are_followed_and_priced_from_the_graph(name, change, tmp_path):
    _, own = made(2)
    shardings = changed(own.plan.shardings, name, change)
    _, blueprint = followed(tmp_path / "plan.json", own.plan, shardings)
    assert blueprint.plan.shardings == tuple(shardings)
    assert blueprint.sharding.tensors == {each.name: each for each in shardings}
    assert blueprint.sharding.reasons[name].endswith("as the plan says")
    stored = sum(prod(tensor.stored_shape(2)) for tensor in shardings)
    assert held_parameters(blueprint.plan.units) == stored != held_parameters(own.plan.units)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            QKV,
            {"dim": 0, "blocks": 1},
            "has it sharded along dimension 0, but addmm in transformer.h.0.attn.c_attn adds "
            "transformer.h.0.attn.c_attn.bias, which is sharded, to a replicated one. "
            "Let it be sharded along dimension 1 in 3 blocks",
        ),
        (
            QKV,
            {"blocks": 1},
            "has it sharded along dimension 1, but addmm in .* which is sharded differently. "
            "Let it be sharded along dimension 1 in 3 blocks",
        ),
        (TABLE, {"padded": 111}, "padded to 111, and 111 is not divisible by 2 "),
        (NORM, {"dim": 0}, "has it sharded along dimension 0, but layer_norm in transformer.ln_f"),
        (NORM, {"shape": (64,)}, r"its shape is \(64,\) in the plan, and \(32,\) in the model"),
    ],
)
def test_the_first_that_the_graph_cannot_have_is_named(name, change, words, tmp_path):
    _, own = made(2)
    shardings = changed(own.plan.shardings, name, change)
    with pytest.raises(PlanError, match=f"sharding of {name}: .*{words}"):
        followed(tmp_path / "plan.json", own.plan, shardings)


def test_a_plan_says_of_every_tensor_and_of_no_other(tmp_path):
    _, own = made(2)
    shardings = own.plan.shardings
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match=f"sharding of {NORM}: .*does not say how it is sharded"):
        followed(path, own.plan, [each for each in shardings if each.name != NORM])
    with pytest.raises(PlanError, match="sharding of extra: .*computes with no such parameter"):
        followed(path, own.plan, [*shardings, TensorSharding("extra", (2,))])


def test_one_rank_may_pad_a_vocabulary_and_divides_nothing(tmp_path):
    _, own = made(1)
    shardings = own.plan.shardings
    path = tmp_path / "plan.json"
    wider = changed(shardings, TABLE, {"padded": 256})
    assert followed(path, own.plan, wider)[1].plan.shardings == tuple(wider)
    with pytest.raises(PlanError, match=f"sharding of {FEED}: .*one tensor-parallel rank"):
        followed(path, own.plan, changed(shardings, FEED, {"dim": 1}))


def gradients(rank, world, paths):
    """The loss of a batch and its gradient, by each of these plans."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(97, (2, 17), generator=generator)
    samples = {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(2, 16),
        "position_ids": torch.arange(16).expand(2, -1).contiguous(),
    }
    found = []
    for path in paths:
        config, blueprint = applied(path, world)
        mesh = build_mesh(blueprint.plan.grid, rank, torch.device("cpu"))
        model = GPTModel(blueprint, config, mesh)
        spoil(model.buffer)
        loss = model.gradients(model.from_samples([samples]))
        shards = model.shards(model.buffer.main_grad)
        found.append((loss, [replace(shard, tensor=shard.tensor.clone()) for shard in shards]))
    return found


def test_loss_and_gradients_are_the_same_however_a_plan_shards(tmp_path):
    _, own = made(2)
    own_shardings = own.plan.shardings
    whole = own_shardings
    for each in own_shardings:
        if each.name.startswith("transformer.h.0.mlp."):
            whole = changed(whole, each.name, {"dim": None})
    table = changed(own_shardings, TABLE, {"dim": None, "padded": None})
    paths = []
    for number, shardings in enumerate((own_shardings, table, whole)):
        paths.append(tmp_path / f"{number}.json")
        followed(paths[-1], own.plan, shardings)
    ranks = run_ranks(gradients, 2, paths, timeout=120)
    losses = [[rank[number][0] for rank in ranks] for number in range(3)]
    grads = [assemble([rank[number][1] for rank in ranks]) for number in range(3)]
    for number in (1, 2):
        assert losses[number] == pytest.approx(losses[0], rel=2e-6)
        assert grads[number].keys() == grads[0].keys()
        for name, grad in grads[0].items():
            assert (grads[number][name] - grad).abs().max() <= 5e-6 * grad.abs().max(), name

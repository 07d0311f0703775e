"""A shared expert is computed while rows of tokens are exchanged, forward and backward, and nothing
else changes by that: no bit of a loss, gradient or mask.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import pytest
import torch
import transformers

from megatron_merak.config import ParallelConfig
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.runtime import engine
from megatron_merak.runtime.watching import observed
from megatron_merak.segment import Collective
from megatron_merak.stages import blueprint
from tests.engines import engine_of
from tests.graph.test_experts import GPT, DeepSeek, WithLoss
from tests.graph.tiny import randomise
from tests.ranks import run_ranks

LENGTH = 16


def qwen2_moe():
    """Its shared expert has a gate; attention has dropout."""
    config = transformers.Qwen2MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    return transformers.Qwen2MoeForCausalLM(config).train()


def deepseek():
    """Its first layer is dense."""
    return transformers.DeepseekV3ForCausalLM(DeepSeek.config()).train()


def gpt(dropout=0.1):
    """A whole layer is one unit, with dropout before and after its experts."""
    config = replace(
        GPT,
        seq_length=LENGTH,
        moe_shared_expert_intermediate_size=64,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    return WithLoss(config).train()


MODELS = {
    "qwen2_moe": qwen2_moe,
    "deepseek": deepseek,
    "gpt": gpt,
    "gpt without dropout": partial(gpt, 0.0),
}
EXPERTS = {"expert_model_parallel_size": 2}
REPLICAS = {"grid": Grid(dp=2), **EXPERTS}
SHARDS = {"grid": Grid(dp=2), "expert_tensor_parallel_size": 2}
CONTEXTS = {"grid": Grid(cp=2), **EXPERTS}
LAYER = {"grid": Grid(tp=2), "sequence_parallel": True, **EXPERTS}


@dataclass(frozen=True)
class Waited:
    """A work whose wait is noted."""

    work: object
    note: object

    def wait(self):
        self.note()
        self.work.wait()


class Events:
    """What a rank does in a step, in its order: launches of exchanges of rows, waits for these, and
    segments of shared experts.

    names: of parameters.
    """

    def __init__(self, names):
        self.names = names
        self.seen = []
        self._count = 0

    def launch(self, launch, tensor, kind, *args):
        """Rows, for which there is room, are exchanged as any value; how many there are, before."""
        if kind is Collective.EXCHANGE and tensor.is_floating_point():
            return self.exchange(launch, tensor, kind, *args)
        return launch(tensor, kind, *args)

    def exchange(self, exchange, *args):
        number = self._count
        self._count += 1
        self.seen.append(f"launch {number}")
        rows, work = exchange(*args)
        return rows, Waited(work, partial(self.seen.append, f"wait {number}"))

    def __call__(self, kind, segment, common, read, made):
        names = (self.names[p] for p in segment.parameters)
        if any("shared_expert" in name and "_proj" in name for name in names):
            self.seen.append(f"shared {kind.name}")


def batch():
    ids = torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids.flip(1)}


def step(rank, name, hides, grid, microbatches=1, **ways):
    """(loss, gradients, events, plan) of a step on a rank."""
    torch.manual_seed(0)
    degrees = {"tensor_model_parallel_size": grid.tp, "context_parallel_size": grid.cp}
    parallel = ParallelConfig(**degrees, **ways)
    groups = {}
    if grid.tp == 1:  # copies of a layer divide experts
        groups = {"expert_group": 2, "expert_shards": ways.get("expert_tensor_parallel_size", 1)}
    mesh = build_mesh(grid, rank, torch.device("cpu"), **groups)
    stays = mock.patch.object(blueprint, "put_behind_exchanges", lambda rewritten: None)
    with nullcontext() if hides else stays:
        model = engine_of(
            randomise(MODELS[name]()),
            batch(),
            mesh,
            parallel=parallel,
            microbatches=microbatches,
            micro_batch_size=2,
        )
    events = Events({p: n for n, p in model.parameter_shards.parameters.items()})
    noted = partial(events.exchange, engine.exchange_rows)
    launch = partial(events.launch, engine.launch)
    with (
        observed(model.stages.values(), events),
        mock.patch.object(engine, "exchange_rows", noted),
        mock.patch.object(engine, "launch", launch),
    ):
        loss = model.gradients([batch()] * microbatches)
    gradients = {shard.name: shard.tensor.clone() for shard in model.shards(model.buffer.main_grad)}
    return loss, gradients, events.seen, model.plan


def both(rank, world_size, cases):
    return [[step(rank, name, hides, **ways) for hides in (False, True)] for name, ways in cases]


CASES = {
    "qwen2_moe, replicas": ("qwen2_moe", REPLICAS),
    "deepseek, replicas": ("deepseek", REPLICAS),
    "gpt, replicas": ("gpt", REPLICAS),
    "qwen2_moe, recomputed": ("qwen2_moe", {**REPLICAS, "recompute_granularity": "full"}),
    "qwen2_moe, shards": ("qwen2_moe", SHARDS),
    "qwen2_moe, contexts": ("qwen2_moe", CONTEXTS),
    "qwen2_moe, layer": ("qwen2_moe", LAYER),
    "deepseek, layer": ("deepseek", LAYER),
    "gpt, layer": ("gpt", LAYER),
}


def beside(events):
    """(event, number of exchanges that are under way) of each segment of a shared expert."""
    under_way = set()
    found = []
    for what, which in (event.split() for event in events):
        if what == "launch":
            under_way.add(which)
        elif what == "wait":
            under_way.remove(which)
        else:
            found.append((which, len(under_way)))
    return found


def check(cases):
    world = cases[0][1]["grid"].size
    for of_rank in run_ranks(both, world, cases, timeout=300):
        for (name, ways), (plain, behind) in zip(cases, of_rank, strict=True):
            passes = ["F"] * (1 if name == "deepseek" else 2)
            backward = [*"RB"] if "recompute_granularity" in ways else ["B"]
            passes += backward * len(passes)
            assert beside(plain[2]) == [(kind, 0) for kind in passes]
            # of rows, and of their weights
            assert beside(behind[2]) == [(kind, 2) for kind in passes]
            assert plain[0] == behind[0] and plain[1].keys() == behind[1].keys()
            for parameter, gradient in plain[1].items():
                assert torch.equal(behind[1][parameter], gradient), parameter


QUICK = ["qwen2_moe, replicas", "deepseek, replicas"]


def test_a_shared_expert_is_computed_while_rows_are_exchanged():
    check([CASES[name] for name in QUICK])


def with_room(rank, world_size, cases):
    ways = [{}, {"moe_expert_rank_capacity_factor": 2.0}]
    return [[step(rank, name, True, **case, **way) for way in ways] for name, case in cases]


def check_with_room(cases):
    world = cases[0][1]["grid"].size
    for of_rank in run_ranks(with_room, world, cases, timeout=300):
        for ragged, padded in of_rank:
            assert beside(padded[2]) == beside(ragged[2]) and ragged[0] == padded[0]
            for parameter, gradient in ragged[1].items():
                assert torch.equal(padded[1][parameter], gradient), parameter
            assert padded[3].expert_room == 2.0


def test_room_for_rows_changes_no_bit_and_hides_as_much():
    check_with_room([CASES["qwen2_moe, replicas"], CASES["qwen2_moe, shards"]])


def with_each(rank, world_size, overlaps):
    return [
        step(rank, "qwen2_moe", True, microbatches=2, tp_comm_overlap=overlap, **REPLICAS)
        for overlap in overlaps
    ]


def test_overlap_is_of_rows_too():
    """Ranks that share no layer exchange rows of its experts."""
    overlaps = ["weight-gradient", "none", "pair"]
    for of_rank in run_ranks(with_each, 2, overlaps, timeout=300):
        assert [plan.overlap for *_, plan in of_rank] == overlaps
        loss, gradients, *_ = of_rank[0]
        for other in of_rank[1:]:
            assert other[0] == loss
            for parameter, gradient in gradients.items():
                assert torch.equal(other[1][parameter], gradient), parameter
        default, alone, paired = (events for *_, events, _ in of_rank)
        assert {count for _, count in beside(default)} == {2}
        assert {count for _, count in beside(alone)} == {0}
        assert paired != default and sorted(paired) == sorted(default)


@pytest.mark.long
def test_in_other_layouts():
    """With dropout whose masks stay, recomputed, and where ranks of a layer share a shared expert."""
    others = [case for name, case in CASES.items() if name not in QUICK]
    check(others)
    # a unit has other segments with room for rows, from which masks of hidden values follow
    same_masks = {"gpt": "gpt without dropout"}
    check_with_room([(same_masks.get(name, name), ways) for name, ways in others])

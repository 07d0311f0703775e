"""Ranks that built different models: the first rank's weights are everybody's, and another model is
refused by name.
"""

import pytest
import torch
from torch import nn

from megatron_merak.checkpoint.hf import from_pretrained
from megatron_merak.config import ParallelConfig
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.stages import deliver
from tests.engines import engine_of, step
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks
from tests.stages.test_captured import part, trainer_of

GRIDS = (Grid(dp=4), Grid(tp=2, dp=2), Grid(tp=2, pp=2))


class Scaled(nn.Module):
    """With a buffer, an expanded one, a parameter without dimensions, and numbers that no config
    tells of.
    """

    def __init__(self, seed=0, depth=2, eps=1e-5, frozen=False):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(6, eps=eps)
        self.temperature = nn.Parameter(torch.rand(()), requires_grad=not frozen)
        self.register_buffer("offset", torch.randn(6))
        self.register_buffer("shift", torch.randn(1, 1).expand(1, 6), persistent=False)

    def forward(self, x, labels):
        for layer in self.layers:
            x = self.norm(layer(x) + self.offset + self.shift).relu()
        return nn.functional.cross_entropy(x * self.temperature, labels)


class Doubled(Scaled):
    def forward(self, x, labels):
        return super().forward(x, labels) * 2


def batches():
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(4, 6, generator=generator),
            "labels": torch.randint(6, (4,), generator=generator),
        }
        for _ in range(2)
    ]


def build_everywhere(rank, world_size):
    """Every rank builds from a seed of its own; what it holds must be its part of the first rank's
    model.
    """
    torch.set_num_threads(1)
    deliver.MESSAGE = 200  # bytes: many messages, and tensors that no message holds
    first, (batch, *_) = Scaled(0), batches()
    with init_empty_weights():
        empty = Scaled(rank)
    models = (Scaled(rank), empty if rank else first, Scaled(rank))
    for grid, model in zip(GRIDS, models, strict=True):
        trainer = trainer_of(model, batch, grid, rank, grid.dp)
        for shard in (*trainer.parameter_shards.others(), *trainer.shards(trainer.buffer.data)):
            assert torch.equal(shard.tensor, part(first.get_parameter(shard.name), shard)), (
                grid,
                shard.name,
            )
        for (name, buffer), mine in zip(first.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(buffer, mine), name


def test_the_first_ranks_weights_and_buffers_are_everybodys():
    run_ranks(build_everywhere, 4, timeout=120)


def deeper_llama():
    model = tiny_llama()
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 3})
    return type(model)(config)


DIFFERENT = {
    r"config.num_hidden_layers 3: on rank 1, it is 2 on the first rank": lambda: (
        tiny_llama(),
        deeper_llama(),
    ),
    r"parameter layers.2.0.weight \(8, 6\).*the first rank's model does not have it": lambda: (
        Scaled(),
        Scaled(depth=3),
    ),
    r"parameter layers.2.0.weight \(absent\)": lambda: (Scaled(depth=3), Scaled()),
    r"parameter temperature .*requires_grad=False": lambda: (Scaled(), Scaled(frozen=True)),
    r"parameter temperature .*float64": lambda: (Scaled(), Scaled().double()),
    r"class .*Doubled: on rank 1, it is tests.stages.test_same_model.Scaled": lambda: (
        Scaled(),
        Doubled(),
    ),
    r"computes something else on rank 1 than on rank 0": lambda: (Scaled(), Scaled(eps=1e-3)),
}


def build_different(rank, world_size, directory):
    refused = []
    plain, language = batches(), collate(samples(4, ragged=False))
    for make in (*DIFFERENT.values(), lambda: [from_pretrained(f"{directory}/{rank}")] * 2):
        model = make()[rank]
        batch = plain[0] if isinstance(model, Scaled) else language
        with pytest.raises(ConfigError) as caught:
            trainer_of(model, batch, Grid(dp=2), rank, 2)
        refused.append(str(caught.value))
    return refused


def test_another_model_on_a_rank_is_named_before_anything_is_sent(tmp_path):
    for seed in range(2):
        tiny_llama(seed).save_pretrained(tmp_path / str(seed))
    patterns = (
        *DIFFERENT,
        r"values of stored tensor lm_head.weight sha256 .*: on rank 1, it is sha256 ",
    )
    for refused in run_ranks(build_different, 2, str(tmp_path)):
        for message, pattern in zip(refused, patterns, strict=True):
            with pytest.raises(AssertionError, match=pattern):
                raise AssertionError(message)


def drift(rank, world_size):
    """What is told when gradients are not reduced, when a weight changes on one replica, and when
    that is saved.
    """
    plain = batches()
    told = []
    for interval, harm in ((0, "gradients"), (2, "weight"), (0, "save")):
        mesh = build_mesh(Grid(dp=2), rank, torch.device("cpu"))
        trainer = engine_of(Scaled(), plain[0], mesh, others={"replica_check_interval": interval})
        step(trainer, plain[rank : rank + 1], 1e-2, 0.0)
        if harm == "gradients":
            trainer.parameters.reducer.group = None
        elif rank == 1:
            trainer.buffer.data[3] += 2**-10
        try:
            step(trainer, plain[rank : rank + 1], 1e-2, 0.0)
            if harm == "save":
                trainer.save("unused")
            step(trainer, plain[rank : rank + 1], 1e-2, 0.0)
            told.append("")
        except PlanError as error:
            told.append(str(error))
    return told


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.head(self.table(input_ids)).float(), labels)


def drift_of_twins(rank, world_size):
    """What is told when what one replica owns changes, which no other replica of its
    instance has.
    """
    told = []
    ids = torch.arange(4) + 4 * rank
    batch = {"input_ids": ids, "labels": (ids + 1) % 16}
    mesh = build_mesh(Grid(dp=4), rank, torch.device("cpu"), instances=2)
    for sharding in ("optim", "optim_grads_params"):
        names = {
            "data_parallel_sharding_strategy": sharding,
            "num_distributed_optimizer_instances": 2,
        }
        wishes = {"parallel": ParallelConfig(**names), "microbatches": 1, "dtype": "bfloat16"}
        trainer = engine_of(Words(), batch, mesh, **wishes)
        step(trainer, [batch], 1e-2, 0.0)
        trainer.replicas.check()
        if rank == 2:
            trainer.optimizer.master[3] += 2**-20
        with pytest.raises(PlanError) as caught:
            trainer.replicas.check()
        told.append(str(caught.value))
    return told


def test_shards_are_compared_with_those_of_the_other_instances():
    for told in run_ranks(drift_of_twins, 4):
        for text in told:
            assert (
                "rank 2 has other weights than the same position of the first replica, or instance"
                in text
            )


def test_replicas_that_drift_apart_are_named():
    told, others = run_ranks(drift, 2)
    assert told == others
    assert "(ranks 1): replica 1 had a gradient norm of " in told[0]
    assert "rank 1 has other weights" in told[1] and told[2] == told[1]

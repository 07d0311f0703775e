"""``MerakArguments(parallel="auto")``: what a search finds is trained, as if it had been asked for."""

import contextlib
import io
import random
import re
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from megatron_merak.engine import Engine
from megatron_merak.errors import ConfigError, PlanError
from megatron_merak.hf_trainer import timed
from megatron_merak.hf_trainer import trainer as trainers
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.runtime.executor import Executor
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.hf_trainer.test_experts import mixture
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": "none",
    "seed": 5,
}
CHOSEN = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "sequence_parallel",
    "data_parallel_sharding_strategy",
    "tp_comm_overlap",
    "gradient_checkpointing",
    "recompute_activations",
    "recompute_method",
    "num_virtual_stages_per_pipeline_rank",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
)


def _dropping():
    torch.manual_seed(2)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    )


def _smoothed(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)


def _draws(model, **changes):
    """A collator that draws random numbers, as those of masked language models do; its trainer."""

    def drawing(rows):
        batch = collate(rows)
        shift = random.randrange(3) + np.random.randint(3) + torch.randint(3, ()).item()  # noqa: NPY002
        return {name: (value + shift) % 64 for name, value in batch.items()}

    arguments = MerakArguments("unused", **{**RUN, **changes})
    return MerakTrainer(model, arguments, drawing, samples(32, ragged=False))


def _losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _chosen_and_asked_for(rank, world, directory, pins):
    searched = _draws(_dropping(), parallel=f"auto{pins}")
    found = _losses(searched)
    args = searched.args
    assert args.parallel is None
    asked = {name: getattr(args, name) for name in CHOSEN}
    replicas = searched.mesh.grid.dp
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * replicas
    assert batch == 2 * 2 * world
    return searched.mesh.grid, found, _losses(_draws(_dropping(), **asked))


@pytest.mark.parametrize(
    "pins", [",tp=2", *(pytest.param(pins, marks=pytest.mark.long) for pins in ("", ",pp=2,mb=1"))]
)
def test_what_is_found_is_trained_as_if_it_had_been_asked_for(pins, tmp_path):
    (grid, found, expected), *others = run_ranks(_chosen_and_asked_for, 2, str(tmp_path), pins)
    assert found == expected and len(found) == 2
    assert all(other == (grid, found, expected) for other in others)
    assert not pins or getattr(grid, pins[1:3]) == 2


def _verified_and_asked_for(rank, world, pins, fails):
    run = Executor.run
    calls = []

    def failing(self, *args, **kwargs):
        calls.append(0)
        if fails and rank and len(calls) == 3:
            raise MemoryError("no memory is left")
        return run(self, *args, **kwargs)

    inner = timed.time_steps
    engines = []  # that were tried

    def drawing(*args):
        engines.append(weakref.ref(args[0]))
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        return inner(*args)

    told = io.StringIO()
    asks = {"parallel": f"auto{pins}", "parallel_verify": 2, "disable_tqdm": False}
    tried = _draws(_dropping(), **asks)
    state = torch.get_rng_state()
    with (
        mock.patch.object(Executor, "run", failing),
        mock.patch.object(trainers, "time_steps", drawing),
        contextlib.redirect_stderr(told),
    ):
        tried._choose()
    assert tried.args.parallel_verify is None and torch.equal(torch.get_rng_state(), state)
    assert tried.mesh.control is tried._ranks.control
    assert len(engines) == 2 and not any(engine() for engine in engines), "they keep memory"
    found = _losses(tried)
    asked = {name: getattr(tried.args, name) for name in CHOSEN}
    given = _draws(_dropping(), **asked)
    assert torch.equal(torch.get_rng_state(), state)
    same = found == _losses(given)
    weights = zip(tried.engine.buffer.data.tolist(), given.engine.buffer.data.tolist(), strict=True)
    return same and all(one == other for one, other in weights), len(found), told.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_tried_is_trained_as_if_it_had_been_asked_for(fails):
    (same, steps, told), second = run_ranks(_verified_and_asked_for, 2, ",tp=2", fails, timeout=300)
    assert same and steps == 2 and second == (True, 2, "")
    lines = re.findall(r"^  (tp=\S+): (.+)$", told, re.MULTILINE)
    assert "parallel_verify 2: 2 plans run 5 steps each" in told and len(lines) == 2
    failed = [line for _, line in lines if "a step, predicted" not in line]
    assert failed == ["passed over: on rank 1, MemoryError: no memory is left"] * fails


def _averaged():
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=64,
    )
    return BertForMaskedLM(config)


def _micro_batches(rank, world, model, loss):
    arguments = MerakArguments("unused", **{**RUN, "parallel": "auto,pp=2", "disable_tqdm": False})
    data = samples(16, ragged=False)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        trainer = MerakTrainer(model(), arguments, collate, data, compute_loss_func=loss)
        assert trainer.engine.mesh is trainer.mesh
    args = trainer.args
    assert not rank or not told.getvalue()
    return args.per_device_train_batch_size, args.gradient_accumulation_steps, told.getvalue()


def _with_room(rank, world, pins):
    arguments = MerakArguments(
        "unused",
        **{**RUN, "disable_tqdm": False},
        parallel=pins,
        moe_expert_rank_capacity_factor=2.0,
    )
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        trainer = MerakTrainer(mixture(False), arguments, collate, samples(16, ragged=False))
        room = trainer.engine.plan.expert_room
    return room, told.getvalue()


def test_room_for_rows_is_of_ranks_that_a_search_lets_divide_experts():
    unused = "moe_expert_rank_capacity_factor has no effect: no ranks divide experts."
    (room, told), _ = run_ranks(_with_room, 2, "auto,ep=2")
    assert room == 2.0 and unused not in told
    (room, told), _ = run_ranks(_with_room, 2, "auto,ep=1")
    assert room is None and unused in told


@pytest.mark.parametrize(
    ("model", "loss"),
    [(tiny_llama, _smoothed), pytest.param(_averaged, None, marks=pytest.mark.long)],
)
def test_a_loss_of_micro_batches_keeps_their_size(model, loss):
    first, second = run_ranks(_micro_batches, 2, model, loss)
    assert first[:2] == second[:2] == (2, 4)
    assert "parallel auto,pp=2 chose tp=1,pp=2,mb=2" in first[2]
    assert "there are 4 in a step, not 2." in first[2]


REFUSED = [
    ({"parallel": "best"}, "it does not begin with auto"),
    ({"parallel": "auto,tp"}, "it is not NAME=VALUE"),
    ({"parallel": "auto", "tensor_model_parallel_size": 2}, "pin it: parallel='auto,tp=VALUE'"),
    ({"parallel": "auto", "gradient_checkpointing": True}, "'auto,recompute=VALUE'"),
    ({"parallel": "auto", "fsdp": "full_shard"}, "'auto,sharding=VALUE'"),
    ({"parallel_verify": 2}, "it has no effect without parallel"),
    ({"parallel": "auto", "parallel_verify": 1}, "parallel_verify 1: it compares plans"),
    ({"parallel": "auto", "num_distributed_optimizer_instances": 2}, "no search tries it"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED)
def test_arguments_that_a_search_decides_are_refused_beside_it(changes, told):
    with pytest.raises(ConfigError) as refused:
        MerakArguments("unused", **{**RUN, **changes})
    assert told in str(refused.value)


def test_searches_that_find_nothing_are_told():
    def trainer(dataset=None, **changes):
        return MerakTrainer(
            tiny_llama(1), MerakArguments("unused", **{**RUN, **changes}), collate, dataset
        )

    data = samples(16, ragged=False)
    with pytest.raises(ConfigError, match="batch of a step 4: no number of replicas on 1 ranks"):
        trainer(data, parallel="auto,mb=3").train()
    with pytest.raises(PlanError, match="fits into the memory"):
        trainer(data, parallel="auto", device_memory_gb=1e-6).train()
    with pytest.raises(ConfigError, match="not of NoneType"):
        trainer(parallel="auto")
    arguments = MerakArguments("unused", parallel="auto", **RUN)
    with pytest.raises(ConfigError, match="an Engine has no loop of its own"):
        Engine(tiny_llama(1), arguments, collate(data[:2]))

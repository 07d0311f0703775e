"""MerakTrainer on several ranks, around the eager model: who loads what, what all ranks know, and
who decides.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from megatron_merak.errors import ConfigError, DataError, MerakError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches.exchange import from_rank
from tests.hf_trainer.reference import accuracy, untimed
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "num_train_epochs": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "epoch",
    "per_device_eval_batch_size": 2,
    "include_num_input_tokens_seen": "all",
    "disable_tqdm": True,
}


def noisy(rows):
    batch = collate(rows)
    return batch | {
        "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.2, 7, batch["input_ids"])
    }


def run(rank, world_size, directory, tp, pp, *, callbacks=(), **changes):
    degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    args = MerakArguments(directory, **{**RUN, **degrees, **changes})
    trainer = EagerTrainer(
        tiny_llama(),
        args,
        noisy,
        samples(16),
        samples(7, seed=5),
        compute_metrics=accuracy,
        callbacks=list(callbacks),
    )
    trainer.train()
    predicted = trainer.predict(samples(5, seed=9))
    return {
        "seen": trainer.engine.seen,
        "logs": [untimed(entry) for entry in trainer.state.log_history],
        "flos": trainer.state.total_flos,
        "predictions": predicted.predictions,
        "labels": predicted.label_ids,
        "metrics": untimed(predicted.metrics),
        "weights": torch.cat([p.detach().flatten() for p in trainer.model.parameters()]),
        "example": trainer.example["input_ids"].tolist(),
        "backends": [
            dist.get_backend(group)
            for group in (trainer.mesh.tp, trainer.mesh.dp)
            if group is not None
        ],
    }


LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))


def run_layouts(rank, world_size, directory):
    return [run(rank, world_size, f"{directory}/{tp}{pp}", tp, pp) for tp, pp in LAYOUTS]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Per layout the results of four ranks."""
    return dict(
        zip(
            LAYOUTS,
            zip(*run_ranks(run_layouts, 4, str(tmp_path_factory.mktemp("ranks"))), strict=True),
            strict=True,
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_one_global_batch_train_alike(ran, layout, tmp_path):
    (tp, pp), found = layout, ran[layout]
    replicas = 4 // (tp * pp)
    alone = run(0, 1, str(tmp_path), 1, 1, gradient_accumulation_steps=replicas)
    taken = [one["seen"] for one in found[::tp]][:replicas]
    for rank, one in enumerate(found):
        # tensor and pipeline ranks load the same
        assert one["seen"] == taken[rank // tp % replicas]
        for known in ("logs", "metrics", "example"):
            assert one[known] == found[0][known]
        assert np.array_equal(one["predictions"], found[0]["predictions"])
        torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-4, atol=1e-6)
    steps = [
        [batch for micro in zip(*step, strict=True) for batch in micro]
        for step in zip(*taken, strict=True)
    ]
    assert steps == alone["seen"]
    for ours, theirs in zip(found[0]["logs"], alone["logs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found[0]["example"] == alone["example"] and found[0]["flos"] == alone["flos"]
    np.testing.assert_allclose(found[0]["predictions"], alone["predictions"], rtol=1e-4, atol=1e-5)
    assert np.array_equal(found[0]["labels"], alone["labels"]) and len(alone["labels"]) == 5


def run_pairs(rank, world_size, directory):
    """Groups of two, whose sums have one order, through gloo, where others share memory unless they
    say otherwise.
    """
    return {
        (tp, pp): run(rank, world_size, f"{directory}/{tp}{pp}", tp, pp, ddp_backend="gloo")
        for tp, pp in LAYOUTS
        if tp == 2
    }


def test_shared_memory_has_gloos_bits(ran, tmp_path):
    for rank, found in enumerate(run_ranks(run_pairs, 4, str(tmp_path))):
        for layout, one in found.items():
            assert set(one["backends"]) == {"gloo"} and set(ran[layout][rank]["backends"]) == {
                "merak_shm"
            }
            assert one["logs"] == ran[layout][rank]["logs"]
            assert torch.equal(one["weights"], ran[layout][rank]["weights"])


class WishOnRank(TrainerCallback):
    """Wishes something at an event of the second step, on one rank only."""

    def __init__(self, mine, event="on_step_end", wish="should_training_stop"):
        self.mine, self.event, self.wish = mine, event, wish

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hear(args, state, control, **kwargs):
            if self.mine and name == self.event and state.global_step == 2:
                setattr(control, self.wish, True)

        return hear


def differ(rank, world_size, directory):
    try:
        run(rank, world_size, directory, 1, 2, learning_rate=float(rank))
    except ConfigError as error:
        return str(error)


def fail_in_metrics(rank, world_size, directory):
    def metrics(prediction):
        raise ValueError("no such metric")

    args = MerakArguments(directory, use_cpu=True, tensor_model_parallel_size=2)
    trainer = EagerTrainer(tiny_llama(), args, collate, None, samples(3), compute_metrics=metrics)
    try:
        trainer.evaluate()
    except MerakError as error:
        return str(error)


def construct_beside_a_call(rank, directory):
    """A trainer that the first rank constructs alone, while the other is in a call of an earlier
    one.
    """
    args = MerakArguments(directory, use_cpu=True, tensor_model_parallel_size=2)
    trainer = EagerTrainer(tiny_llama(), args, collate, samples(4))
    try:
        if rank == 0:
            EagerTrainer(tiny_llama(), args, collate)
        else:
            trainer.train()
    except ConfigError as error:
        return str(error)


def differing_data(rank, world_size, directory):
    """Which of (tensor-parallel degree, this rank's samples) are refused."""
    refused = []
    rows = (
        samples(4, ragged=False),
        samples(4, ragged=False, seed=rank),
        samples(4 + rank, ragged=False),
    )
    for tp, data in ((2, rows[0]), (2, rows[1]), (1, rows[1]), (1, rows[2])):
        args = MerakArguments(
            directory, **{**RUN, "tensor_model_parallel_size": tp, "eval_strategy": "no"}
        )
        trainer = EagerTrainer(tiny_llama(), args, collate, data)
        try:
            refused.append(bool(trainer.engine.seen))
        except DataError as error:
            refused.append("(on rank 1): its length or its first batch" in str(error))
    return refused


def exchange(rank):
    value = (
        torch.arange(3),
        [None, 2.5, "text"],
        {"half": torch.ones(2, 1, dtype=torch.bfloat16)},
        torch.zeros(0, 4),
    )
    return from_rank(1, value if rank == 1 else None, torch.distributed.group.WORLD)


def in_one_job(rank, world_size, directory):
    steps = {"eval_strategy": "steps", "eval_steps": 1}
    wishes = [
        ("on_step_end", "should_training_stop"),
        ("on_log", "should_training_stop"),
        ("on_log", "should_save"),
    ]
    for event, wish in (
        *wishes,
        ("on_evaluate", "should_save"),
        ("on_evaluate", "should_training_stop"),
    ):
        name = f"{directory}/{event}-{wish}"
        callbacks = [WishOnRank(rank == 1, event, wish)]
        seen = run(rank, world_size, name, 1, 2, callbacks=callbacks, **steps)["seen"]
        assert len(seen) == (2 if wish == "should_training_stop" else 16), name
        assert [path.name for path in Path(name).glob("checkpoint-*")] == ["checkpoint-2"] * (
            wish == "should_save"
        )
    midway = [WishOnRank(rank == 1, "on_substep_end", "should_training_stop")]
    seen = run(
        rank,
        world_size,
        f"{directory}/midway",
        1,
        2,
        callbacks=midway,
        gradient_accumulation_steps=2,
    )["seen"]
    assert len(seen) == 3  # the gradient of the third step is discarded
    assert differing_data(rank, world_size, directory) == [False, True, False, True]
    alone = construct_beside_a_call(rank, directory)
    assert alone.startswith("rank 1 train: rank 0 is in the construction of a trainer")
    return (
        differ(rank, world_size, directory),
        fail_in_metrics(rank, world_size, directory),
        exchange(rank),
    )


def test_ranks_decide_fail_and_tell_together(tmp_path):
    first, second = run_ranks(in_one_job, 2, str(tmp_path))
    assert first[0] == second[0] and "learning_rate 1.0: rank 1 has it, rank 0 has 0.0" in first[0]
    assert first[1] == second[1] and "no such metric" in first[1]
    for found in (first[2], second[2]):
        assert (
            found[0].tolist() == [0, 1, 2]
            and found[1] == [None, 2.5, "text"]
            and isinstance(found, tuple)
        )
        assert found[2]["half"].dtype == torch.bfloat16 and found[2]["half"].shape == (2, 1)
        assert found[3].shape == (0, 4)

"""Streams that draw at random: every rank of a replica computes with the same samples, or is told
that it does not.
"""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches.order import Loading
from megatron_merak.hf_trainer.batches.same_batches import checksum
from tests.hf_trainer.stand_in import EagerTrainer, collate, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "disable_tqdm": True,
    "save_strategy": "no",
}
RUN |= {
    "report_to": "none",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "remove_unused_columns": False,
}


class Drawn(IterableDataset):
    """Samples from the global generators; on ``other`` ranks one sample is another one."""

    def __init__(self, count=64, other=False):
        self.count, self.other = count, other

    def __iter__(self):
        for number in range(self.count):
            tokens = torch.randint(1, 64, (6,)).tolist() + [
                random.randrange(1, 64),
                np.random.randint(1, 64),
            ]
            tokens[0] = 63 if self.other and number == 3 else tokens[0]
            yield {"input_ids": tokens, "labels": tokens}


class Draws(TrainerCallback):
    """Draws alone, as a callback that samples from the model does."""

    def __init__(self, rank):
        self.rank = rank

    def on_step_end(self, args, state, control, **kwargs):
        torch.rand(self.rank), random.random() if self.rank else None


def train(kind, arguments, directory, rank=0, stream=None, seen=None, **degrees):
    def collated(rows):
        seen.append([row["input_ids"] for row in rows])
        return collate(rows)

    def metrics(prediction):
        return {"drawn": float(torch.rand(()))}  # runs on one rank only

    args = arguments(directory, **RUN, **degrees)
    trainer = kind(
        tiny_llama(), args, collate if seen is None else collated, stream or Drawn(), Drawn(5),
        compute_metrics=metrics, callbacks=[Draws(rank)],
    )  # fmt: skip
    trainer.train()
    return trainer


def on_two_ranks(rank, world_size, directory):
    seen = []
    for degrees in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}):
        trainer = train(EagerTrainer, MerakArguments, directory, rank, **degrees)
        seen.append((trainer.engine.seen, trainer.state.log_history[-1]["train_loss"]))
    refused = []
    for stream in (Drawn(other=rank == 1), Drawn(6 - 2 * rank)):
        try:
            train(
                EagerTrainer, MerakArguments, directory, rank, stream, tensor_model_parallel_size=2
            )
        except DataError as error:
            refused.append(str(error))
    return seen, refused


@pytest.mark.timeout(200)
def test_ranks_of_a_replica_take_the_same_samples(tmp_path):
    (first, told), (second, heard) = run_ranks(on_two_ranks, 2, str(tmp_path), timeout=150)
    assert first[:2] == second[:2] and first[0] == first[1] and len(first[0][0]) == 4
    assert first[2][1] == second[2][1] and first[2][0] != second[2][0]
    both = [
        micro
        for pair in zip(first[2][0], second[2][0], strict=True)
        for step in pair
        for micro in step
    ]
    # replicas share the same stream
    assert both[:4] == [micro for step in first[0][0] for micro in step]
    assert [len(told), len(heard)] == [2, 2] and all(
        "different samples" in found[0] for found in (told, heard)
    )
    assert all("ends earlier on some ranks" in found[1] for found in (told, heard))


def test_a_stream_draws_what_it_draws_under_transformers(tmp_path):
    ours, theirs = [], []
    train(EagerTrainer, MerakArguments, str(tmp_path), seen=ours)
    train(Trainer, TrainingArguments, str(tmp_path), seen=theirs)
    assert ours[1] == theirs[0]  # ours begins with the example that the model is captured with
    assert [batch for batch in ours if batch == ours[1]] == [ours[0], ours[1]]


@pytest.mark.parametrize("workers", (0, 1))
def test_a_stream_has_generators_of_its_own(workers):
    def taken(seed, epoch=0):
        torch.manual_seed(seed)
        loading = Loading(Drawn(6), collate, 2, 0, 1, 5, options={"num_workers": workers})
        found = []
        for batch in loading.epoch(epoch):
            found.append(batch["input_ids"].tolist())
            torch.rand(seed), random.random()
        return found

    assert taken(1) == taken(2) != taken(1, epoch=1)


def test_checksums_tell_batches_apart():
    ids = torch.arange(6).view(2, 3)
    batches = (
        {"x": ids},
        {"x": ids.flip(0)},
        {"x": ids.int()},
        {"x": ids.view(3, 2)},
        {"y": ids},
        {"x": ids, "z": 1},
    )
    codes = [checksum([batch]) for batch in batches] + [checksum([batches[0]] * 2)]
    assert len({*codes}) == 7 and checksum([{"x": ids.clone()}]) == codes[0]

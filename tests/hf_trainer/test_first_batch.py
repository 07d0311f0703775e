"""The batch that a model is captured with: datasets and collators are used as often as under
transformers.Trainer.
"""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches.apart import apart
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 6,
    "disable_tqdm": True,
    "report_to": "none",
    "logging_steps": 1,
}
RUN |= {
    "remove_unused_columns": False,
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "per_device_eval_batch_size": 4,
}
TWO = ({"pipeline_model_parallel_size": 2}, {})
OURS, THEIRS = (EagerTrainer, MerakArguments), (Trainer, TrainingArguments)


class Counted(IterableDataset):
    """Its samples depend on how often it was iterated over or, with ``once``, on what was taken
    before.
    """

    def __init__(self, once=False):
        self.begun, self.epochs, self.left = (
            0,
            [],
            iter(samples(40, ragged=False)) if once else None,
        )

    def __iter__(self):
        self.begun += 1
        return self._rows(self.begun) if self.left is None else self.left

    def _rows(self, begun):
        rows = samples(8, ragged=False)
        for place in torch.randperm(8, generator=torch.Generator().manual_seed(begun)):
            yield rows[place]

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Noisy(Dataset):
    """Draws from a generator of its own."""

    def __init__(self):
        self.draw, self.rows = torch.Generator().manual_seed(3), samples(16, ragged=False)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        noise = torch.randint(1, 64, (), generator=self.draw).item()
        return {name: [*row[:-1], noise] for name, row in self.rows[index].items()}


class Masked:
    """A collator with a generator of its own, made at the first call, as of
    DataCollatorForLanguageModeling.
    """

    draw = None

    def __call__(self, rows):
        self.draw = torch.Generator().manual_seed(3) if self.draw is None else self.draw
        batch = collate(rows)
        chosen = torch.rand(batch["labels"].shape, generator=self.draw) < 0.3
        return batch | {"labels": batch["labels"].masked_fill(chosen, -100)}


def trained(kinds, directory, dataset, collator=collate, replicas=1, resume=None, **more):
    """The losses of a run."""
    trainer, arguments = kinds
    args = arguments(directory, per_device_train_batch_size=4 // replicas, **RUN | more)
    trainer = trainer(tiny_llama(), args, collator, dataset)
    trainer.train(resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def evaluated(kinds, directory, dataset, times):
    trainer = kinds[0](tiny_llama(), kinds[1](directory, **RUN), collate, None, dataset)
    return [trainer.evaluate()["eval_loss"] for _ in range(times)]


@pytest.mark.parametrize("once", (False, True))
def test_a_stream_is_iterated_over_as_often_as_under_transformers(tmp_path, once):
    ours, theirs = Counted(once), Counted(once)
    losses = trained(OURS, str(tmp_path), ours)
    assert (
        losses == pytest.approx(trained(THEIRS, str(tmp_path), theirs), rel=1e-5)
        and len(losses) == 6
    )
    assert ours.begun == theirs.begun == (1 if once else 3)
    ours, theirs = Counted(once), Counted(once)
    losses = evaluated(OURS, str(tmp_path), ours, 1 if once else 2)
    assert losses == pytest.approx(
        evaluated(THEIRS, str(tmp_path), theirs, 1 if once else 2), rel=1e-5
    )
    assert ours.begun == theirs.begun == len(losses)


@pytest.mark.parametrize(
    "dataset, collator", [(Noisy, collate), (Counted, Masked()), (Noisy, Masked())]
)
def test_what_draws_from_its_own_generator_draws_as_under_transformers(tmp_path, dataset, collator):
    ours = trained(OURS, str(tmp_path), dataset(), apart(collator))
    assert ours == pytest.approx(
        trained(THEIRS, str(tmp_path), dataset(), apart(collator)), rel=1e-5
    )


def on_two_ranks(rank, world_size, directory):
    found = []
    for degrees in TWO:
        for once in (False, True):
            stream = Counted(once)
            found.append(
                (
                    trained(OURS, directory, stream, replicas=1 if degrees else 2, **degrees),
                    stream.begun,
                )
            )
    try:
        trained(OURS, directory, Spent() if rank else Counted(), replicas=2)
    except DataError as error:
        found.append(str(error))
    return found


class Spent(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.timeout(120)
@pytest.mark.long
def test_streams_on_two_ranks(tmp_path):
    wanted = [
        (trained(THEIRS, str(tmp_path), Counted(once)), 1 if once else 3) for once in (False, True)
    ] * len(TWO)
    for *found, refused in run_ranks(on_two_ranks, 2, str(tmp_path / "ours"), timeout=100):
        assert [begun for _, begun in found] == [begun for _, begun in wanted]
        for (ours, _), (theirs, _) in zip(found, wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        assert "ends before its first batch" in refused


@pytest.mark.parametrize("step, epochs", ((1, [0, 1, 2]), (3, [1, 2])))
def test_a_resumed_stream_begins_with_the_epoch_it_goes_on_with(tmp_path, step, epochs):
    stream = Counted()
    trained(OURS, str(tmp_path), stream, save_strategy="steps", save_steps=1, max_steps=6)
    assert stream.epochs == [0, 1, 2] and stream.begun == 3
    stream = Counted()
    trained(
        OURS,
        str(tmp_path),
        stream,
        save_strategy="steps",
        resume=str(tmp_path / f"checkpoint-{step}"),
    )
    assert stream.epochs == epochs and stream.begun == len(epochs)


def test_workers_are_started_once(tmp_path):
    losses = trained(OURS, str(tmp_path), Counted(), dataloader_num_workers=1)
    assert losses[:2] == pytest.approx(
        trained(THEIRS, str(tmp_path), Counted(), dataloader_num_workers=1)[:2], rel=1e-5
    )


def test_copies_of_datasets_and_collators():
    class Closes(Noisy):
        def __del__(self):
            pass

    class Wrapper(Dataset):
        def __init__(self):
            self.inner, self.collate, self.model = Noisy(), Masked().__call__, torch.nn.Linear(1, 1)

    wrapper, closes = Wrapper(), Closes()
    copied = apart(wrapper)
    assert copied.inner is not wrapper.inner and copied.inner.draw is not wrapper.inner.draw
    assert copied.model is wrapper.model and copied.inner.rows is not wrapper.inner.rows
    assert copied.collate.__self__ is not wrapper.collate.__self__
    assert apart(closes) is closes and apart(collate) is collate

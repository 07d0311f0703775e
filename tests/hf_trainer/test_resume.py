"""Checkpoints of MerakTrainer: a resumed run is the uninterrupted one, to the bit, and what is
wrong is told.
"""

import json

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from tests.hf_trainer.reference import untimed
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama

RUN = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "logging_steps": 2,
    "save_steps": 3,
    "use_cpu": True,
    "disable_tqdm": True,
}


def masked(rows):
    """Replaces tokens at random: what it draws must be the same after resuming."""
    batch = collate(rows)
    return batch | {
        "input_ids": torch.where(torch.rand(batch["input_ids"].shape) < 0.2, 7, batch["input_ids"])
    }


class Stop(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(10))


def trainer(directory, callbacks=None, data=None, kind=EagerTrainer, **changes):
    args = MerakArguments(str(directory), **{**RUN, **changes})
    dataset = samples(22) if data is None else data
    return kind(tiny_llama(), args, masked, dataset, samples(5, seed=5), callbacks=callbacks)


def curve(found):
    return [untimed(entry) for entry in found.state.log_history if "train_loss" not in entry]


def equal_weights(one, other):
    pairs = zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True)
    return [name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)] == []


@pytest.mark.parametrize(
    ("changes", "stop"),
    [
        ({}, 3),  # in the middle of an epoch, behind an odd number of logged steps
        ({}, 9),  # in the second epoch
        ({"save_strategy": "epoch"}, 8),
        # saved at the end of an epoch that was not walked to its end
        ({"save_strategy": "epoch"}, 6),
        ({"data_seed": 5, "train_sampling_strategy": "group_by_length"}, 6),
        (
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "eval_strategy": "steps",
                "eval_steps": 1,
            },
            6,
        ),
        ({"max_steps": 11, "data": Stream()}, 6),  # a stream that begins again
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, changes, stop):
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    trainer(tmp_path / "cut", [Stop(stop)], **changes).train()
    resumed = trainer(tmp_path / "cut", **changes)
    output = resumed.train(resume_from_checkpoint=True)
    assert curve(resumed) == curve(whole)
    assert equal_weights(resumed, whole)
    assert output.global_step == whole.state.global_step > stop
    assert resumed.engine.seen == whole.engine.seen[-len(resumed.engine.seen) :]


def test_a_named_checkpoint_is_taken_and_a_finished_run_stays_as_it_is(tmp_path):
    whole = trainer(tmp_path)
    whole.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in (12, 3, 6, 9)
    ]
    again = trainer(tmp_path)
    again.train(str(tmp_path / "checkpoint-6"))
    assert curve(again) == curve(whole) and equal_weights(again, whole)
    finished = trainer(tmp_path)
    assert finished.train(resume_from_checkpoint=True).global_step == 12
    assert finished.engine.seen == [] and equal_weights(finished, whole)


def test_an_unfinished_checkpoint_is_passed_over_and_named(tmp_path, caplog):
    trainer(tmp_path, [Stop(6)]).train()
    (tmp_path / "checkpoint-6" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-6: it has no manifest\.json"):
        trainer(tmp_path).train(str(tmp_path / "checkpoint-6"))
    resumed = trainer(tmp_path, [Stop(5)])
    resumed.train(resume_from_checkpoint=True)
    assert (
        len(resumed.engine.seen) == 5 - 3 and "checkpoint-6: it has no manifest.json" in caplog.text
    )
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint.*checkpoint-6.*checkpoint-3"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_what_cannot_be_resumed_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        trainer(tmp_path).train("nowhere")
    trainer(tmp_path, [Stop(3)]).train()
    with pytest.raises(CheckpointError, match="seed"):
        trainer(tmp_path, seed=1).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="18 samples"):
        trainer(tmp_path, per_device_train_batch_size=4).train(resume_from_checkpoint=True)
    trainer(tmp_path / "model", [Stop(3)], save_only_model=True).train()
    with pytest.raises(CheckpointError, match="no training state"):
        trainer(tmp_path / "model").train(resume_from_checkpoint=True)


def test_another_division_of_the_same_global_batch_goes_on(tmp_path):
    whole = trainer(
        tmp_path / "whole", per_device_train_batch_size=6, gradient_accumulation_steps=1
    )
    whole.train()
    trainer(tmp_path / "cut", [Stop(3)]).train()
    resumed = trainer(
        tmp_path / "cut", per_device_train_batch_size=6, gradient_accumulation_steps=1
    )
    resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.seen == whole.engine.seen[3:]


def test_an_epoch_in_the_order_of_lengths_goes_on_with_other_steps(tmp_path):
    changes = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 2, "save_steps": 1}
    numbers = []
    # twice, since the second checkpoint has steps other than those of the epoch's order
    for stop, accumulated in ((1, 1), (2, 3), (5, 2)):
        run = trainer(tmp_path, [Stop(stop)], gradient_accumulation_steps=accumulated, **changes)
        run.data_collator = collate
        run.train(resume_from_checkpoint=stop > 1)
        numbers += [number for step in run.engine.seen for batch in step for number in batch]
    assert run.state.epoch > 1
    assert sorted(numbers[:22]) == [*range(1, 23)]
    assert len(numbers[22:]) == len({*numbers[22:]}) > 0


def _divided(tmp_path, parts, **changes):
    """Train in parts, (steps after which it stops, micro-batches of a step); return the last trainer
    and the samples of all steps.
    """
    numbers = []
    for place, (stop, accumulated) in enumerate(parts):
        given = {"save_steps": 1, "gradient_accumulation_steps": accumulated, **changes}
        run = trainer(tmp_path, [Stop(stop)], **given)
        run.data_collator = collate
        run.train(resume_from_checkpoint=place > 0)
        numbers += [number for step in run.engine.seen for batch in step for number in batch]
    return run, numbers


@pytest.mark.parametrize(
    ("parts", "steps"),
    [
        ([(1, 2), (99, 1)], 1 + 6 + 2 * 8),  # smaller steps: there are more
        ([(4, 1), (99, 4)], 4 + 1 + 2 * 2),  # larger ones: fewer
        ([(2, 1), (3, 2), (4, 2), (99, 4)], 4 + 1 + 2 * 2),  # twice, and once with the same between
        ([(8, 1), (99, 2)], 8 + 2 * 4),  # behind an epoch
    ],
)
def test_the_epochs_of_a_run_end_where_they_end_whatever_its_steps_are(tmp_path, parts, steps):
    run, numbers = _divided(tmp_path, parts)
    assert run.state.global_step == run.state.max_steps == steps
    epochs = [numbers[22 * epoch : 22 * epoch + 22] for epoch in range(3)]
    assert [sorted(each) for each in epochs] == [[*range(1, 23)]] * 3 and len(numbers) == 66
    rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert 0 <= rates[-1] < 0.2 * max(rates)  # the cosine ends with the run
    assert run.state.epoch == 3.0


@pytest.mark.parametrize("data", [None, Stream()])
def test_a_number_of_steps_is_made_whatever_they_are(tmp_path, data):
    samples_seen = 10 if data else 22
    run, numbers = _divided(tmp_path, [(3, 3), (9, 1)], max_steps=9, data=data)
    assert run.state.global_step == run.state.max_steps == 9
    assert sorted(numbers[:samples_seen]) == [*range(1, samples_seen + 1)]


def test_the_state_file_is_that_of_transformers(tmp_path):
    early = EarlyStoppingCallback(early_stopping_patience=9)
    changes = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
    run = trainer(tmp_path, [early, Stop(6)], **changes)
    run.train()
    state = TrainerState.load_from_json(tmp_path / "checkpoint-6" / "trainer_state.json")
    assert state.global_step == 6 and state.best_global_step in (3, 6)
    assert state.log_history == run.state.log_history[: len(state.log_history)]
    saved = state.stateful_callbacks["EarlyStoppingCallback"]
    assert saved["args"]["early_stopping_patience"] == 9
    resumed = trainer(
        tmp_path,
        [EarlyStoppingCallback(1), Stop(7)],
        restore_callback_states_from_checkpoint=True,
        **changes,
    )
    resumed.train(str(tmp_path / "checkpoint-6"))
    (restored,) = (
        c for c in resumed.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)
    )
    assert restored.early_stopping_patience == 9
    assert (
        restored.early_stopping_patience_counter
        == saved["attributes"]["early_stopping_patience_counter"]
    )


def test_only_the_model_is_saved_when_asked(tmp_path):
    trainer(tmp_path, [Stop(3)], save_only_model=True).train()
    names = {path.name for path in (tmp_path / "checkpoint-3").iterdir()}
    assert {"config.json", "model.safetensors", "trainer_state.json", "training_args.json"} <= names
    assert "training_state" not in names
    assert (
        json.loads((tmp_path / "checkpoint-3" / "training_args.json").read_text())["learning_rate"]
        == 1e-2
    )


def test_ignoring_the_skip_begins_the_epoch_again(tmp_path):
    first = trainer(tmp_path, [Stop(3)])
    first.train()
    resumed = trainer(tmp_path, [Stop(5)], ignore_data_skip=True)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.engine.seen == first.engine.seen[:2]


def test_a_metric_that_is_not_there_is_told(tmp_path):
    named = {"metric_for_best_model": "bleu", "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(ConfigError, match="eval_bleu"):
        trainer(tmp_path, **named).train()

"""A run that resumes: what its checkpoint says is checked field by field, and what has changed is
refused or said.
"""

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import CallbackHandler

from megatron_merak.errors import CheckpointError, ConfigError, MerakError, NumericsError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.batches import fingerprint
from megatron_merak.hf_trainer.run import callbacks, trainer_state
from megatron_merak.hf_trainer.run.progress import RunPosition
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import EagerTrainer, collate, samples, tiny_llama
from tests.hf_trainer.test_resume import RUN, Stop, masked, trainer

ODD = (
    None,
    True,
    -1,
    1.5,
    math.nan,
    math.inf,
    10**400,
    "1",
    "",
    [],
    [1],
    {},
    {"a": 1},
    [[]],
    [None],
)


def nested(levels: int) -> list:
    return [] if levels == 0 else [nested(levels - 1)]


# What the files say


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint at step 3."""
    directory = tmp_path_factory.mktemp("run")
    trainer(directory, [Stop(3)]).train()
    return directory / "checkpoint-3"


def test_a_trainers_state_of_odd_types_is_refused_by_field(saved):
    """What is accepted can be resumed from: transformers' own arithmetic and callbacks take it."""
    good = json.loads((saved / "trainer_state.json").read_text())
    assert trainer_state.parse(json.dumps(good)) == TrainerState.load_from_json(
        str(saved / "trainer_state.json")
    )
    refused = 0
    assert (
        {field.name for field in dataclasses.fields(TrainerState)}
        == set(good)
        == set(trainer_state.CHECKS)
    )
    for name in good:
        for odd in ODD:
            try:
                state = trainer_state.parse(json.dumps({**good, name: odd}))
            except ValueError as error:
                assert name in str(error)
                refused += 1
            else:
                assert state.global_step + 1 > 0 and state.total_flos + 1.0 > 0
                assert all(isinstance(entry, dict) for entry in state.log_history)
    assert refused > 150
    for text in (
        "",
        "[]",
        "3",
        "null",
        "{",
        '{"global_step": 1, "new": 2}',
        json.dumps(nested(500)),
        "[" * 100_000,
    ):
        with pytest.raises((ValueError, RecursionError)):
            trainer_state.parse(text)


@pytest.mark.parametrize(
    "text", ['{"log_history": 3}', "[" * 100_000, "\0", '{"global_step": "3"}']
)
def test_a_trainers_state_that_cannot_be_read_is_a_typed_error(tmp_path, text):
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError, match="trainer state"):
        trainer_state.read(tmp_path, None)


def places_in(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places_in(value[key], (*path, key))


def test_progress_of_odd_types_is_refused_and_never_raises_anything_else(saved):
    good = json.loads((saved / "training_state" / "extra.json").read_text())["extra"]
    assert RunPosition.of_json(good, saved, good["rate"]).to_json() == good
    refused = 0
    for path in places_in(good):
        if path[:2] == ("model", "config") and len(path) > 2:
            continue  # of any JSON
        for odd in ODD:
            bad = copy.deepcopy(good)
            if path:
                parent = bad
                for key in path[:-1]:
                    parent = parent[key]
                parent[path[-1]] = odd
            try:
                progress = RunPosition.of_json(bad if path else odd, saved, good["rate"])
            except CheckpointError:
                refused += 1
            else:
                run = trainer(saved.parent, [Stop(3)])
                rate = run.learning_rate(12)
                rate.load(progress.rate)
                rate.advance()
                assert isinstance(rate.logged, float) and progress.position[1] // 3 >= 0
    assert refused > 200


@pytest.mark.parametrize("name", ["TrainerControl", "EarlyStoppingCallback"])
@pytest.mark.parametrize("args", [{"new": 1}, {"should_save": 3, "early_stopping_patience": "x"}])
def test_a_callbacks_state_that_does_not_fit_is_a_typed_error(name, args):
    state = TrainerState(stateful_callbacks={name: {"args": args, "attributes": {}}})
    handler = CallbackHandler([EarlyStoppingCallback()], None, None, None, None)
    with pytest.raises(CheckpointError, match=name):
        callbacks.restore(state, handler, TrainerControl())


def test_numbers_that_json_does_not_have_come_back():
    values = {
        "scheduler": {"best": math.inf, "low": -math.inf, "list": [math.nan, 1]},
        "rates": [0.1, 0.0, 0.1, 0.0],
    }
    data = {"length": 3, "samples": None}
    progress = RunPosition(
        values, math.nan, 2, [1, None], [0, 3], 6, data, {"class": "M", "config": None}
    )
    text = json.dumps(progress.to_json(), allow_nan=False)
    back = RunPosition.of_json(json.loads(text), Path("x"), values)
    assert math.isnan(back.pending_loss) and math.isnan(back.rate["scheduler"]["list"][0])
    assert back.rate["scheduler"]["best"] == -back.rate["scheduler"]["low"] == math.inf


def test_a_schedule_of_another_kind_is_refused(saved):
    run = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 3}
    with pytest.raises(CheckpointError, match="lr_scheduler_type"):
        trainer(saved.parent, **run).train(str(saved))


# What has changed


def with_config(directory, **changes):
    model = tiny_llama()
    for name, value in changes.items():
        setattr(model.config, name, value)
    args = MerakArguments(str(directory), **RUN)
    return EagerTrainer(
        type(model)(model.config),
        args,
        masked,
        samples(22),
        samples(5, seed=5),
        callbacks=[Stop(4)],
    )


@pytest.mark.parametrize(
    ("name", "value"), [("rms_norm_eps", 1e-3), ("tie_word_embeddings", True), ("pad_token_id", 5)]
)
def test_another_model_of_the_same_shapes_is_refused_by_name(saved, name, value):
    with pytest.raises(
        CheckpointError, match=rf"config\.{name} {value}: the checkpoint's model has"
    ):
        with_config(saved.parent, **{name: value}).train(str(saved))


def test_another_model_is_refused_before_it_is_captured(tmp_path, monkeypatch):
    def trainer(**changes):
        args = MerakArguments(str(tmp_path), **{**RUN, "max_steps": 1, "save_steps": 1})
        model = tiny_llama()
        changed = type(model)(type(model.config)(**{**model.config.to_dict(), **changes}))
        return MerakTrainer(changed, args, masked, samples(4))

    trainer().train()
    monkeypatch.setattr(MerakTrainer, "_build", lambda *_: pytest.fail("it was captured"))
    with pytest.raises(CheckpointError, match=r"config\.rms_norm_eps 0\.001: the checkpoint's mod"):
        trainer(rms_norm_eps=1e-3).train(resume_from_checkpoint=True)


def test_another_number_of_heads_is_refused_by_name(saved):
    """The projections have the same shapes."""
    with pytest.raises(CheckpointError, match=r"config\.(head_dim|num_attention_heads)"):
        with_config(saved.parent, num_attention_heads=4, num_key_value_heads=4, head_dim=4).train(
            str(saved)
        )


def test_what_a_run_may_change_is_said_once(saved, caplog, tmp_path):
    run = trainer(
        saved.parent,
        [Stop(4)],
        learning_rate=5e-3,
        adam_beta2=0.9,
        lr_scheduler_type="linear",
        use_precision_aware_optimizer=True,
        exp_avg_dtype="bf16",
    )
    run.model.config.attention_dropout = 0.1
    run.args.output_dir = str(tmp_path)
    run.train(str(saved))
    (told,) = (
        record.getMessage() for record in caplog.records if record.name.endswith("resumption")
    )
    for name in (
        "learning_rate: 0.005 (from args) != 0.01 (of the checkpoint, used)",
        "lr_scheduler_type: linear",
        "adam_beta2: 0.9 (from args, used) != 0.999 (of the checkpoint)",
        "exp_avg_dtype: bf16 (from args, used) != fp32 (of the checkpoint)",
        "config.attention_dropout: 0.1 != 0.0",
    ):
        assert name in told
    caplog.clear()
    same = trainer(saved.parent, [Stop(4)])
    same.args.output_dir = str(tmp_path)
    same.train(str(saved))
    assert not [record for record in caplog.records if record.name.endswith("resumption")]


def test_another_dataset_is_refused_unless_the_skip_is_ignored(saved, tmp_path, caplog):
    def resume(data, **changes):
        run = trainer(saved.parent, [Stop(4)], data, **changes)
        run.args.output_dir = str(tmp_path)
        return run.train(str(saved))

    with pytest.raises(CheckpointError, match="22 samples, and there are 24 now"):
        resume(samples(24))
    with pytest.raises(CheckpointError, match="samples are not those"):
        resume(samples(22, seed=7))
    with pytest.raises(CheckpointError, match="samples are not those"):
        resume(samples(22)[::-1])
    assert resume(samples(24), ignore_data_skip=True).global_step == 4
    assert "22 samples, and there are 24 now" in caplog.text


class Drawn(Dataset):
    """Augmented: seeded draws from the global generators, or draws of its own."""

    def __init__(self, own: bool):
        self.own = np.random.default_rng(0) if own else None

    def __len__(self):
        return 3

    def __getitem__(self, place):
        return {
            "x": torch.rand(2) if self.own is None else self.own.random(2),
            "place": place,
            "object": object(),
        }


def test_a_fingerprint_is_of_values_and_leaves_the_generators_alone():
    rows = [
        {"a": torch.tensor([1.0, n]), "b": np.arange(n), "c": "text", "d": [n, None, 1.5]}
        for n in range(100)
    ]
    first = fingerprint.fingerprint(rows)
    assert first == fingerprint.fingerprint(copy.deepcopy(rows)) and first["length"] == 100
    for key, value in (
        ("a", torch.tensor([1.0, 0.5])),
        ("b", np.ones(1)),
        ("c", "texT"),
        ("d", [0, None, 1.25]),
    ):
        assert fingerprint.difference(
            first, fingerprint.fingerprint([{**rows[0], key: value}, *rows[1:]])
        ), key
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    drawn = fingerprint.fingerprint(Drawn(own=False))
    assert (
        torch.equal(torch.rand(1), expected)
        and drawn["samples"] == fingerprint.fingerprint(Drawn(False))["samples"]
    )
    assert fingerprint.fingerprint(Drawn(own=True)) == {"length": 3, "samples": None}
    assert fingerprint.difference(fingerprint.fingerprint(Drawn(True)), drawn) is None


# Beside transformers


def test_operations_are_counted_over_a_resumption_as_transformers_counts_them(tmp_path):
    def totals(kind, arguments, directory):
        def run(stop, resume):
            args = arguments(
                str(directory), use_cpu=True, report_to="none", disable_tqdm=True, **named
            )
            made = kind(tiny_llama(), args, collate, samples(22), callbacks=[Stop(stop)])
            made.train(resume_from_checkpoint=resume)
            state = json.loads(
                (directory / f"checkpoint-{3 * (made.state.global_step // 3)}" / name).read_text()
            )
            return made.state.total_flos, state["total_flos"]

        named = {
            "per_device_train_batch_size": 4,
            "save_steps": 3,
            "logging_steps": 2,
            "max_steps": 8,
        }
        name = "trainer_state.json"
        return run(5, None), run(8, True)

    def unbucketed(*values, **named):
        return MerakArguments(*values, length_buckets="none", **named)

    theirs = totals(Trainer, TrainingArguments, tmp_path / "theirs")
    assert totals(EagerTrainer, unbucketed, tmp_path / "ours") == theirs
    assert theirs[0][1] < theirs[0][0] < theirs[1][0]


def test_another_rate_and_decay_change_a_resumed_run_as_they_change_transformers(tmp_path):
    def resumed(kind, arguments, directory):
        def run(stop, resume, **changes):
            args = arguments(
                str(directory),
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                **{**named, **changes},
            )
            made = kind(tiny_llama(), args, collate, samples(22), callbacks=[Stop(stop)])
            made.train(resume_from_checkpoint=resume)
            return [(e["loss"], e["learning_rate"]) for e in made.state.log_history if "loss" in e]

        named = {
            "per_device_train_batch_size": 4,
            "save_steps": 3,
            "logging_steps": 1,
            "max_steps": 8,
        }
        named |= {"learning_rate": 1e-2, "weight_decay": 0.5}
        run(3, None)
        return run(8, True, learning_rate=3e-2, weight_decay=0.0, lr_scheduler_type="cosine")

    def unbucketed(*values, **named):
        return MerakArguments(*values, length_buckets="none", **named)

    theirs = resumed(Trainer, TrainingArguments, tmp_path / "theirs")
    ours = resumed(EagerTrainer, unbucketed, tmp_path / "ours")
    assert len(ours) == len(theirs) == 8
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=1e-5)


# The engine


def test_the_engine_saves_a_schedule_that_has_infinities_and_names_what_is_not_finite(tmp_path):
    def run(steps, model, **changes):
        named = {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "save_steps": 2,
            "eval_strategy": "steps",
            **changes,
        }
        named |= {
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "max_steps": steps,
            "eval_steps": 4,
        }
        return MerakTrainer(
            model,
            MerakArguments(str(tmp_path), **named),
            collate,
            samples(8, False),
            samples(3, False),
        )

    run(3, tiny_llama()).train()  # saved before anything was measured: the best is infinite
    refused = tiny_llama()
    refused.model.norm.weight.data.mul_(2)
    before = {name: tensor.clone() for name, tensor in refused.state_dict().items()}
    with pytest.raises(CheckpointError, match="seed, data_seed"):
        run(6, refused, seed=7).train(resume_from_checkpoint=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in refused.state_dict().items())
    assert run(6, tiny_llama()).train(resume_from_checkpoint=True).global_step == 6
    broken = tiny_llama()
    broken.model.norm.weight.data[3] = math.inf
    with pytest.raises(
        NumericsError, match=r"steps 3: .*backward pass model\.norm\.weight, lm_head"
    ):
        run(9, broken, max_consecutive_skipped_steps=3, save_steps=100).train()
    with pytest.raises(NumericsError, match=r"model/model\.norm\.weight"):
        run(9, broken, save_steps=1).train()
    assert not (tmp_path / "checkpoint-1").exists()


def test_wrong_numbers_are_typed_errors(tmp_path):
    for value in (0, -3, None, "x", 1.5):
        with pytest.raises(ConfigError, match="max_consecutive_skipped_steps"):
            trainer(tmp_path, max_consecutive_skipped_steps=value)
    with pytest.raises(MerakError):
        trainer(tmp_path).train(resume_from_checkpoint="a\0b")

"""Callbacks that freeze and thaw parameters while a model trains: as under transformers.Trainer, on
every layout.
"""

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "adam_epsilon": 1e-4,
    "logging_steps": 1,
    "save_steps": 3,
    "disable_tqdm": True,
    "report_to": "none",
}
ROWS = samples(24, ragged=False)  # captures take most of the time: of one length here


class Gradual(TrainerCallback):
    """Frozen but for the head at first; then a layer more every other step, from the top."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.model.requires_grad_(False)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        for layer in model.model.layers[len(model.model.layers) - state.global_step // 2 :]:
            layer.requires_grad_(True)


class Lisa(TrainerCallback):
    """One layer at random trains, another one every other step; embeddings and head always."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        layers = model.model.layers
        chosen = int(np.random.default_rng(state.global_step // 2).integers(len(layers)))
        for place, layer in enumerate(layers):
            layer.requires_grad_(place == chosen)


class Halfway(TrainerCallback):
    """The embeddings are frozen after half of the steps."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step >= 3:
            model.get_input_embeddings().requires_grad_(False)

    on_train_begin = on_step_end


CALLBACKS = {each.__name__: each for each in (Gradual, Lisa, Halfway)}


def play(kind, arguments, directory, callback, resume=None, **more):
    made = arguments(str(directory), **RUN | more)
    trainer = kind(tiny_llama(0), made, collate, ROWS, ROWS[:4], callbacks=[CALLBACKS[callback]()])
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    return trainer, [
        entry[key]
        for entry in history
        for key in ("loss", "grad_norm", "eval_loss")
        if key in entry
    ]


def wanted(directory, callback, **more):
    trainer, found = play(Trainer, TrainingArguments, directory, callback, **more)
    return found, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def ours(rank, world_size, directory, callback, more, resumes=False):
    trainer, found = play(MerakTrainer, MerakArguments, directory, callback, **more)
    if resumes:
        trainer, found = play(
            MerakTrainer, MerakArguments, directory, callback, f"{directory}/checkpoint-3", **more
        )
    trainer.gather_model()
    weights = dict(trainer.model.named_parameters()) if rank == 0 else {}
    return found, {name: p.detach().clone() for name, p in weights.items()}


def check(found, expected):
    (losses, weights), (their_losses, their_weights) = found, expected
    assert losses == pytest.approx(their_losses, rel=2e-5)
    begun = dict(tiny_llama(0).named_parameters())
    for name, value in their_weights.items():
        moved = (value - begun[name]).double().norm()
        assert moved > 0 or torch.equal(weights[name], value), name
        assert (weights[name] - value).double().norm() <= 1e-3 * moved, name


@pytest.mark.parametrize(
    "callback, optim",
    [
        ("Gradual", "adamw_torch"),
        pytest.param("Lisa", "adamw_torch", marks=pytest.mark.long),
        pytest.param("Lisa", "adafactor", marks=pytest.mark.long),
        ("Halfway", "sgd"),
    ],
)
def test_parameters_are_frozen_and_thawed(callback, optim, tmp_path):
    more = {"optim": optim, "eval_strategy": "steps", "eval_steps": 2}
    expected = wanted(tmp_path / "theirs", callback, **more)
    check(ours(0, 1, str(tmp_path / "ours"), callback, more, resumes=True), expected)


LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "dp": {"gradient_accumulation_steps": 1},
    "zero": {"gradient_accumulation_steps": 1, "data_parallel_sharding_strategy": "optim"},
    "full": {
        "gradient_accumulation_steps": 1,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
}


@pytest.mark.long
@pytest.mark.long
def test_lengths_that_are_captured_while_some_are_frozen(tmp_path, monkeypatch):
    """Captures compute the gradients of all parameters: those that are frozen then are thawed
    later.
    """
    monkeypatch.setitem(globals(), "ROWS", samples(24))
    expected = wanted(tmp_path / "theirs", "Gradual")
    check(ours(0, 1, str(tmp_path / "ours"), "Gradual", {}), expected)


@pytest.mark.long
@pytest.mark.parametrize("callback, layout", [("Lisa", "tp"), ("Gradual", "pp"), ("Lisa", "zero")])
def test_they_are_on_several_ranks(callback, layout, tmp_path):
    expected = wanted(tmp_path / "theirs", callback)
    found = run_ranks(ours, 2, str(tmp_path / "ours"), callback, LAYOUTS[layout], True)
    check(found[0], expected)
    assert found[1][0] == found[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("callback", CALLBACKS)
def test_they_are_on_every_layout(callback, layout, optim, tmp_path):
    expected = wanted(tmp_path / "theirs", callback, optim=optim)
    found = run_ranks(
        ours, 2, str(tmp_path / "ours"), callback, LAYOUTS[layout] | {"optim": optim}, True
    )
    check(found[0], expected)


class At(TrainerCallback):
    def __init__(self, event, change):
        setattr(self, event, lambda args, state, control, model=None, **kwargs: change(model))


def refused(directory, event, change, prepare=lambda model: None):
    model = tiny_llama(0)
    prepare(model)
    callback = At(event, change)
    made = MerakArguments(str(directory), **RUN)
    with pytest.raises(ConfigError) as error:
        MerakTrainer(model, made, collate, ROWS, callbacks=[callback]).train()
    return str(error.value)


def test_what_cannot_be_followed_is_refused(tmp_path):
    def freeze(model):
        model.lm_head.requires_grad_(False)

    def thaw(model):
        model.lm_head.requires_grad_(True)

    assert "between two micro-batches" in refused(tmp_path / "midway", "on_substep_end", freeze)
    text = refused(tmp_path / "thawed", "on_step_begin", thaw, freeze)
    assert "lm_head.weight requires_grad=True: it was frozen when the model was captured" in text
    assert "every parameter" in refused(
        tmp_path / "all", "on_step_end", lambda model: model.requires_grad_(False)
    )

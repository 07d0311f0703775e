"""An average of the weights in a callback: right where it gathers them, an error where it would
read stale ones.
"""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.withheld import is_withheld
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    **{
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    },
    **{"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "max_grad_norm": 0.0},
}
TWICE = {"gradient_accumulation_steps": 2}
LAYOUTS = {
    "pp": TWICE | {"pipeline_model_parallel_size": 2},
    "tp": TWICE | {"tensor_model_parallel_size": 2},
    "full": {"fsdp": "full_shard"},
    "optim": {"use_distributed_optimizer": True, "bf16": True},
}


class Average(TrainerCallback):
    """As written for transformers.Trainer: it reads ``model.parameters()`` after each step."""

    def __init__(self):
        self.weights = None

    def update(self, model):
        if self.weights is None:
            self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        torch._foreach_lerp_(
            self.weights, [parameter.detach() for parameter in model.parameters()], 0.25
        )

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.update(model)


class AverageOfGathered(Average):
    """The same of what all ranks gather and the first one has."""

    trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        model = self.trainer.gather_model()
        if state.is_world_process_zero:
            self.update(model)


def made(directory, model, average, **more):
    arguments = MerakArguments(str(directory), **RUN | more)
    average.trainer = trainer = MerakTrainer(
        model,
        arguments,
        collate,
        samples(16, ragged=False),
        samples(4, ragged=False),
        callbacks=[average],
    )
    return trainer


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain(directory, **more):
    """Losses and average where the model shares the trained weights."""
    trainer = made(directory, tiny_llama(), Average(), **more)
    trainer.train()
    average = trainer.callback_handler.callbacks[1]
    assert isinstance(average, Average) and not any(map(is_withheld, trainer.model.parameters()))
    return losses(trainer), average.weights


def run(rank, world_size, directory, name):
    torch.set_num_threads(1)
    average, model = AverageOfGathered(), tiny_llama(rank)
    held = [*model.parameters()]
    trainer = made(f"{directory}/ours", model, average, **LAYOUTS[name])
    trainer.train()
    found = losses(trainer), average.weights
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
    assert [is_withheld(parameter) for parameter in held] == [rank > 0] * len(held)
    trainer.remove_callback(average)
    for reads in (Average(), Keeps(held), Reads(copy.deepcopy)):  # at the first step, each time
        trainer.add_callback(reads)
        with pytest.raises(
            ConfigError,
            match=r"model\.embed_tokens\.weight \(\w+\): .* Call trainer.gather_model\(\)",
        ):
            trainer.train()
        trainer.remove_callback(reads)
    assert all(map(is_withheld, held)) and model.num_parameters() == sum(
        parameter.numel() for parameter in held
    )
    assert trainer.gather_model() is model and (rank > 0 or model.lm_head.weight.isfinite().all())
    return found, plain(f"{directory}/whole") if name == "full" else None


class Reads(Average):
    """By way of what ``prepare`` makes of the model."""

    def __init__(self, prepare):
        super().__init__()
        self.prepare = prepare

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.update(self.prepare(model))


class Keeps(Average):
    """Reads parameters that it was given before training."""

    def __init__(self, parameters):
        super().__init__()
        self.parameters = lambda: parameters

    def on_step_end(self, args, state, control, **kwargs):
        self.update(self)


@pytest.mark.parametrize(
    "name", ["pp", *(pytest.param(k, marks=pytest.mark.slow) for k in ("full", "optim", "tp"))]
)
@pytest.mark.long
def test_an_average_is_that_of_one_process_or_refused(name, tmp_path):
    found = run_ranks(run, 2, str(tmp_path), name, timeout=200)
    expected = found[0][1] or plain(tmp_path / "one", bf16=name == "optim", **TWICE)
    for rank, (ours, _) in enumerate(found):
        assert ours[0] == (pytest.approx(expected[0], rel=1e-5) if name == "tp" else expected[0])
        assert len(ours[0]) == 4 and (ours[1] is None) == (rank > 0)
    for one, other in zip(found[0][0][1], expected[1], strict=True):
        assert torch.equal(one, other) if name != "tp" else torch.allclose(one, other, atol=1e-5)


def tied():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return GPT2LMHeadModel(config)


BEST = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_steps": 6,
}
BEST |= {"load_best_model_at_end": True, "learning_rate": 0.3}


class GathersAlways(TrainerCallback):
    """In every event that comes on all ranks alike."""

    trainer = None

    def gather(self, args, state, control, **kwargs):
        self.trainer.gather_model()

    on_train_begin = on_epoch_begin = on_step_begin = on_substep_end = on_pre_optimizer_step = (
        gather
    )
    on_optimizer_step = on_step_end = on_log = on_evaluate = on_save = on_epoch_end = (
        on_train_end
    ) = gather


def life(rank, world_size, directory, model, layout):
    """What a script sees of a model that is trained twice, gathered and used between, saved and
    resumed.
    """
    torch.set_num_threads(1)
    rows, found = collate(samples(3, ragged=False, seed=9)), []

    def used(trainer):
        model = trainer.gather_model().eval()
        with torch.no_grad():
            return (
                None
                if rank
                else [model(**rows).loss, *map(torch.clone, model.state_dict().values())]
            )

    gathers = GathersAlways() if len(layout) > 1 else TrainerCallback()
    trainer = made(f"{directory}/run", model(), gathers, **BEST | layout)
    found += [trainer.evaluate()["eval_loss"], used(trainer)]
    for _ in range(2):
        trainer.train()
        found += [
            losses(trainer),
            trainer.state.best_metric,
            used(trainer),
            trainer.evaluate()["eval_loss"],
        ]
        trainer.model.to("cpu").requires_grad_(True)
    trainer.model.config.use_cache = True
    resumed = made(f"{directory}/run", model(), TrainerCallback(), **BEST | layout)
    resumed.train(resume_from_checkpoint=f"{directory}/run/checkpoint-2")
    found += [losses(resumed), used(resumed)]
    # takes the model
    other = made(f"{directory}/other", trainer.gather_model(), TrainerCallback(), **RUN | layout)
    other.train()
    return [*found, losses(other), used(other)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"), [("pp", tiny_llama), ("full", tiny_llama), ("optim", tied)]
)
def test_nothing_else_is_seen_of_it(name, model, tmp_path):
    layout = LAYOUTS[name] | {"gradient_accumulation_steps": 1}
    ours = run_ranks(life, 2, str(tmp_path / "ours"), model, layout, timeout=280)
    if name == "pp":
        expected = life(0, 1, str(tmp_path / "one"), model, {})
    else:
        whole = {"bf16": name == "optim"}
        expected = run_ranks(life, 2, str(tmp_path / "whole"), model, whole, timeout=280)[0]
    for rank, found in enumerate(ours):
        for one, other in zip(found, expected, strict=True):
            if not isinstance(other, list) or not isinstance(other[0], torch.Tensor):
                assert one == other
            elif rank == 0:
                assert all(map(torch.equal, one, other))

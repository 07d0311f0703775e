"""A model that is changed between two uses of a trainer: as under transformers.Trainer, or refused
by name.
"""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from megatron_merak.errors import ConfigError
from megatron_merak.hf_trainer.arguments.merak_arguments import MerakArguments
from megatron_merak.hf_trainer.trainer import MerakTrainer
from megatron_merak.stages.withheld import is_withheld
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.ranks import run_ranks

RUN = {
    "use_cpu": True,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
}
ROWS, OTHERS = samples(8, ragged=False), samples(4, ragged=False, seed=5)
KINDS = {"theirs": (Trainer, TrainingArguments), "ours": (MerakTrainer, MerakArguments)}


def made(directory, model, kind="ours", callbacks=None, **more):
    trainer, arguments = KINDS[kind]
    return trainer(
        model, arguments(str(directory), **RUN | more), collate, ROWS, OTHERS, callbacks=callbacks
    )


def evaluated(trainer):
    return trainer.evaluate()["eval_loss"]


def losses(trainer):
    return [
        entry[key]
        for entry in trainer.state.log_history
        for key in ("loss", "grad_norm")
        if key in entry
    ]


def both(play, directory):
    """What ``play(kind, directory)`` found of either trainer, compared."""
    theirs, ours = (play(kind, directory / kind) for kind in KINDS)
    assert ours == pytest.approx(theirs, rel=2e-5)
    return ours


def freeze(model):
    model.model.layers.requires_grad_(False)


def scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 5.0


def new_head(model):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model.lm_head = nn.Linear(16, 64, bias=True)


def test_two_trainers_use_one_model(tmp_path):
    def play(kind, directory):
        model = tiny_llama()
        trainer, evaluator = made(directory, model, kind), made(directory, model, kind)
        found = [evaluated(trainer), evaluated(evaluator)]  # the evaluator's engine is the last one
        for _ in range(2):
            trainer.train()
            found += [*losses(trainer), evaluated(evaluator), evaluated(trainer)]
        with torch.no_grad():
            return [*found, model.eval()(**collate(OTHERS)).loss.item()]

    found = both(play, tmp_path)
    assert found[-1] == pytest.approx(found[-2], rel=1e-5) and found[0] != pytest.approx(
        found[-1], rel=1e-3
    )


@pytest.mark.parametrize("change", [freeze, scale, new_head])
def test_a_changed_model_is_captured_anew(change, tmp_path):
    def play(kind, directory):
        model = tiny_llama()
        trainer = made(directory, model, kind)
        found = [evaluated(trainer)]
        change(model)
        found.append(evaluated(trainer))
        trainer.train()
        return [*found, *losses(trainer), evaluated(trainer)]

    both(play, tmp_path)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_training_goes_on_with_its_moments(tmp_path, optim):
    def play(kind, directory):
        model = tiny_llama()
        trainer = made(directory, model, kind, optim=optim)
        trainer.train()
        scale(model)
        found = [*losses(trainer), evaluated(trainer)]
        trainer.train()
        return [*found, *losses(trainer)]

    both(play, tmp_path)


@pytest.mark.parametrize("bf16", ["arguments", "model"])
def test_written_weights_reach_every_copy(bf16, tmp_path):
    dtype = torch.bfloat16 if bf16 == "model" else torch.float32
    written = {name: value * 3 for name, value in tiny_llama(1).to(dtype).state_dict().items()}
    found = []
    for early in (True, False):
        model = tiny_llama().to(dtype)
        trainer = made(tmp_path / str(early), model, bf16=bf16 == "arguments")
        before = 0.0 if early else evaluated(trainer)
        model.load_state_dict(written)
        after = evaluated(trainer)
        assert before != after
        trainer.train()
        found.append(
            [after, *losses(trainer), *(p.float().sum().item() for p in model.parameters())]
        )
    assert found[0] == found[1]


class AtStep(TrainerCallback):
    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            with torch.no_grad():
                self.change(model)


def clamp(model):
    for parameter in model.parameters():
        parameter.clamp_(-0.01, 0.01)


def test_a_callback_writes_weights_that_have_copies(tmp_path):
    model = tiny_llama()
    made(tmp_path, model, callbacks=[AtStep(clamp)], bf16=True, learning_rate=1e-6).train()
    assert all(p.abs().max() < 0.0101 for p in model.parameters())


def test_changes_that_are_refused(tmp_path):
    model = tiny_llama()
    freeze(model)
    trainer = made(tmp_path, model)
    trainer.train()
    model.requires_grad_(True)
    assert evaluated(trainer) == pytest.approx(evaluated(made(tmp_path, model)), rel=1e-6)
    with pytest.raises(ConfigError, match=r"trained other parameters .* Train a new MerakTrainer"):
        trainer.train()
    trainer = made(
        tmp_path, model, max_steps=3, eval_strategy="steps", eval_steps=2, callbacks=[AtStep(scale)]
    )
    with pytest.raises(ConfigError, match=r"self_attn.scaling 5.0: .*changed during training"):
        trainer.train()


def test_another_model_is_evaluated_and_not_trained(tmp_path):
    def play(kind, directory):
        trainer = made(directory, tiny_llama(), kind)
        found = [evaluated(trainer)]
        trainer.model = tiny_llama(3)
        return [*found, evaluated(trainer), trainer]

    (*theirs, _), (*ours, trainer) = (play(kind, tmp_path / kind) for kind in KINDS)
    assert ours == pytest.approx(theirs, rel=2e-5) and ours[0] != ours[1]
    with pytest.raises(ConfigError, match="Make a new MerakTrainer with the model to train"):
        trainer.train()
    with pytest.raises(ConfigError, match="it is not a model"):
        trainer.model = None


def divided(rank, world_size, directory, expected):
    model = tiny_llama()
    trainer = made(directory, model, pipeline_model_parallel_size=2)
    found = [evaluated(trainer)]
    with pytest.raises(
        ConfigError, match=r"load_state_dict .* Load weights before the trainer is first used"
    ):
        model.load_state_dict({})
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"lm_head.weight .mul_.: .* Write weights before"),
    ):
        model.lm_head.weight.mul_(3)
    trainer.gather_model()
    if rank == 0:  # whose weights are everybody's
        with torch.no_grad():
            model.lm_head.weight.mul_(3)
    freeze(model)
    found.append(evaluated(trainer))
    trainer.train()
    assert [*found, *losses(trainer)] == pytest.approx(expected, rel=2e-5)
    with pytest.raises(
        ConfigError, match=r"embed_tokens.weight .clamp_.: the trained weights are sharded"
    ):
        made(
            directory, tiny_llama(), callbacks=[AtStep(clamp)], pipeline_model_parallel_size=2
        ).train()
    trainer.gather_model()
    trainer.save_model(f"{directory}/saved")
    evaluated(trainer)
    scale(model)
    with pytest.raises(
        ConfigError, match=r"scaling 5.0: .* the trained weights are sharded over 2 ranks"
    ):
        trainer.evaluate()
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5
    evaluated(trainer)
    if rank == 0:
        with torch.no_grad():
            model.lm_head.weight.mul_(3)
    for use in (trainer.train, trainer.evaluate, trainer.save_model, trainer.gather_model):
        with pytest.raises(
            ConfigError, match=r"model.lm_head.weight .written since.: .* Make the change before"
        ):
            use()


@pytest.mark.long
def test_a_divided_model_is_captured_anew_before_it_trained_and_refused_after(tmp_path):
    model = tiny_llama()
    trainer = made(tmp_path / "theirs", model, "theirs")
    expected = [evaluated(trainer)]
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    freeze(model)
    expected.append(evaluated(trainer))
    trainer.train()
    run_ranks(divided, 2, str(tmp_path / "ours"), [*expected, *losses(trainer)])


def released(rank, world_size, directory, more):
    model = tiny_llama(rank)
    weights = {name: p.clone() for name, p in tiny_llama(0).named_parameters()}
    trainer = made(directory, model, **more)
    found = [evaluated(trainer)]
    scale(model)
    found.append(evaluated(trainer))  # captured anew, from weights that the model does not have
    assert all(map(is_withheld, model.parameters()))
    trainer.model = tiny_llama(3)
    found.append(evaluated(trainer))
    assert not any(map(is_withheld, model.parameters()))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        assert model.eval()(**collate(OTHERS)).loss.item() == pytest.approx(found[1], rel=1e-5)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"pipeline_model_parallel_size": 2}, {"fsdp": "full_shard"}], ids=["pp", "full"]
)
def test_a_model_that_did_not_train_has_its_weights_back(more, tmp_path):
    model = tiny_llama()
    trainer = made(tmp_path / "theirs", model, "theirs")
    expected = [evaluated(trainer)]
    scale(model)
    expected.append(evaluated(trainer))
    trainer.model = tiny_llama(3)
    expected.append(evaluated(trainer))
    for found in run_ranks(released, 2, str(tmp_path / "ours"), more, timeout=250):
        assert found == pytest.approx(expected, rel=2e-5)

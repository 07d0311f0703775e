"""An engine under every kind of layout gives what one eager process gives."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from megatron_merak.engine import Engine, losses, token_logprobs
from megatron_merak.errors import ConfigError, TraceError
from megatron_merak.parallel.interruption import Interrupted
from tests.engine.runs import (
    arguments,
    batch_of,
    close,
    compare,
    likelihood,
    none,
    policy,
    tiny_llama,
)
from tests.four_bit import adapted, four_bit, needs_bitsandbytes, save_llama, tokens
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "changes"),
    [
        pytest.param(1, 1, 1, {}, marks=pytest.mark.slow),
        (2, 2, 1, {}),
        pytest.param(2, 1, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 1, 1, SHARDED, marks=pytest.mark.long),
        pytest.param(2, 1, 1, {"expert_model_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param(2, 1, 1, {"expert_tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param(
            4,
            1,
            1,
            {"expert_model_parallel_size": 2, **SHARDED},
            marks=pytest.mark.long,
        ),
        pytest.param(2, 1, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 1, 1, {"data_parallel_sharding_strategy": "optim"}, marks=pytest.mark.slow),
        pytest.param(4, 2, 2, {"pipeline_schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param(4, 2, 1, SHARDED, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, {"activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_it_gives_what_one_process_gives(tmp_path, ranks, tp, pp, changes):
    told = run_ranks(compare, ranks, str(tmp_path), tp, pp, changes, timeout=240)
    assert all(each == told[0] for each in told)
    if tp * pp > 1:
        samples, loss, tokens, calls = told[0]
        assert (
            "received different samples" in samples
            and "its loss" in loss
            and "different tokens" in tokens
        )
        assert "logprobs: rank 0 is in step, and both need all ranks" in calls


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(
        tiny_llama(), arguments(tmp_path_factory.mktemp("engine"), adam_epsilon=1e-8), batch_of(0)
    )


def test_the_models_own_loss(engine):
    """The default; here of weights that no other test has changed."""
    batch = batch_of(1)
    passed = engine.forward_backward([batch])
    engine.zero_grad()
    close(
        passed.losses,
        [tiny_llama()(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item()],
    )
    assert passed.reports == [{}]


def test_rates_are_those_of_the_step(engine):
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.forward_backward([batch_of(1)])
    engine.step(lr=0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())


@needs_bitsandbytes
def test_packed_values_are_not_handed_out_as_weights(tmp_path):
    model = adapted(four_bit(save_llama(tmp_path / "base")))
    engine = Engine(model, arguments(tmp_path), tokens())
    with pytest.raises(ConfigError, match=r"named_weights .*down_proj.* is in 4 bits, .*adapters"):
        next(engine.named_weights())
    with pytest.raises(ConfigError, match="named_weights"):
        engine.weights_info()


def test_a_loop_of_ones_own_saves_when_a_signal_asks_it_to_end(engine, tmp_path):
    before, first = engine.steps, tmp_path / "state"
    with pytest.raises(Interrupted) as stop, engine.interruption() as signals:
        for number in (0, signal.SIGUSR1, 0):
            engine.forward_backward([batch_of(1)])
            engine.step(lr=0.0)
            if number:
                os.kill(os.getpid(), number)
            if number := signals.stops():
                engine.save(first)
                raise Interrupted(number)
    assert stop.value.code == 128 + signal.SIGUSR1 and engine.steps == before + 2
    assert (first / f"iter_{engine.steps:07d}" / "manifest.json").is_file()


def test_a_gradient_that_is_not_finite_skips_the_step(engine):
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.forward_backward([batch_of(1) | {"beta": float("inf")}], policy)
    assert engine.step().skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.named_weights())


def test_labels_are_the_tokens_that_count_where_there_are_none(engine):
    batch = batch_of(3)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 6:] = 0
    bare = {"input_ids": batch["input_ids"], "attention_mask": mask}
    (found,) = engine.logprobs([bare])
    (wanted,) = engine.logprobs(
        [bare | {"labels": batch["input_ids"].masked_fill(mask == 0, -100)}]
    )
    assert torch.equal(found, wanted) and (found[0, 6:] == 0).all() and (found[1, 1:] < 0).all()


def test_what_a_loss_reads_is_looked_at(engine):
    """A closure with another value is traced again, one without a change is not."""
    scale = [1.0]

    def scaled(outputs, batch):
        return likelihood(outputs, batch) * scale[0]

    made = engine.captured.programs[0].all
    (one,) = engine.forward_backward([batch_of(1)], scaled).losses
    known = len(made())
    engine.forward_backward([batch_of(2)], scaled)
    assert len(made()) == known
    scale[0] = 2.0
    (two,) = engine.forward_backward([batch_of(1)], scaled).losses
    assert two == pytest.approx(2 * one, rel=1e-6) and len(made()) == known + 1
    engine.zero_grad()


class Script:
    def __init__(self):
        self.scale, self.calls = 1.0, 0

    def strength(self):
        return self.scale

    def loss(self, outputs, batch):
        return likelihood(outputs, batch) * self.strength()


def test_methods_are_traced_again_for_what_they_read(engine):
    script, made = Script(), engine.captured.programs[0].all
    (one,) = engine.forward_backward([batch_of(1)], script.loss).losses
    known = len(made())
    script.calls = 1
    engine.forward_backward([batch_of(1)], script.loss)
    assert len(made()) == known
    script.scale = 2.0
    (two,) = engine.forward_backward([batch_of(1)], script.loss).losses
    assert two == pytest.approx(2 * one, rel=1e-6) and len(made()) == known + 1
    settings = Script()
    for settings.calls in range(3):
        engine.forward_backward(
            [batch_of(1)], lambda outputs, batch: likelihood(outputs, batch) * settings.strength()
        )
    assert len(made()) == known + 2 + 2  # a lambda with a closure is another one each time
    engine.zero_grad()


def test_weights_that_a_script_writes(engine):
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(0.5)
    batch = batch_of(2)
    (found,) = engine.logprobs([batch])
    close(
        found,
        token_logprobs(engine.model(input_ids=batch["input_ids"]).logits, batch["labels"]).detach(),
    )


def test_lambdas_of_one_line_are_one_function(engine):
    known = None
    for _ in range(20):
        engine.forward_backward(
            [batch_of(1)], lambda outputs, batch: outputs.logits.float().square().mean()
        )
        known = known or len(engine.captured.programs[0].all())
    engine.zero_grad()
    assert len(engine.captured.programs[0].all()) == known


def test_sixteen_bits_give_losses_fp32(tmp_path):
    kinds = []

    def loss(outputs, batch):
        kinds.append(outputs.logits.dtype)
        return likelihood(outputs, batch)

    engine = Engine(tiny_llama(), arguments(tmp_path, bf16=True), batch_of(0), loss)
    passed = engine.forward_backward([batch_of(1)])
    engine.step()
    batch = batch_of(1)
    wanted = likelihood(tiny_llama()(input_ids=batch["input_ids"]), batch).item()
    assert {*kinds} == {torch.float32} and passed.losses[0] == pytest.approx(wanted, rel=1e-2)
    assert {dtype for _, dtype, _ in engine.weights_info()} == {
        torch.float32
    }  # as the model was given


def test_token_logprobs():
    logits = torch.randn(2, 5, 7, dtype=torch.float64).float()
    labels = torch.tensor([[1, 2, -100, 4, 5], [6, 0, 1, -100, 3]])
    found = token_logprobs(logits, labels, temperature=2.0)
    for row in range(2):
        for place in range(5):
            label = labels[row, place].item()
            scores = logits[row, place - 1].double() / 2
            wanted = (
                0.0 if place == 0 or label == -100 else (scores[label] - scores.logsumexp(0)).item()
            )
            assert found[row, place].item() == pytest.approx(wanted, abs=1e-6)


def vector(outputs, batch):
    return outputs.logits.mean((0, 1))


def numbers(outputs, batch):
    return outputs.logits.mean(), {"mean": 1.0}


def named_loss(outputs, batch):
    return outputs.logits.mean(), {"loss": outputs.logits.mean()}


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda e: e.step(), ConfigError, "step .no gradient.: nothing was computed"),
        (lambda e: e.forward_backward([]), ConfigError, "there is nothing to compute"),
        (lambda e: e.forward_backward(batch_of(1)), ConfigError, "it is one batch"),
        (
            lambda e: e.forward_backward([batch_of(1) | {"text": "a"}]),
            ConfigError,
            "batch entry text str",
        ),
        (
            lambda e: e.forward_backward([batch_of(1)], "loss"),
            ConfigError,
            "loss_fn 'loss': it cannot be called",
        ),
        (
            lambda e: e.forward_backward([batch_of(1)], none),
            TraceError,
            "loss_fn .its loss.: it is a float",
        ),
        (
            lambda e: e.forward_backward([batch_of(1)], vector),
            TraceError,
            r"it is a tensor of \(96,\)",
        ),
        (
            lambda e: e.forward_backward([batch_of(1)], numbers),
            TraceError,
            "report 'mean'.: it is a float",
        ),
        (
            lambda e: e.forward_backward([batch_of(1)], named_loss),
            TraceError,
            "a word other than loss",
        ),
        (lambda e: e.logprobs([batch_of(1)], temperature=0), ConfigError, "temperature 0"),
    ],
)
def test_what_is_refused(engine, call, error, told):
    with pytest.raises(error, match=told):
        call(engine)


@pytest.mark.parametrize(
    "call", ["named_weights", "weights_info", "save", "load", "save_pretrained"]
)
def test_a_pending_gradient_keeps_its_memory(engine, call, tmp_path):
    engine.forward_backward([batch_of(1)])
    with pytest.raises(ConfigError, match="not applied yet"):
        found = getattr(engine, call)(*([tmp_path] if call[0] in "sl" else []))
        list(found)
    engine.zero_grad()


def test_log_probabilities_of_a_decoder_with_an_encoder():
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    with pytest.raises(ConfigError, match="logprobs T5ForConditionalGeneration"):
        losses.Losses(T5ForConditionalGeneration(config), False).logprobs(1.0)


def test_loss_functions_that_are_new_at_every_call(engine, monkeypatch):
    monkeypatch.setattr(losses, "MOST", 3)
    with pytest.raises(ConfigError, match="put what changes into the batch"):
        for number in range(5):

            def scaled(outputs, batch, number=number):
                return outputs.logits.mean() * number

            engine.forward_backward([batch_of(1)], scaled)
    engine.zero_grad()


@pytest.mark.parametrize("name", ["label_smoothing_factor", "warmup_ratio", "warmup_steps"])
def test_arguments_of_a_loop(name, tmp_path):
    with pytest.raises(ConfigError, match=f"args.{name}|args.warmup_steps"):
        Engine(tiny_llama(), arguments(tmp_path, **{name: 0.1}), batch_of(0))


def example(*arguments: str, ranks: int = 1) -> list[tuple[int, float]]:
    """(round, reward) as examples/grpo.py prints them."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "examples/grpo.py"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [
        (int(n), float(reward))
        for n, reward in re.findall(r"round +(\d+) +reward ([\d.]+)", done.stdout)
    ]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_example_learns(tmp_path):
    found = example("--output_dir", str(tmp_path), "--max_steps", "15", "--logging_steps", "5")
    rewards = [reward for _, reward in found]
    assert [number for number, _ in found] == [5, 10, 15]
    assert rewards == sorted(rewards) and rewards[0] < 0.2 and rewards[-1] > 0.4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout", ["--tensor_model_parallel_size", "--pipeline_model_parallel_size"]
)
def test_the_example_learns_the_same_under_a_layout(tmp_path, layout):
    given = ("--output_dir", str(tmp_path), "--max_steps", "20")
    assert example(*given, layout, "2", ranks=2) == example(*given)

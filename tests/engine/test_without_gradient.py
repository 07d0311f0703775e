"""Weights without a gradient, or frozen between steps, stay as torch's optimizers leave them; rates
are checked.
"""

import copy

import pytest
import torch
from torch import nn

from megatron_merak.engine import Engine
from megatron_merak.errors import ConfigError, MerakError, TraceError
from tests.engine.runs import RATE, arguments, close
from tests.ranks import run_ranks

DECAY = 0.9


class Reads(nn.Module):
    """Reads one layer without a gradient; another one never had any."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.read, self.last, self.fixed = (
            nn.Linear(8, 8, bias=False) for _ in range(4)
        )
        self.fixed.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            side = self.read(x)
        hidden = torch.tanh(self.body(x))
        return {"y": self.last(hidden + side + self.fixed(x)), "hidden": hidden}


def batch_of(seed):
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))}


def square(outputs, batch):
    return outputs["y"].square().mean()


def of_hidden(outputs, batch):
    return outputs["hidden"].mean()


def of_both(outputs, batch):
    """Reads the last layer, to which it gives no gradient."""
    return outputs["hidden"].mean() + outputs["y"].detach().square().mean()


def engine_of(directory, **changes):
    model = Reads()
    return model, Engine(
        model, arguments(directory, weight_decay=DECAY, **changes), batch_of(0), square
    )


def train(rank, world, directory, degrees):
    """Freeze a layer for the middle one of three steps, beside torch's AdamW."""
    model, engine = engine_of(directory, **degrees)
    eager = copy.deepcopy(Reads())
    optimizer = torch.optim.AdamW(
        [p for p in eager.parameters() if p.requires_grad], RATE, eps=1.0, weight_decay=DECAY
    )
    for step in range(3):
        for each in (model, eager):
            each.body.requires_grad_(step != 1)
        seeds = [10 * step + replica for replica in range(engine.replicas)]
        engine.forward_backward([batch_of(seeds[engine.replica])])
        for seed in seeds:
            (square(eager(**batch_of(seed)), {}) / engine.replicas).backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        close(engine.step().grad_norm, norm)
        for name, tensor in engine.named_weights():
            close(tensor, eager.get_parameter(name).detach())
    close(dict(engine.named_weights())["read.weight"], Reads().read.weight.detach())
    return refused(model, engine)


def refused(model, engine):
    """What is said to changes that cannot be followed, and to ranks that freeze for themselves."""
    told = []

    def say(match, call):
        with pytest.raises(ConfigError, match=match) as error:
            call()
        told.append(str(error.value))

    model.fixed.requires_grad_(True)
    say(
        "fixed.weight.*frozen when the engine was made",
        lambda: engine.forward_backward([batch_of(1)]),
    )
    model.requires_grad_(False)
    say("every parameter is frozen", lambda: engine.forward_backward([batch_of(1)]))
    model.requires_grad_(True).fixed.requires_grad_(False)
    engine.forward_backward([batch_of(1)])
    model.last.requires_grad_(False)
    say("last.weight.*between two calls", lambda: engine.forward_backward([batch_of(1)]))
    if engine.mesh.grid.size > 1:
        engine.zero_grad()
        model.last.requires_grad_(engine.mesh.rank == 0)
        say("requires_grad.*rank 0 and rank 1", lambda: engine.forward_backward([batch_of(1)]))
        model.last.requires_grad_(True)
        engine.forward_backward([batch_of(1)])
        say("lr.*rank 0 and rank 1", lambda: engine.step(lr=0.1 * engine.mesh.rank))
    return told


def test_they_stay_on_one_rank(tmp_path):
    train(0, 1, str(tmp_path), {})


@pytest.mark.parametrize("first", [square, of_both])
def test_a_loss_moves_only_what_it_gives_a_gradient(tmp_path, first, recwarn):
    """Steps by different losses, one of two of them, beside torch's AdamW."""
    engine = Engine(Reads(), arguments(tmp_path, weight_decay=DECAY), batch_of(0), first)
    eager = Reads()
    optimizer = torch.optim.AdamW(
        [p for p in eager.parameters() if p.requires_grad], RATE, eps=1.0, weight_decay=DECAY
    )
    for seed, losses in enumerate(
        [(square,), (of_hidden,), (of_both,), (of_hidden, square), (of_both,), (square,)]
    ):
        for loss in losses:
            engine.forward_backward([batch_of(seed)], loss)
            loss(eager(**batch_of(seed)), {}).backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        close(engine.step().grad_norm, norm)
        for name, tensor in engine.named_weights():
            close(tensor, eager.get_parameter(name).detach())
    assert not any("do not use these parameters" in str(each.message) for each in recwarn)


@pytest.mark.parametrize(
    "loss",
    [lambda outputs, batch: torch.tensor(1.0), lambda outputs, batch: outputs["y"].detach().mean()],
    ids=["constant", "detached"],
)
def test_a_loss_without_a_gradient_is_refused(tmp_path, loss):
    _, engine = engine_of(tmp_path)
    with pytest.raises(
        MerakError, match="loss .*(none of the trainable parameters a gradient|reads no parameter)"
    ):
        engine.forward_backward([batch_of(1)], loss)
    engine.forward_backward([batch_of(1)])
    assert not engine.step().skipped
    with pytest.raises(
        MerakError, match="loss .*(none of the trainable parameters a gradient|reads no parameter)"
    ):
        Engine(Reads(), arguments(tmp_path), batch_of(0), loss).forward_backward([batch_of(1)])


@pytest.mark.parametrize("degrees", [{"tensor_model_parallel_size": 2}, {}], ids=["tp2", "dp2"])
def test_they_stay_on_two_ranks(tmp_path, degrees):
    one, other = run_ranks(train, 2, str(tmp_path), degrees)
    assert one == other


class Penalised(Reads):
    """Penalises the gradient of its result by its input."""

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        y = self.last(torch.tanh(self.body(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return {"y": y + slope.square().sum()}


def test_a_gradient_inside_of_the_forward_is_refused_by_name(tmp_path):
    with pytest.raises(TraceError, match=r"calls torch\.autograd\.grad"):
        Engine(Penalised(), arguments(tmp_path), batch_of(0), square)


@pytest.mark.parametrize("rate", [-1e-3, float("inf"), float("nan"), "1e-3", [1e-3, 1e-2], True])
def test_a_rate_that_is_none_is_refused_before_the_step(tmp_path, rate):
    _, engine = engine_of(tmp_path)
    engine.forward_backward([batch_of(1)])
    with pytest.raises(ConfigError, match=r"^lr .*(one learning rate|negative or not finite)"):
        engine.step(lr=rate)
    assert not engine.step(lr=torch.tensor(0.5)).skipped


def test_a_refused_batch_leaves_the_gradient_of_those_before_it(tmp_path):
    _, engine = engine_of(tmp_path)
    engine.forward_backward([batch_of(1)], square)
    with pytest.raises(MerakError):
        engine.forward_backward([batch_of(2)], lambda outputs, batch: outputs["y"].detach().mean())
    refused = engine.step(0.0).grad_norm
    engine.forward_backward([batch_of(1)], square)
    assert refused == engine.step(0.0).grad_norm


@pytest.mark.parametrize(
    "use",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: model.body.weight.grad.mul_(2),
        lambda model: model.body.weight.grad.norm(),
    ],
)
def test_gradients_cannot_be_changed_by_hand(tmp_path, use):
    model, engine = engine_of(tmp_path)
    engine.forward_backward([batch_of(1)], square)
    with pytest.raises(ConfigError, match="p.grad.*flat buffers.*max_grad_norm"):
        use(model)
    engine.forward_backward([batch_of(2)], of_hidden)
    assert engine.step().grad_norm > 0
    assert model.body.weight.grad is None

"""What a forward writes in Python is refused by name and line, unless the next forward does not
mind.
"""

import itertools
import random
import threading
import time

import numpy
import pytest
import torch
from torch import nn
from transformers import BertConfig

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.capture import capture
from tests.graph.tiny import run

CALLS = 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.begin()

    def begin(self):
        pass

    def forward(self, x):
        return self.linear(x).square().mean() * self.factor(x)


class Plain(Net):
    def factor(self, x):
        return 2.0


class Counter(Net):
    def begin(self):
        self.step = 0

    def factor(self, x):
        self.step += 1
        return min(1, self.step / 6)


class Inner(Net):
    def begin(self):
        self.inner = Counter()

    def factor(self, x):
        return self.inner(x)


class Grows(Net):
    def begin(self):
        self.seen = {"sizes": []}

    def factor(self, x):
        self.seen["sizes"].append(len(x))
        return len(self.seen["sizes"])


class Held(Net):
    def begin(self):
        self.state = type("State", (), {})()
        self.state.count = 0

    def factor(self, x):
        self.state.count += 1
        return self.state.count


class Endless(Net):
    def begin(self):
        self.numbers = itertools.count(1)

    def factor(self, x):
        return next(self.numbers)


class Global(Net):
    def factor(self, x):
        global CALLS
        CALLS += 1
        return CALLS


class OfClass(Net):
    count = 0

    def factor(self, x):
        OfClass.count += 1
        return OfClass.count


class First(Net):
    def begin(self):
        self.ready = False

    def factor(self, x):
        before, self.ready = self.ready, True
        return 1.0 if before else 0.0


class Remembers(Net):
    def begin(self):
        self.last = None

    def factor(self, x):
        y = self.linear(x)
        factor = 1.0 if self.last is None else (y - self.last).square().mean()
        self.last = y.detach()
        return factor


class Clock(Net):
    def factor(self, x):
        return time.time()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Counter, "Counter.step: .*self.step \\+= 1.*1 after one forward and 2 after two"),
        (Inner, "Inner.inner.step"),
        (Grows, "Grows.seen: .*append"),
        (Held, "Held.state: .*self.state.count \\+= 1"),
        (Endless, "Endless.numbers: .*next\\(self.numbers\\)"),
        (Global, "test_python_state.CALLS: .*CALLS \\+= 1"),
        (OfClass, "OfClass.count"),
        (First, "First.ready: .*computes something else"),
        (Remembers, "Remembers.last"),
        (Clock, "time.time\\(\\).* reads the clock"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_what_a_forward_changes_for_the_next_is_refused(kind, told, training):
    before = CALLS, OfClass.count
    with pytest.raises(TraceError, match=told):
        capture(kind(), {"x": torch.randn(2, 4)}, training=training)
    assert (CALLS, OfClass.count) == before


class Stash(Net):
    def begin(self):
        self.last, self.widest = None, 0

    def factor(self, x):
        self.last, self.widest = self.linear(x), max(self.widest, x.shape[-1])
        return 1.0


class Cache(Net):
    def begin(self):
        self.table, self.length = None, 0

    def factor(self, x):
        if self.length < len(x):
            self.table, self.length = torch.arange(len(x)).float().mean(), len(x)
        return self.table


@pytest.mark.parametrize("kind", [Stash, Cache])
def test_what_the_next_forward_does_not_mind_is_captured(kind):
    model, batch = kind(), {"x": torch.randn(2, 4)}
    captured = capture(model, batch)
    loss, *_ = run(captured, dict(model.named_parameters()), batch)
    assert vars(model).get("length", 0) == 0 and vars(model).get("widest", 0) == 0
    assert torch.equal(loss, model(**batch)) and torch.equal(loss, model(**batch))


class Configured(Net):
    def begin(self):
        self.config = BertConfig()

    def factor(self, x):
        self.config.problem_type = "regression"
        return 1.0


def test_what_a_forward_writes_into_the_config_is_there_afterwards():
    model = Configured()
    capture(model, {"x": torch.randn(2, 4)})
    assert model.config.problem_type == "regression"


def test_what_other_threads_do_meanwhile_is_not_the_models():
    """Loggers and downloads read the clock and draw numbers beside a capture: it took these for its
    forward's.
    """
    done = threading.Event()
    began = threading.Event()

    def work():
        while not done.is_set():
            time.time()
            random.random()
            numpy.random.rand()
            numpy.random.default_rng()
            began.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    began.wait()
    try:
        for _ in range(3):
            capture(Plain(), {"x": torch.randn(2, 4)}, training=True)
    finally:
        done.set()
        thread.join()

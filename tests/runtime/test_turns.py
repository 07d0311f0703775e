"""Passes that take turns: what one launched is under way while the other computes, in every
direction.
"""

import pytest
import torch
from torch import nn

from megatron_merak.runtime import engine as engine_module
from megatron_merak.runtime.engine import Interpreter, Pass, State, execute
from megatron_merak.runtime.weights import Gradient, WeightGradients
from megatron_merak.segment import Collective, Common, In, Out, Segment

CPU, SUM = torch.device("cpu"), Collective.ALL_REDUCE
UNITS = 4


class Log:
    """Notes computations, launches and waits in order, instead of communicating."""

    def __init__(self):
        self.lines: list[tuple[str, str]] = []

    def launch(self, tensor, kind, group, inplace):
        name = f"{self.lines[-1][1]}"
        self.lines.append(("launch", name))

        class Work:
            def wait(work):
                self.lines.append(("wait", name))

        return tensor.clone(), Work()


def chain(log: Log, weights: list[nn.Parameter]) -> list[Segment]:
    """Units of a whole prologue and a divided body: h -> normed -> partial sums -> h."""

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, common, unit):
            ctx.save_for_backward(x, weight)
            ctx.common, ctx.unit = common, unit
            log.lines.append(("compute", f"{common.half}F{unit}"))
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            log.lines.append(("compute", f"{ctx.common.half}B{ctx.unit}"))
            return grad * weight, (grad * x).sum(), None, None

    def enter(unit):
        return lambda common, h: (h.tanh(), h * 1)

    def body(unit, weight):
        return lambda common, normed: (Noted.apply(normed, weight, common, unit),)

    def leave(common, summed, h):
        return (summed + h,)

    segments = []
    for u, weight in enumerate(weights):
        names = [f"{name}{u}" for name in ("normed", "kept", "summed")]
        segments += [
            Segment(u, 0, enter(u), (In(f"h{u}"),), (Out(names[0]), Out(names[1]))),
            Segment(
                u,
                1,
                body(u, weight),
                (In(names[0], SUM),),
                (Out(names[2], SUM),),
                (weight,),
                sharded=True,
            ),
            Segment(u, 2, leave, (In(names[2]), In(names[1])), (Out(f"h{u + 1}"),)),
        ]
    return segments


def states(weights, names):
    made = []
    for name in names:
        common = Common({})
        common.half = name
        state = State(common, training=True)
        state.values["h0"] = torch.ones(2)
        made.append(state)
    return made


def hidden(log: Log) -> list[bool]:
    """Of each launch: whether the other pass computes before the wait."""
    found = []
    for place, (what, name) in enumerate(log.lines):
        if what == "launch":
            until = log.lines.index(("wait", name), place)
            between = [other for kind, other in log.lines[place + 1 : until] if kind == "compute"]
            found.append(any(other[0] != name[0] for other in between))
    return found


@pytest.mark.parametrize("recompute", [(), [(1,), (2,)], [(0, 1), (2, 3)]])
def test_halves_hide_each_others_collectives(recompute, monkeypatch):
    log, weights = Log(), [nn.Parameter(torch.tensor(1.5)) for _ in range(UNITS)]
    monkeypatch.setattr(engine_module, "launch", log.launch)
    sink = WeightGradients({w: Gradient(torch.zeros(())) for w in weights})
    engine = Interpreter(
        chain(log, weights), recompute, (f"h{UNITS}",), None, weights=sink, device=CPU
    )
    halves = states(weights, "ab")
    execute([Pass(engine, state, engine.forward_runs) for state in halves])
    forward = hidden(log)
    # nothing is left behind the last
    assert len(forward) == 2 * UNITS and sum(forward) >= 2 * UNITS - 1
    for state in halves:
        engine.take(state, f"h{UNITS}")
        state.add_grad(f"h{UNITS}", torch.ones(2))
    log.lines.clear()
    execute([Pass(engine, state, engine.backward_runs(state)) for state in halves])
    backward = hidden(log)
    again = sum(len(run) for run in recompute)
    assert len(backward) >= 2 * UNITS + (again if len(recompute) == again else 0)
    assert sum(backward) >= len(backward) - 1
    assert all(state.grads.keys() == {"h0"} or not state.grads for state in halves)


def test_a_forward_hides_the_collectives_of_a_backward(monkeypatch):
    log, weights = Log(), [nn.Parameter(torch.tensor(1.5)) for _ in range(UNITS)]
    monkeypatch.setattr(engine_module, "launch", log.launch)
    sink = WeightGradients({w: Gradient(torch.zeros(())) for w in weights})
    engine = Interpreter(chain(log, weights), (), (f"h{UNITS}",), None, weights=sink, device=CPU)
    first, second = states(weights, "ab")
    engine.forward(first)
    engine.take(first, f"h{UNITS}")
    first.add_grad(f"h{UNITS}", torch.ones(2))
    log.lines.clear()
    execute(
        [
            Pass(engine, second, engine.forward_runs),
            Pass(engine, first, engine.backward_runs(first)),
        ]
    )
    assert sum(hidden(log)) >= 2 * UNITS - 1


def test_without_overlap_a_collective_is_awaited_where_it_is_launched(monkeypatch):
    log, weights = Log(), [nn.Parameter(torch.tensor(1.5)) for _ in range(UNITS)]
    monkeypatch.setattr(engine_module, "launch", log.launch)
    sink = WeightGradients({w: Gradient(torch.zeros(())) for w in weights})
    engine = Interpreter(
        chain(log, weights), (), (f"h{UNITS}",), None, weights=sink, device=CPU, overlap=False
    )
    (state,) = states(weights, "a")
    engine.forward(state)
    kinds = [kind for kind, _ in log.lines]
    assert kinds == ["compute", "launch", "wait"] * UNITS

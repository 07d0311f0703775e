"""One of two tensor-parallel ranks on the machine's clock: the real engine, real all-reduces,
kernels that sleep.

Run as ``wall.py RANK JSON``, by way of `shaped.py`; `predict` is the same on the modelled
clock.
"""

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.schedules.timed_stages import Scaled, Times, Work  # noqa: E402
from megatron_merak.cluster import DEVICES, LINKS, Cluster  # noqa: E402
from megatron_merak.parallel.clock import Clock, LogicalClock, WallClock  # noqa: E402
from megatron_merak.parallel.emulated import register  # noqa: E402
from megatron_merak.runtime.engine import Interpreter, Pass, State, execute  # noqa: E402
from megatron_merak.runtime.weights import Gradient, WeightGradients  # noqa: E402
from megatron_merak.segment import Collective, Common, In, Out, Segment  # noqa: E402

MODES = ("compute", "none", "weight-gradient", "sub-pipeline", "pair")


@dataclass(frozen=True)
class Bench:
    """``rows`` x ``width`` of fp32 are all-reduced twice per layer and direction. The forward of
    half a layer takes ``forward`` seconds, its backward twice that, half of it for the weight
    gradient.
    """

    store: str
    results: str
    layers: int = 8
    rows: int = 512
    width: int = 1024
    forward: float = 0.03
    repeats: int = 5


class PerRow:
    """A clock on which kernels of a part of the rows take that part of the time."""

    def __init__(self, clock: Clock):
        self.clock, self.part = clock, 1.0

    def kernel(self, seconds: float) -> None:
        self.clock.kernel(seconds * self.part)


class Chain:
    """Half layers: a norm on every rank, a divided body whose input gradient and output are summed,
    a residual.
    """

    def __init__(
        self,
        bench: Bench,
        times: Times,
        group: dist.ProcessGroup | None,
        clock: Clock,
        recompute: bool,
        overlap: bool,
    ):
        self.bench, self.clock = bench, PerRow(clock)
        scales = [nn.Parameter(torch.full((bench.width,), 0.5)) for _ in range(2 * bench.layers)]
        self.grads = {scale: Gradient(torch.zeros(bench.width)) for scale in scales}
        sink = WeightGradients(self.grads)
        work, kind = (
            Work(times, self.clock, sink),
            Collective.ALL_REDUCE if group else Collective.NONE,
        )
        segments = [
            s for unit, scale in enumerate(scales) for s in _half_layer(unit, scale, work, kind)
        ]
        again = [(2 * layer, 2 * layer + 1) for layer in range(bench.layers)] if recompute else []
        self.last = f"h{len(scales)}"
        self.engine = Interpreter(
            segments,
            again,
            outputs=(self.last,),
            group=group,
            weights=sink,
            device=torch.device("cpu"),
            overlap=overlap,
        )

    def begin(self, parts: int) -> list[State]:
        """A micro-batch, in so many parts."""
        self.clock.part = 1 / parts
        states = []
        for _ in range(parts):
            state = State(Common({}), training=True)
            state.values["h0"] = torch.ones(self.bench.rows // parts, self.bench.width)
            states.append(state)
        return states

    def forward(self, states: list[State]) -> list[Pass]:
        return [Pass(self.engine, state, self.engine.forward_runs) for state in states]

    def again(self, states: list[State]) -> list[Pass]:
        for state in states:
            state.recomputed = True
        return [Pass(self.engine, state, self.engine.recompute_runs) for state in states]

    def backward(self, states: list[State]) -> list[Pass]:
        for state in states:
            self.engine.take(state, self.last)
            state.add_grad(self.last, torch.ones(self.bench.rows // len(states), self.bench.width))
        return [Pass(self.engine, state, self.engine.backward_runs(state)) for state in states]

    def settle(self, states: list[State]) -> None:
        """Wait for what is under way."""
        for state in states:
            for name in [*state.works]:
                state.wait(name)
            state.take_grad("h0")


def _half_layer(unit: int, scale: nn.Parameter, work: Work, kind: Collective) -> list[Segment]:
    def enter(common: Common, h: Tensor) -> tuple[Tensor, ...]:
        return h * 0.5, h.view_as(h)

    def body(common: Common, normed: Tensor) -> tuple[Tensor, ...]:
        return (Scaled.apply(normed, scale, work),)

    def leave(common: Common, summed: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
        return (summed + kept,)

    normed, kept, summed = (f"{name}{unit}" for name in ("normed", "kept", "summed"))
    return [
        Segment(unit, 0, enter, (In(f"h{unit}"),), (Out(normed), Out(kept))),
        Segment(
            unit,
            1,
            body,
            (In(normed, kind),),
            (Out(summed, kind, inplace=True),),
            parameters=(scale,),
            sharded=True,
        ),
        Segment(unit, 2, leave, (In(summed), In(kept)), (Out(f"h{unit + 1}"),)),
    ]


def step(chain: Chain, mode: str, recompute: bool) -> dict[str, float]:
    """Seconds by phase."""
    states = chain.begin(2 if mode == "sub-pipeline" else 1)
    now = chain.clock.clock.now
    marks = [now()]

    def run(passes: list[Pass], *settled: State) -> None:
        execute(passes)
        chain.settle([*settled])
        marks.append(now())

    run(chain.forward(states), *states)
    if mode == "pair":
        others = chain.begin(1)
        run([*chain.forward(others), *chain.backward(states)], *others, *states)
        return {"F|B": marks[2] - marks[1]}
    if recompute:
        run(chain.again(states), *states)
    run(chain.backward(states), *states)
    names = ("F", "R", "B") if recompute else ("F", "B")
    return {
        name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)
    }


def predict(
    rank: int, world_size: int, bench: Bench, compute: dict[str, float]
) -> dict[tuple[str, bool], dict]:
    """Modelled seconds by phase, given what computing alone was measured to take: by way of
    overlap, recomputing.
    """
    link = LINKS["ethernet-1g"]
    clock = LogicalClock(Cluster(DEVICES["cpu"], 1, link, link))
    register(clock)
    group = dist.new_group([0, 1], backend="emu")
    forward, backward = (compute[phase] / (2 * bench.layers) for phase in "FB")
    times = Times(forward, backward / 2, backward / 2)
    found = {}
    for recompute in (False, True):
        for mode in MODES[1:]:
            chain = Chain(bench, times, group, clock, recompute=recompute, overlap=mode != "none")
            found[mode, recompute] = step(chain, mode, recompute)
    return found


def main(rank: int, bench: Bench) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(bench.store, 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    times = Times(bench.forward, bench.forward, bench.forward)
    found = []
    for repeat in range(bench.repeats + 1):
        for recompute in (False, True):
            for mode in MODES:
                group = dist.group.WORLD if mode != "compute" else None
                chain = Chain(
                    bench, times, group, WallClock(), recompute=recompute, overlap=mode != "none"
                )
                dist.barrier()
                seconds = step(chain, mode, recompute)
                gradient = torch.stack([grad.total for grad in chain.grads.values()]).norm().item()
                if repeat:  # the first round warms up
                    found.append(
                        {
                            "mode": mode,
                            "recompute": recompute,
                            "seconds": seconds,
                            "gradient": gradient,
                        }
                    )
    Path(f"{bench.results}.{rank}").write_text(json.dumps({"bench": asdict(bench), "runs": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Bench(**json.loads(sys.argv[2])))

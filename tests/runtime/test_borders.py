"""Stage borders that several values cross: some with gradients, some without, some only passing
through.
"""

import pytest
import torch
from torch import nn

from megatron_merak.parallel.buffers import BufferEntry, ParameterBuffer
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.plan import Grid
from megatron_merak.runtime.executor import Executor
from megatron_merak.runtime.parameters import RankParameters
from megatron_merak.runtime.program import Program
from megatron_merak.runtime.stage import Stage
from megatron_merak.segment import Crossing, In, Out, Segment
from tests.ranks import run_ranks

CPU = torch.device("cpu")
WIDTH = 4


def weights():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(4)]


def batches(count):
    """Micro-batches of different lengths."""
    generator = torch.Generator().manual_seed(4)
    return [{"x": torch.randn(2 + k % 2, WIDTH, generator=generator)} for k in range(count)]


def functions(w):
    """Units 0 to 3; a crosses to units 1 and 3, chosen (int64) to unit 3, b to 2, c to 3."""

    def zero(common):
        a = common["x"] @ w[0]
        return a, a.argmax(-1)

    def one(common, a):
        return (torch.tanh(a @ w[1]),)

    def two(common, b):
        return (torch.tanh(b @ w[2]) * b,)

    def three(common, a, chosen, c):
        return ((((c + a) @ w[3]).square() * (1 + chosen.unsqueeze(-1))).sum(),)

    return zero, one, two, three


READS = [[], ["a"], ["b"], ["a", "chosen", "c"]]
MAKES = [["a", "chosen"], ["b"], ["c"], ["loss"]]
BORDERS = [["a", "chosen"], ["a", "chosen", "b"], ["a", "chosen", "c"]]


def program(stage, stages, w, rows):
    """The units of a stage: one each for four stages; (0, 1) and (2, 3) for two."""
    size = 4 // stages
    fns, units = functions(w), range(stage * size, (stage + 1) * size)
    segments = tuple(
        Segment(
            u,
            0,
            fns[u],
            tuple(In(name, grad=name != "chosen") for name in READS[u]),
            tuple(Out(name) for name in MAKES[u]),
            (w[u],),
        )
        for u in units
    )

    def crossing(name):
        whole = name == "chosen"
        return Crossing(
            name,
            (rows,) if whole else (rows, WIDTH),
            torch.int64 if whole else torch.float32,
            not whole,
        )

    sources = tuple(crossing(name) for name in BORDERS[units[0] - 1]) if stage else ()
    targets = tuple(crossing(name) for name in BORDERS[units[-1]]) if stage < stages - 1 else ()
    return Program(segments, dict, sources, targets, () if targets else ("loss",))


def _train(rank, stages, schedule, recompute, count):
    mesh = build_mesh(Grid(pp=stages), rank, CPU)
    size = 4 // stages
    mine = range(rank * size, (rank + 1) * size)
    buffer = ParameterBuffer(
        [[BufferEntry(str(u), (WIDTH, WIDTH), 0)] for u in mine], torch.float32, CPU
    )
    held, w = {}, [None] * 4
    for u in mine:
        buffer.parameter(str(u)).copy_(weights()[u])
        w[u] = nn.Parameter(buffer.parameter(str(u)))
        held[w[u]] = str(u)
    parameters = RankParameters(buffer, held, mesh)
    programs = {rows: program(rank, stages, w, rows) for rows in (2, 3)}
    kept = [(unit,) for unit in mine] if recompute else ()
    stage = Stage(
        rank, lambda batch, training, task: programs[len(batch["x"])], parameters, kept, mesh, 0
    )
    executor = Executor(
        {rank: stage}, add_communication(build_schedule(schedule, stages, count)), mesh
    )
    parameters.start_step()
    loss = executor.run(batches(count), 0, sum_losses=True)
    parameters.finish_step()
    assert stage.parts == {}
    return {u: buffer.grad(str(u)).clone() for u in mine}, None if loss is None else loss.total


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("stages", "schedule", "count"),
    [
        (1, "1f1b", 5),
        (2, "1f1b", 5),
        (4, "1f1b", 5),
        (4, "gpipe", 5),
        (2, "1f1b", 1),
        (2, "naive", 3),
    ],
)
def test_gradients_are_those_of_one_graph(stages, schedule, count, recompute):
    w = [nn.Parameter(x) for x in weights()]
    zero, one, two, three = functions(w)
    total = torch.zeros(())
    for batch in batches(count):
        a, chosen = zero(batch)
        (c,) = two(batch, *one(batch, a))
        total = total + three(batch, a, chosen, c)[0]
    total.backward()
    ranks = run_ranks(_train, stages, schedule, recompute, count)
    grads = {u: grad for found, _ in ranks for u, grad in found.items()}
    for u, parameter in enumerate(w):
        torch.testing.assert_close(grads[u], parameter.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ranks[-1][1], total.detach(), rtol=1e-6, atol=0)

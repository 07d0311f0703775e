"""Training on a GPU, rehearsed without one: nothing on the CPU, nothing mixed, and the host waits
twice per step.
"""

import re
from contextlib import suppress

import pytest
import torch
from torch import nn

from megatron_merak.plan import Grid
from tests.engines import step
from tests.graph.tiny import FAMILIES, tiny
from tests.parity.cases import Case

from .device import Rehearsal, StoppedError
from .trainers import captured, gpt, mesh_of, steps

pytestmark = pytest.mark.long

TRAINER, STEP = "megatron_merak/stages/token_losses.py", "megatron_merak/parallel/host_read.py"


def rehearse(build):
    """A step and an evaluation of the trainer that ``build`` makes, twice: the first computes
    tables, the second must find nothing inside micro-batches."""
    with Rehearsal() as rehearsal:
        trainer, batches = build()
        steps(trainer, batches)
        rehearsal.findings.clear()
        steps(trainer, batches)
    assert not rehearsal.inside(), "\n".join(rehearsal.inside())
    return rehearsal


def waits(rehearsal):
    """The files whose lines waited for the GPU outside of micro-batches."""
    return [finding.place.split(":")[0] for finding in rehearsal.findings if finding.kind == "sync"]


GPTS = [
    (Case("llama", dtype="bf16"), 0, 2),
    (
        Case("gpt2", hidden_dropout=0.1, attention_dropout=0.1, recompute="full", loss="per-token"),
        0,
        2,
    ),
    (Case("llama", tp=2, dp=2, overlap="pair", sharding="optim"), 3, 2),
    (Case("gpt2", tp=2, sequence_parallel=True, overlap="sub-pipeline", recompute="full"), 1, 2),
    (Case("qwen", tp=2, pp=2, schedule="interleaved", dtype="bf16"), 0, 2),
    (Case("gpt2", pp=2, schedule="zb-v"), 1, 4),
]


@pytest.mark.parametrize(("case", "rank", "micro_batches"), GPTS, ids=str)
def test_the_gpt_of_flags(case, rank, micro_batches):
    """The host waits once in a step, for loss and norm, and for the loss of the evaluation where
    the rank knows it.
    """
    ends = case.pp == 1 or rank == case.world - 1
    with mesh_of(Grid(tp=case.tp, dp=case.dp, pp=case.pp), rank) as mesh:
        found = rehearse(lambda: gpt(case, micro_batches, mesh))
    assert ("aten::addmm.dtype_out" in found.operations) == (case.dtype == "bf16")
    assert waits(found) == [STEP, *[TRAINER] * ends]


QUICK = ("llama", "gpt2", "mixtral", "t5", "bert", "vit")
# transformers gives the grouped product of experts to torch in bf16 alone, and else reads on the
# host what it groups
IN_BF16 = ("llama", "mixtral", "qwen3_moe", "gpt_oss", "phimoe")


def dtype_of(name):
    return "bfloat16" if name in IN_BF16 else "float32"


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in QUICK),
    ],
)
def test_captured(name):
    _, empty, batch = tiny(name)
    with mesh_of(Grid(), 0) as mesh:
        found = rehearse(lambda: captured(empty(), batch, mesh, dtype=dtype_of(name)))
    assert waits(found) == [STEP]


def _masked(batch):
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 12:] = 0
    return batch | {"attention_mask": mask}


def _shared_loss(batch):
    return batch | {"num_items_in_batch": torch.tensor(60)}


LAYOUTS = [
    (
        "llama",
        Grid(tp=2, dp=2),
        3,
        {"ddp_bucket_size": 4000, "use_distributed_optimizer": True},
        _masked,
    ),
    ("gpt2", Grid(tp=2, pp=2), 2, {"recompute_granularity": "full"}, dict),
    ("llama", Grid(tp=2), 1, {"tp_comm_overlap": "sub-pipeline"}, _shared_loss),
    ("mixtral", Grid(tp=2), 0, {"recompute_granularity": "full"}, dict),
]


@pytest.mark.parametrize(("name", "grid", "rank", "ways", "changed"), LAYOUTS)
def test_captured_on_a_layout(name, grid, rank, ways, changed):
    _, empty, batch = tiny(name, attention_dropout=0.1, attn_pdrop=0.1)
    with mesh_of(grid, rank) as mesh:
        rehearse(lambda: captured(empty(), changed(batch), mesh, ways, dtype=dtype_of(name)))


class Plant:
    """What is wrong with a function; nothing as long as a model is captured."""

    kind = ""


class Scaled(torch.autograd.Function):
    """Its gradient is not that of its forward, so that it stays one node of the graph."""

    @staticmethod
    def forward(ctx, x):
        if Plant.kind == "item":
            return x * x.sum().item()
        if Plant.kind == "branch":
            return x * 2 if x.sum() > 0 else x * 3
        if Plant.kind == "table":
            return x * torch.arange(8).to(x.device, non_blocking=True)
        if Plant.kind == "mixed":
            return x * torch.ones(8)
        if Plant.kind == "blocking":
            return x.cpu().to(x.device, non_blocking=True)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if Plant.kind == "backward":
            grad = grad * grad.max().item()
        if Plant.kind == "nonzero":
            grad = grad * grad[grad > 0].sum()
        return grad * 5


class Planted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = Scaled.apply(self.first(x))
        return {"loss": (self.last(hidden) * torch.tensor([1.0, 2.0] * 4)).square().mean()}


PLANTED = {
    "": [],
    "item": ["sync: aten::_local_scalar_dense at {} in forward: return x * x.sum().item()"],
    "branch": [
        "sync: aten::_local_scalar_dense at {} in forward: return x * 2 if x.sum() > 0 else x * 3"
    ],
    "table": ["cpu: aten::arange at {} in forward: return x * torch.arange(8)"],
    "mixed": [
        "cpu: aten::ones at {} in forward: return x * torch",
        "mixed: aten::mul.Tensor at {} in forward: return x",
    ],
    "blocking": ["sync: aten::_to_copy at {} in forward: return x.cpu()"],
    "backward": [
        "sync: aten::_local_scalar_dense at {} in backward: grad = grad * grad.max().item()"
    ],
    "nonzero": ["sync: aten::index.Tensor at {} in backward: grad = grad * grad[grad > 0].sum()"],
}


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_is_reported_with_its_line(kind, monkeypatch):
    with mesh_of(Grid(), 0) as mesh, Rehearsal() as rehearsal:
        trainer, batches = captured(Planted(), {"x": torch.randn(4, 8)}, mesh)
        step(trainer, batches, 1e-3, 0.1)
        rehearsal.findings.clear()
        monkeypatch.setattr(Plant, "kind", kind)
        with suppress(StoppedError):
            step(trainer, batches, 1e-3, 0.1)
    found = [re.sub(r"test_rehearsal.py:\d+", "{}", text) for text in rehearsal.inside()]
    wanted = [text.format("tests/rehearsal/{}") for text in PLANTED[kind]]
    assert len(found) == len(wanted) and all(
        a.startswith(b) for a, b in zip(found, wanted, strict=True)
    ), found

"""gloo through copies in host memory: every collective, messages by tag, and training with gloo's
own bits.

What is copied to the host is copied on a CPU too, so that all of it runs here but the device.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.staged import NAME, StagedGroup, register
from megatron_merak.plan import Grid
from tests.parity.cases import Case
from tests.parity.rig import mesh_of, train
from tests.ranks import run_ranks

from .collectives import bits, each_collective, whole

pytestmark = pytest.mark.long

CPU = torch.device("cpu")


def collectives(rank, n):
    register()
    group, wrong = dist.new_group(backend=NAME), []
    assert type(group) is StagedGroup
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
        for later in (False, True):
            for name, work, found, wanted in each_collective(
                rank, n, whole(seed, n, n * 9, dtype), 9, group, later
            ):
                if later:
                    assert work.wait() and work.is_completed() and work.wait()
                if not all(map(torch.equal, found, wanted)):
                    wrong.append((name, dtype, later))
    tensor = torch.full((3, 4), float(rank)).t()
    dist.reduce(tensor, 1, group=group)
    assert rank != 1 or torch.equal(tensor, torch.full((4, 3), n * (n - 1) / 2))
    dist.barrier(group=group)
    return wrong


@pytest.mark.parametrize("n", [2, 3])
def test_every_collective(n):
    assert run_ranks(collectives, n) == [[]] * n


def unfinished(rank, n):
    """A result is there once it was waited for, not before: what the caller has is not what gloo
    works on.
    """
    register()
    group, tensor = dist.new_group(backend=NAME), torch.full((4,), rank + 1.0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    before = tensor.clone()
    tensor.zero_()
    work.wait()
    return before.tolist(), tensor.tolist(), torch.equal(work.result()[0], tensor)


def test_results_come_with_the_wait():
    assert run_ranks(unfinished, 2) == [([rank + 1.0] * 4, [3.0] * 4, True) for rank in range(2)]


def messages(rank, n):
    register()
    group, other = dist.new_group(backend=NAME), 1 - rank
    sent = [torch.arange(6.0).view(2, 3).t() + 10 * rank + tag for tag in range(3)]
    works = [
        dist.isend(tensor.contiguous(), other, group=group, tag=tag)
        for tag, tensor in enumerate(sent)
    ]
    found = [torch.empty(3, 2) for _ in sent]
    for tag in (2, 0, 1):
        dist.irecv(found[tag], other, group=group, tag=tag).wait()
    for work in works:
        work.wait()
    return all(torch.equal(a, b - 10 * rank + 10 * other) for a, b in zip(found, sent, strict=True))


def test_messages_are_matched_by_tag():
    assert run_ranks(messages, 2) == [True, True]


def training(rank, n, case, store):
    """The same run over gloo, and with the job's backend staged."""
    gloos = bits(train(case, mesh_of(case, rank)))
    dist.destroy_process_group()
    register()
    dist.init_process_group(NAME, init_method=f"file://{store}", rank=rank, world_size=n)
    mesh = build_mesh(Grid(tp=case.tp, dp=case.dp, pp=case.pp), rank, CPU)
    groups = [group for group in (mesh.tp, mesh.dp, mesh.pp, mesh.model) if group is not None]
    assert groups and all(type(group) is StagedGroup for group in groups)
    assert dist.get_backend(mesh.control) == "gloo"
    return bits(train(case, mesh)) == gloos


@pytest.mark.parametrize(
    ("n", "case"),
    [
        (2, Case("llama", tp=2, sequence_parallel=True, overlap="sub-pipeline")),
        (2, Case("gpt2", pp=2, schedule="zb-h1")),
        (4, Case("llama", pp=2, dp=2, schedule="interleaved", dtype="bf16", sent_in_bf16=True)),
    ],
    ids=lambda value: str(value),
)
def test_training_has_gloos_bits(n, case, tmp_path):
    assert run_ranks(training, n, case, str(tmp_path / "store"), timeout=120) == [True] * n

"""Several ranks on one GPU, over gloo, train as one process that runs HuggingFace's model on a CPU
does.
"""

import datetime

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel import peer_group, staged
from megatron_merak.parallel.launch import launch
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.p2p import Pipes
from megatron_merak.parallel.peer_kernels import load_kernels
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.passes import add_communication
from megatron_merak.plan import Grid
from tests.parity.cases import Case
from tests.parity.rig import mesh_of, put_together, train
from tests.parity.test_parity import check
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def on_one_gpu(rank, world_size, case, store):
    dist.destroy_process_group()
    staged.register()
    dist.init_process_group(
        staged.NAME, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    return train(case, mesh_of(case, rank, torch.device("cuda", 0)))


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", tp=2),
        Case("llama", tp=2, sequence_parallel=True, overlap="sub-pipeline", recompute="full"),
        Case("qwen", pp=2, schedule="1f1b", loss="per-token"),
        Case("gpt2", pp=2, schedule="zb-v"),
        Case("llama", dp=2, early=True),
        Case("llama", tp=2, pp=2, schedule="interleaved", overlap="pair"),
        Case("llama", tp=2, pp=2, dtype="bf16", recompute="block"),
    ],
    ids=str,
)
def test_equals_one_process(case, tmp_path):
    outcomes = run_ranks(on_one_gpu, case.world, case, str(tmp_path / "store"), timeout=240)
    check(case, put_together(outcomes))


def over_peer_memory(rank, world_size, case, store, patience):
    dist.destroy_process_group()
    device = torch.device("cuda", 0)
    staged.register()
    peer_group.register(device, staged=True)
    dist.init_process_group(
        staged.NAME, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    limit = datetime.timedelta(seconds=patience)  # also of kernels that wait for a peer
    mesh = build_mesh(
        Grid(tp=case.tp, pp=case.pp), rank, device, limit, collectives=peer_group.NAME
    )
    outcome = train(case, mesh)
    assert mesh.tp is None or mesh.tp.sums._memory.reason == ""
    pipes = Pipes(mesh, add_communication(build_schedule(case.schedule, case.pp, 6)))
    assert mesh.pp is None or pipes._mailboxes is not None
    return outcome


@pytest.mark.skipif(load_kernels() is None, reason="no CUDA kernels")
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", tp=2),
        Case("qwen", pp=2, schedule="zb-v"),
        Case("llama", tp=2, pp=2, overlap="sub-pipeline"),
    ],
    ids=str,
)
def test_equals_one_process_over_peer_memory(case, tmp_path, patience):
    """The engine's sums and messages, each on a stream beside the one that computes."""
    outcomes = run_ranks(
        over_peer_memory, case.world, case, str(tmp_path / "store"), patience, timeout=240
    )
    check(case, put_together(outcomes))


def test_ranks_share_gpus_where_they_are_asked_to(monkeypatch):
    count = torch.cuda.device_count()
    monkeypatch.setenv("LOCAL_RANK", str(count))
    assert launch(staged.NAME).device == torch.device("cuda", 0)

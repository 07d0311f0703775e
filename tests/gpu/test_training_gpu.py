"""Several ranks on one GPU, over gloo, train as one process that runs HuggingFace's model on a CPU does."""

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel import staged
from megatron_merak.parallel.launch import launch
from tests.parity.cases import Case
from tests.parity.rig import mesh_of, put_together, train
from tests.parity.test_parity import check
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def on_one_gpu(rank, world_size, case, store):
    dist.destroy_process_group()
    staged.register()
    dist.init_process_group(staged.NAME, init_method=f"file://{store}", rank=rank, world_size=world_size)
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


def test_ranks_share_gpus_where_they_are_asked_to(monkeypatch):
    count = torch.cuda.device_count()
    monkeypatch.setenv("LOCAL_RANK", str(count))
    assert launch(staged.NAME).device == torch.device("cuda", 0)

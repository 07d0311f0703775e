"""What tests beside megatron-core share."""

import pytest
import torch.distributed as dist

from .megatron_core import without_a_gpu


@pytest.fixture
def core(tmp_path, monkeypatch):
    """megatron-core in one process without a GPU."""
    store = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    without_a_gpu(monkeypatch)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()

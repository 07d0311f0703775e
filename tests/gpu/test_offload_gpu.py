"""Offloaded tapes on a GPU: the numbers of a run that keeps all there, and the memory that is free."""

from dataclasses import replace

import pytest
import torch

from megatron_merak.config import Config, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.planner import plan
from megatron_merak.planner.predict import priced
from tests.engines import gpt_model

SHAPE = ModelConfig(
    num_layers=8,
    hidden_size=512,
    num_attention_heads=8,
    seq_length=512,
    vocab_size=1000,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    disable_bias_linear=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def samples(seed, device):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1000, (4, 513), generator=generator)
    batch = {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": torch.ones(4, 512),
        "position_ids": torch.arange(512).expand(4, -1),
    }
    return {name: value.contiguous().to(device) for name, value in batch.items()}


def stepped(device, offload):
    """Loss and gradients of three steps, the peak of their memory, and what is predicted of the
    host's.
    """
    train = TrainConfig(micro_batch_size=4, global_batch_size=8)
    made = plan(Config(model=SHAPE, parallel=ParallelConfig(), train=train), 1)
    made = priced(replace(made, stages=(replace(made.stages[0], offload=offload),)))
    config = Config(model=SHAPE, parallel=ParallelConfig(), train=train)
    model = gpt_model(config, made, build_mesh(made.grid, 0, device))
    batches = model.from_samples([samples(seed, device) for seed in range(2)])
    found = []
    for step in range(3):
        if device.type == "cuda" and step == 1:  # the first one captures
            torch.cuda.reset_peak_memory_stats(device)
        loss = model.gradients(batches)
        found.append((loss, model.buffer.main_grad.clone().cpu()))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return found, peak, sum(made.predicted_host_bytes)


def compare(device):
    plain, most, _ = stepped(device, ())
    away, least, host = stepped(device, tuple(range(1, 9)))
    for (loss, grad), (loss_away, grad_away) in zip(plain, away, strict=True):
        assert loss == loss_away and grad.any()
        # kernels of attention may add up in any order
        assert (grad - grad_away).abs().max() <= 1e-6 * grad.abs().max()
    return most - least, host


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_offloading_changes_no_number_and_frees_memory():
    freed, host = compare(torch.device("cuda", 0))
    assert (
        freed > host / 4
    )  # two of eight layers are on the device at a time; kernels may keep less

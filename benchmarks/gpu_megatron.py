"""Megatron-core's GPT layers in a plain training step on one device, where the package megatron-core is installed.

With Transformer Engine they are Megatron's fast ones, else its plain PyTorch ones: the row's notes say which. The
optimizer is AdamW on fp32 masters, fused, as in benchmarks/step.py.
"""

import importlib.util
import tempfile

import torch
import torch.distributed as dist
from cases import ModelShape
from gpu_rows import Row, Shape
from gpu_stopwatch import Stopwatch
from peer_megatron import gpt_model
from peer_optimizer import MasterStep
from torch.nn.utils import get_total_norm


def run_megatron(row: Row, shape: Shape, stopwatch: Stopwatch) -> None:
    """Take the stopwatch's steps."""
    device = stopwatch.device
    with tempfile.NamedTemporaryFile() as store:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store.name}.ranks", rank=0, world_size=1)
    fast = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    model = gpt_model(model_shape(shape, stopwatch.sequence), torch.bfloat16, 1, device, fast).to(device)
    step = MasterStep(list(model.parameters()), get_total_norm)
    positions = torch.arange(stopwatch.sequence, device=device)[None]
    hidden = None if fast else torch.ones(1, 1, *2 * [stopwatch.sequence], dtype=torch.bool, device=device).triu(1)
    stopwatch.notes = {"layers": "Transformer Engine" if fast else "local"}
    generator = torch.Generator().manual_seed(0)
    for _ in range(stopwatch.steps):
        size = (row.micro_batches, stopwatch.sequence + 1)
        tokens = torch.randint(shape.vocabulary, size, generator=generator).to(device)
        total = torch.zeros((), device=device)
        for micro in tokens.split(1):
            losses = model(micro[:, :-1].contiguous(), positions, hidden, labels=micro[:, 1:].contiguous())
            loss = losses.mean() / row.micro_batches
            loss.backward()
            total += loss.detach()
        step()
        stopwatch.loss(total.item())
        stopwatch.step()
    dist.destroy_process_group()


def model_shape(shape: Shape, sequence: int) -> ModelShape:
    """The shape in the words of benchmarks/step.py, which has no groups of queries."""
    assert shape.groups == shape.heads and shape.experts == 1, shape.title
    return ModelShape(
        shape.layers, shape.hidden, shape.heads, shape.ffn, shape.vocabulary, sequence,
        rotary_base=float(shape.rotary_base),
    )  # fmt: skip

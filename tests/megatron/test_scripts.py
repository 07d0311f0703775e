"""The script that docs/from_megatron_lm.md shows, and a training step under either import line."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

from tests.megatron.peers import on_cpu
from tests.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "from_megatron_lm.md"
LINE = "from megatron_merak.megatron import ModelParallelConfig, parallel_state, tensor_parallel"
THEIRS = "from megatron.core import ModelParallelConfig, parallel_state, tensor_parallel"
STEP = f"""
import torch

{LINE}

parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
tensor_parallel.model_parallel_cuda_manual_seed(1234)
config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)


def draw(weight):
    torch.manual_seed(weight.numel())
    weight.copy_(torch.randint(-2, 3, weight.shape).float())


first = tensor_parallel.ColumnParallelLinear(8, 16, config=config, init_method=draw)
second = tensor_parallel.RowParallelLinear(
    16, 8, config=config, init_method=draw, bias=True, input_is_parallel=True, skip_bias_add=False
)
ids = tensor_parallel.broadcast_data(["ids"], {{"ids": torch.arange(12).view(3, 4)}}, torch.int64)
words = tensor_parallel.VocabParallelEmbedding(12, 8, config=config, init_method=draw)
parameters = [*words.parameters(), *first.parameters(), *second.parameters()]
optimizer = torch.optim.SGD(parameters, lr=2.0**-10)
for _ in range(3):
    optimizer.zero_grad()
    hidden = words(ids["ids"]).transpose(0, 1)
    out, _ = second(torch.relu(first(hidden)[0]))
    loss = (out * out).sum()
    loss.backward()
    optimizer.step()
"""


def shown():
    text = PAGE.read_text(encoding="utf-8")
    return next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if LINE in b)


def run_shown(_rank, _size, code):
    names = {}
    exec(code.replace('torch.distributed.init_process_group("gloo")\n', ""), names)
    return tuple(names["hidden"].shape), names["hidden"].std().item()


def test_the_page_shows_a_script_that_runs():
    (shape, first), (_, second) = run_ranks(run_shown, 2, shown())
    assert shape == (16, 4, 128)
    assert first != second, "the ranks drew the same weights"


def steps(_rank, _size):
    ours, theirs = {}, {}
    exec(STEP, ours)
    with on_cpu():
        exec(STEP.replace(LINE, THEIRS), theirs)
    assert torch.equal(ours["loss"], theirs["loss"])
    pairs = zip(ours["parameters"], theirs["parameters"], strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert "megatron_merak" in ours["tensor_parallel"].__name__
    return ours["loss"].item(), dist.get_world_size()


def test_a_script_changes_one_line():
    (loss, size), _ = run_ranks(steps, 2)
    assert size == 2 and loss > 0

"""Two ranks of FSDP2 train, and save as programs do; what is read equals their tensors to the bit, and
what is written is loaded by them and trains on as if nothing had happened.
"""

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import fsdp_utils
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from megatron_merak.formats.dcp import ACCELERATE, PLAIN, read_dcp, write_dcp_state
from megatron_merak.formats.dcp_files import DcpFiles
from tests.ranks import run_ranks

from ..checkpoint.hf_models import build

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()
LR = 0.03125
BETAS = (0.875, 0.96875)


def trained(seed: int, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """An FSDP2 model and its optimizer, after a number of steps."""
    model: Any = build("llama", seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.25}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 96, (2, 8), generator=generator)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def full(tensors: dict[str, Any]) -> dict[str, Any]:
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in whole.items()}


def flat_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor and number of a model and its optimizer, gathered."""
    state = full(get_optimizer_state_dict(model, optimizer, options=FLAT))
    return {**full(get_model_state_dict(model)), **state}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name


def plugin() -> Any:
    return SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
    )


def job() -> Any:
    """What accelerate's functions ask of an Accelerator."""
    return SimpleNamespace(
        num_processes=2,
        process_index=dist.get_rank(),
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )


def save(model: Any, optimizer: torch.optim.Optimizer, root: Path) -> list[Path]:
    """Save in every form there is."""
    fsdp_utils.logger = logging.getLogger(__name__)  # theirs needs a job of accelerate's own
    for name, options in (("flat", FLAT), ("nested", NESTED)):
        optim = get_optimizer_state_dict(model, optimizer, options=options)
        state = {"model": get_model_state_dict(model), "optim": optim}
        dcp.save({"app": state} if options is NESTED else state, checkpoint_id=root / name)
    both = {"fsdp_plugin": plugin(), "accelerator": job(), "model": model}
    directory = str(root / "accelerate")
    fsdp_utils.save_fsdp_model(output_dir=directory, **both)
    fsdp_utils.save_fsdp_optimizer(optimizer=optimizer, output_dir=directory, **both)
    return [root / name for name in ("flat", "nested", "accelerate")]


def check_read(directory: Path, config: Path, state: dict[str, Any]) -> Any:
    """Return what is read, once each tensor of it equals the gathered one."""
    lines: list[str] = []
    found = read_dcp(directory, config, allow_pickle=True, say=lines.append)
    assert "HuggingFace's names of LlamaForCausalLM" in lines[0] and "after 2 steps" in lines[0]
    assert (found.iteration, found.optimizer_steps) == (2, 2)
    names = found.kinds["model"].names()
    assert len(names) == 21
    for name in names:
        assert torch.equal(found.kinds["model"].read(name), state[name]), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found.kinds[kind].read(name), state[f"state.{name}.{kind}"]), name
    rows = ((40, 60), (3, 5))
    part = found.kinds["exp_avg"].read("lm_head.weight", 0, rows)
    whole = state["state.lm_head.weight.exp_avg"]
    assert torch.equal(part, torch.cat([whole[40:60], whole[3:5]]))
    assert sorted(group["weight_decay"] for group in found.groups) == [0.0, 0.25]
    assert {(group["lr"], tuple(group["betas"])) for group in found.groups} == {(LR, BETAS)}
    return found


def check_uneven(rank: int, directory: Path) -> None:
    """Shards of which one is longer, or empty."""
    mesh = init_device_mesh("cpu", (2,))
    values = {f"rows {rows}": torch.arange(3.0 * rows).view(rows, 3) for rows in (1, 2, 5)}
    sharded = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in values.items()}
    dcp.save(sharded, checkpoint_id=directory)
    if rank == 0:
        files = DcpFiles(directory, allow_pickle=True)
        assert all(torch.equal(files.read(name), values[name]) for name in values)


def there_and_back(rank: int, world: int, root: Path, config: Path) -> None:
    check_uneven(rank, root / "uneven")
    model, optimizer = trained(seed=0, steps=2)
    state = flat_state(model, optimizer)
    for directory in save(model, optimizer, root):
        if rank == 0:
            found = check_read(directory, config, state)
    if rank == 0:
        write_dcp_state(found, root / "ours", PLAIN, chunk_bytes=1000)
        write_dcp_state(found, root / "ours-accelerate", ACCELERATE)
        check_read(root / "ours", root / "ours", state)
    dist.barrier()
    train(model, optimizer, 2)
    unbroken = flat_state(model, optimizer)
    for load in (load_flat, load_nested, load_with_accelerate):
        other, fresh = trained(seed=1, steps=0)
        load(other, fresh, root)
        assert_same(flat_state(other, fresh), state)
        train(other, fresh, 2)
        assert_same(flat_state(other, fresh), unbroken)


def load_flat(model: Any, optimizer: torch.optim.Optimizer, root: Path) -> None:
    load_dcp(model, optimizer, root / "ours", FLAT)


def load_nested(model: Any, optimizer: torch.optim.Optimizer, root: Path) -> None:
    load_dcp(model, optimizer, root / "ours", NESTED)


def load_dcp(
    model: Any, optimizer: torch.optim.Optimizer, directory: Path, options: StateDictOptions
) -> None:
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)


def load_with_accelerate(model: Any, optimizer: torch.optim.Optimizer, root: Path) -> None:
    both = {"fsdp_plugin": plugin(), "accelerator": job(), "model": model}
    directory = str(root / "ours-accelerate")
    fsdp_utils.load_fsdp_model(input_dir=directory, **both)
    fsdp_utils.load_fsdp_optimizer(optimizer=optimizer, input_dir=directory, **both)


@pytest.mark.timeout(120)
def test_two_ranks_of_fsdp2_there_and_back(tmp_path):
    config = copy.copy(build("llama").config)
    config.save_pretrained(tmp_path / "config")
    run_ranks(there_and_back, 2, tmp_path, tmp_path / "config", timeout=100)

"""Trainers of TRL, parallelized, beside themselves in one process: losses, norms, every metric, files, weights."""

import functools
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_merak.trl import parallelize
from tests.ranks import run_ranks
from tests.trl_trainers.cases import CASES, history, train

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {"per_device_train_batch_size": 2},
    "dp2-sharded": {"per_device_train_batch_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
    "tp2-pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2-dp2": {"tensor_model_parallel_size": 2, "per_device_train_batch_size": 2},
}
QUICK = {
    2: [
        ("sft", "tp2"),
        ("sft-lora", "dp2-sharded"),
        ("dpo", "pp2"),
        ("dpo-lora", "tp2"),
        ("reward", "dp2"),
    ],
    4: [("sft-completions", "tp2-pp2")],
}


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    monkeypatch.setenv("CI", "1")


@functools.cache
def reference(name):
    """What TRL gives in one process: its log, and the directory that it saved."""
    directory = tempfile.mkdtemp()
    trainer = train(name, directory)
    trainer.save_model()
    return history(trainer), directory


def parallel(name, directory, **more):
    trainer = train(name, directory, parallelize, **more)
    trainer.save_model()
    return history(trainer)


def check(name, found, directory):
    wanted, theirs = reference(name)
    assert [entry.keys() for entry in found] == [entry.keys() for entry in wanted]
    for entry, other in zip(found, wanted, strict=True):
        for key, value in other.items():
            assert entry[key] == pytest.approx(value, rel=2e-4, abs=2e-5), (name, key, entry["step"])
    (file,) = [path.name for path in Path(theirs).glob("*.safetensors")]
    ours, expected = load_file(Path(directory) / file), load_file(Path(theirs) / file)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["sft", "sft-packed", pytest.param("dpo-mixed", marks=pytest.mark.long), "reward"])
def test_one_process(name, tmp_path):
    check(name, parallel(name, str(tmp_path)), tmp_path)


def several(rank, world_size, rows, directory):
    os.environ["CI"] = "1"
    return [parallel(name, f"{directory}/{name}-{layout}", **LAYOUTS[layout]) for name, layout in rows]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.long
def test_layouts(ranks, tmp_path):
    logs = run_ranks(several, ranks, QUICK[ranks], str(tmp_path), timeout=500)
    for rank in logs:
        for (name, layout), found in zip(QUICK[ranks], rank, strict=True):
            check(name, found, tmp_path / f"{name}-{layout}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_every_layout(name, tmp_path):
    for ranks, layouts in ((2, ("tp2", "pp2", "dp2", "dp2-sharded")), (4, ("tp2-pp2", "tp2-dp2"))):
        # Experts are balanced within a batch, and replicas have smaller ones.
        rows = [(name, layout) for layout in layouts if name != "sft-moe" or "dp2" not in layout]
        for rank in run_ranks(several, ranks, rows, str(tmp_path), timeout=500):
            for (_, layout), found in zip(rows, rank, strict=True):
                check(name, found, tmp_path / f"{name}-{layout}")


def test_a_reference_model_is_not_saved(tmp_path):
    parallel("dpo", str(tmp_path))
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / "model.safetensors") if "merak" in key]

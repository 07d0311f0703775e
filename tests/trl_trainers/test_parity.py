"""Trainers of TRL, parallelized, beside themselves in one process: losses, norms, every metric,
files, weights.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_merak.trl import parallelize
from tests.choice import later
from tests.ranks import run_ranks
from tests.trl_trainers.cases import CASES, history, train

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {"per_device_train_batch_size": 2},
    "dp2-sharded": {
        "per_device_train_batch_size": 2,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
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


# Losses that are means of a batch, and rows that do not divide by the batch, are others on two
# replicas, under TRL too.
OF_BATCHES = ("entropy", "mean_token_accuracy", "num_tokens", "eval_num_tokens")
OF_REPLICAS = ("sft-moe", "sft-packed", "dpo-mixed")


@functools.cache
def reference(name, ranks=1):
    """What TRL gives in one process, or on ranks of torchrun's: its log, and the directory that it
    saved.
    """
    directory = tempfile.mkdtemp()
    if ranks > 1:
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        command = [sys.executable, *command, "-m", "tests.trl_trainers.on_ranks", name, directory]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
        return json.loads(Path(directory, "history.json").read_text()), directory
    trainer = train(name, directory)
    trainer.save_model()
    return history(trainer), directory


def parallel(name, directory, **more):
    trainer = train(name, directory, parallelize, **more)
    trainer.save_model()
    return history(trainer)


def check(name, found, directory, ranks=1):
    wanted, theirs = reference(name, ranks)
    assert [entry.keys() for entry in found] == [entry.keys() for entry in wanted]
    for entry, other in zip(found, wanted, strict=True):
        for key, value in other.items():
            if ranks > 1 and key in OF_BATCHES:  # docs/trl.md: of an epoch's last batch
                continue
            assert entry[key] == pytest.approx(value, rel=2e-4, abs=2e-5), (
                name,
                key,
                entry["step"],
            )
    (file,) = [path.name for path in Path(theirs).glob("*.safetensors")]
    ours, expected = load_file(Path(directory) / file), load_file(Path(theirs) / file)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            ours[key], value, rtol=1e-4, atol=2e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("name", ["sft", *map(later, ("sft-packed", "dpo-mixed", "reward"))])
def test_one_process(name, tmp_path):
    check(name, parallel(name, str(tmp_path)), tmp_path)


def several(rank, world_size, rows, directory):
    os.environ["CI"] = "1"
    return [
        parallel(name, f"{directory}/{name}-{layout}", **LAYOUTS[layout]) for name, layout in rows
    ]


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
        rows = [(name, layout) for layout in layouts]
        for rank in run_ranks(several, ranks, rows, str(tmp_path), timeout=500):
            for (_, layout), found in zip(rows, rank, strict=True):
                replicas = 2 if "dp2" in layout and name in OF_REPLICAS else 1
                check(name, found, tmp_path / f"{name}-{layout}", replicas)


def test_a_reference_model_is_not_saved(tmp_path):
    parallel("dpo", str(tmp_path), max_steps=1, eval_strategy="no")
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / "model.safetensors") if "merak" in key]

"""Training with parameter servers beside the same training by collectives: losses, norms, every weight and moment."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_merak.config import HFConfig
from tests.ranks import run_ranks

from .jobs import job

SYNC, ASYNC = "--data-parallel-strategy ps-sync", "--data-parallel-strategy ps-async"
STEPS = "--train-iters 4 --eval-iters 1 --micro-batch-size 1 --clip-grad 0.5"
CONSTANT = "--lr-decay-style constant"  # however many steps there are


def run(ranks: int, flags: str, directory: Path, config=None, timeout: float = 120) -> list[str]:
    given = f"{flags} --save {directory / 'run'} --metrics {directory / 'metrics'}"
    return run_ranks(job, ranks, given, *([] if config is None else [config]), timeout=timeout)


def records(directory: Path, kind: str = "train") -> list[dict]:
    rows = [json.loads(line) for line in (directory / "metrics").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def saved(directory: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file of the newest checkpoint: by kind, then by rank."""
    (checkpoint,) = (directory / "run").glob("iter_*")
    return [load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))]


def equal(one: Path, other: Path) -> None:
    """Bit for bit, whatever layout of the same degrees of tensor and pipeline parallelism wrote them."""
    for ours, theirs in zip(saved(one), saved(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


def compare(tmp_path: Path, flags: str, workers: int, ranks: int, servers: int, config=None) -> None:
    one, other = tmp_path / "collectives", tmp_path / "served"
    run(workers * ranks, f"{STEPS} {flags}", one, config)
    told = run(
        workers * ranks + servers,
        f"{STEPS} {flags} {SYNC}" + f" --num-parameter-servers {servers}" * bool(servers),
        other,
        config,
    )
    for ours, theirs in zip(records(other), records(one), strict=True):
        assert (ours["iteration"], ours["consumed_samples"]) == (theirs["iteration"], theirs["consumed_samples"])
        assert ours["loss"] == theirs["loss"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-12, nan_ok=True)
        assert ours.get("loss_scale") == theirs.get("loss_scale")
    for kind in ("valid", "test"):  # one worker evaluates what two shared
        assert records(other, kind)[0]["loss"] == pytest.approx(records(one, kind)[0]["loss"], rel=1e-6)
    equal(one, other)
    if servers:
        assert "4 updates" in told[-1]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "flags, workers, ranks, servers",
    [
        ("--hidden-dropout 0.1", 2, 1, 0),
        ("--bf16 --tensor-model-parallel-size 2", 2, 2, 1),
        pytest.param("--pipeline-model-parallel-size 2", 2, 2, 2, marks=pytest.mark.slow),
        pytest.param(
            "--fp16 --initial-loss-scale 65536 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
            "--untie-embeddings-and-output-weights",
            *(2, 4, 0),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --bf16", 2, 2, 1, marks=pytest.mark.slow
        ),
    ],
)
def test_workers_that_step_together_are_replicas(tmp_path, flags, workers, ranks, servers):
    compare(tmp_path, flags, workers, ranks, servers)


MODELS = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=130, architectures=["GPT2LMHeadModel"]),
    "llama": transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=130,
        architectures=["LlamaForCausalLM"],
    ),
    "mixtral": transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=130,
        architectures=["MixtralForCausalLM"],
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family, flags, ranks, servers",
    [
        ("gpt2", "", 1, 1),
        pytest.param("gpt2", "--pipeline-model-parallel-size 2", 2, 1, marks=pytest.mark.slow),
        pytest.param("llama", "--tensor-model-parallel-size 2 --bf16", 2, 0, marks=pytest.mark.slow),
        pytest.param("mixtral", "--bf16", 1, 2, marks=pytest.mark.slow),
        pytest.param("mixtral", "--fp16 --pipeline-model-parallel-size 2", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_captured_models_with_servers(tmp_path, family, flags, ranks, servers):
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODELS[family].to_dict()))
    compare(tmp_path, f"--model {model} {flags}", 2, ranks, servers, HFConfig)


@pytest.mark.timeout(200)
def test_a_run_goes_on_with_servers_or_without(tmp_path):
    first, unbroken = tmp_path / "first", tmp_path / "unbroken"
    run(2, f"--train-iters 2 {CONSTANT}", first)
    run(2, f"--train-iters 4 {CONSTANT}", unbroken)
    for strategy, servers in ((SYNC, 1), (ASYNC, 0)):
        resumed = tmp_path / strategy.split()[-1]
        more = f" --num-parameter-servers {servers}" if servers else ""
        run(2 + servers, f"--train-iters 4 {CONSTANT} --load {first / 'run'} {strategy}{more}", resumed)
        rows = records(resumed)
        if strategy == SYNC:
            assert [row["loss"] for row in rows] == [row["loss"] for row in records(unbroken)[2:]]
            equal(resumed, unbroken)
        else:
            assert rows[0]["iteration"] == 3 and 8 <= rows[0]["consumed_samples"] - 2 <= 10
        back = tmp_path / f"back-from-{strategy.split()[-1]}"
        run(2, f"--train-iters 6 {CONSTANT} --load {resumed / 'run'}", back)
        assert [row["iteration"] for row in records(back)] == [5, 6]


@pytest.mark.timeout(200)
def test_workers_that_do_not_wait_take_every_part_once_and_learn(tmp_path):
    told = run(3, f"--train-iters 40 {ASYNC} --num-parameter-servers 1", tmp_path)
    assert "80 updates, staleness" in told[-1]
    rows = records(tmp_path)
    assert rows[0]["consumed_samples"] in (2, 4) and len(rows) < 80 and rows[-1]["iteration"] == 40
    assert sum(row["loss"] for row in rows[-4:]) < 0.8 * sum(row["loss"] for row in rows[:4])
    assert all(row["staleness"] <= 8 for row in rows)

"""pretrain_hf.py with parameter servers as users run it: a directory with weights, data on disk,
every way to start.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_merak.data.indexed_dataset import IndexedDatasetWriter

from .launched import ROOT, environment, launcher

FLAGS = """--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-decay-style constant
    --log-interval 1 --eval-iters 1 --split 8,1,1 --distributed-timeout-minutes 1"""
DEDICATED, TOGETHER = "--num-parameter-servers 1", ""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> str:
    """Flags that name a directory with weights and a tokenizer, and data."""
    root = tmp_path_factory.mktemp("given")
    words = {f"w{i}": i for i in range(59)} | {"</s>": 59}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(
        root / "model"
    )
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=60)).save_pretrained(root / "model")
    with IndexedDatasetWriter(root / "data", np.int32) as writer:
        for number in range(60):
            writer.add_document([(3 * number + i * i) % 59 for i in range(20)] + [59])
    return (
        f"--model {root / 'model'} --data-path {root / 'data'} --data-cache-path {root / 'cache'}"
    )


def start(door: str, ranks: int, flags: str) -> str:
    """What a job prints. door: "launch" for merak-launch, else the script starts its ranks
    itself.
    """
    script = str(ROOT / "pretrain_hf.py")
    head = (
        [sys.executable, script, "--nproc-per-node", str(ranks)]
        if door == "script"
        else [*launcher(ranks), script]
    )
    command = [*head, *FLAGS.split(), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(path: Path, kind: str = "train") -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["iteration"]: row["loss"] for row in rows if row["kind"] == kind}


def same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (one, other))
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "door, servers", [("launch", DEDICATED), ("launch", TOGETHER), ("script", DEDICATED)]
)
def test_workers_that_wait_are_replicas_and_checkpoints_go_both_ways(
    tmp_path, given, door, servers
):
    ranks, sync = 2 + bool(servers), f"--data-parallel-strategy ps-sync {servers}"

    def run(name: str, served: bool, flags: str) -> str:
        flags = f"{given} {flags} --metrics {tmp_path / name}.jsonl --save {tmp_path / name} "
        flags += f"--save-hf {tmp_path / name}-hf {sync if served else ''}"
        return start(door if served else "script", ranks if served else 2, flags)

    run("allreduce", False, "--train-iters 6")
    run("there", True, "--train-iters 2")
    assert "loaded the checkpoint of iteration 2" in run(
        "back", False, f"--train-iters 4 --load {tmp_path / 'there'}"
    )
    assert "loaded the checkpoint of iteration 4" in run(
        "again", True, f"--train-iters 6 --load {tmp_path / 'back'}"
    )
    parts = [losses(tmp_path / f"{name}.jsonl") for name in ("there", "back", "again")]
    assert parts[0] | parts[1] | parts[2] == losses(tmp_path / "allreduce.jsonl")
    assert [[*part] for part in parts] == [[1, 2], [3, 4], [5, 6]]
    same_weights(tmp_path / "again-hf", tmp_path / "allreduce-hf")


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("door, servers", [("launch", DEDICATED), ("script", TOGETHER)])
def test_workers_that_do_not_wait_learn_and_checkpoints_go_both_ways(
    tmp_path, given, door, servers
):
    ranks, free = 2 + bool(servers), f"--data-parallel-strategy ps-async {servers}"
    logs = [tmp_path / f"{name}.jsonl" for name in ("there", "back", "again")]
    flags = f"{given} --save {tmp_path / 'c'}"
    start(door, ranks, f"{flags} {free} --train-iters 30 --metrics {logs[0]}")
    start("script", 2, f"{flags} --train-iters 32 --metrics {logs[1]} --load {tmp_path / 'c'}")
    start(
        door, ranks, f"{flags} {free} --train-iters 40 --metrics {logs[2]} --load {tmp_path / 'c'}"
    )
    told = [[*losses(log).values()] for log in logs]
    assert sum(told[0][-3:]) < 0.9 * sum(told[0][:3])
    assert [*losses(logs[1])] == [31, 32] and max(told[1]) < 0.9 * told[0][0]
    assert (
        min(losses(logs[2])) > 32 and max(losses(logs[2])) == 40 and max(told[2]) < 0.9 * told[0][0]
    )
    assert losses(logs[2], "test").keys() == {40}

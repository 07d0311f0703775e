"""Training with parameter servers beside the same training by collectives: losses, norms, every
weight and moment.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_merak.config import HFConfig
from megatron_merak.errors import DamagedError
from tests.ranks import RankFailure, run_ranks

from .jobs import job

pytestmark = pytest.mark.long

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
    """Bit for bit, whatever layout of the same degrees of tensor and pipeline parallelism wrote
    them.
    """
    for ours, theirs in zip(saved(one), saved(other), strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


def near(one: Path, other: Path) -> None:
    """Up to the rounding of sums: per file, that is per kind of state and rank, the length of the
    difference. Single elements whose gradient is rounding alone (the bias of keys) follow AdamW to
    places of their own."""
    for ours, theirs in zip(saved(one), saved(other), strict=True):
        assert ours.keys() == theirs.keys()
        mine, their = (
            torch.cat([f[name].flatten().double() for name in ours]) for f in (ours, theirs)
        )
        assert (mine - their).norm() < 1e-5 * mine.norm()


def compare(
    tmp_path: Path,
    flags: str,
    workers: int,
    ranks: int,
    servers: int,
    config=None,
    tied: bool = False,
) -> None:
    """tied: two stages hold one embedding. Collectives add its gradient over workers first and
    stages second, a worker that pushes the other way round; all else is bit for bit the same."""
    one, other = tmp_path / "collectives", tmp_path / "served"
    run(workers * ranks, f"{STEPS} {flags}", one, config)
    told = run(
        workers * ranks + servers,
        f"{STEPS} {flags} {SYNC}" + f" --num-parameter-servers {servers}" * bool(servers),
        other,
        config,
    )
    for ours, theirs in zip(records(other), records(one), strict=True):
        assert (ours["iteration"], ours["consumed_samples"]) == (
            theirs["iteration"],
            theirs["consumed_samples"],
        )
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-7 if tied else 0, abs=0)
        assert ours["grad_norm"] == pytest.approx(
            theirs["grad_norm"], rel=1e-6 if tied else 1e-12, nan_ok=True
        )
        assert ours.get("loss_scale") == theirs.get("loss_scale")
    for kind in ("valid", "test"):  # one worker evaluates what two shared
        assert records(other, kind)[0]["loss"] == pytest.approx(
            records(one, kind)[0]["loss"], rel=1e-6
        )
    (near if tied else equal)(one, other)
    if servers:
        assert "4 updates" in told[-1]


TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention
    --num-query-groups 2 --untie-embeddings-and-output-weights"""
# Flags, ranks of a worker, servers.
LAYOUTS = {"tp2": (TP, 2, 0), "pp2": (PP, 2, 1), "tp2 x pp2": (f"{TP} {PP}", 4, 2)}
DTYPES = {"fp32": "", "bf16": "--bf16"}


def slow(*values, **options):
    return pytest.param(*values, marks=pytest.mark.slow, **options)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "flags, workers, ranks, servers, tied",
    [
        ("--hidden-dropout 0.1", 2, 1, 0, False),
        (f"--bf16 {TP}", 2, 2, 1, False),
        slow(PP, 2, 2, 2, True),
        slow(f"{PP} --untie-embeddings-and-output-weights", 2, 2, 2, False),
        slow(
            f"--fp16 --initial-loss-scale 65536 {PP} {TP} --untie-embeddings-and-output-weights",
            2,
            4,
            0,
            False,
        ),
        slow(f"{PP} --pipeline-schedule zb-h1 --bf16", 2, 2, 1, True),
        *(
            slow(f"{LLAMA} {dtype} {flags}", 2, ranks, servers, False, id=f"llama {name} {layout}")
            for layout, (flags, ranks, servers) in LAYOUTS.items()
            for name, dtype in DTYPES.items()
        ),
    ],
)
def test_workers_that_step_together_are_replicas(tmp_path, flags, workers, ranks, servers, tied):
    compare(tmp_path, flags, workers, ranks, servers, tied=tied)


MODELS = {
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=130, architectures=["GPT2LMHeadModel"]
    ),
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
        slow("mixtral", "--bf16", 1, 2),
        slow("mixtral", f"--fp16 {PP}", 2, 0),
        *(
            slow(family, f"{dtype} {flags}", ranks, servers, id=f"{family} {name} {layout}")
            for family in MODELS
            for layout, (flags, ranks, servers) in LAYOUTS.items()
            for name, dtype in DTYPES.items()
        ),
    ],
)
def test_captured_models_with_servers(tmp_path, family, flags, ranks, servers):
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODELS[family].to_dict()))
    tied = family == "gpt2" and PP in flags
    compare(tmp_path, f"--model {model} {flags}", 2, ranks, servers, HFConfig, tied)


@pytest.mark.timeout(200)
def test_a_run_goes_on_with_servers_or_without(tmp_path):
    first, unbroken = tmp_path / "first", tmp_path / "unbroken"
    run(2, f"--train-iters 2 {CONSTANT}", first)
    run(2, f"--train-iters 4 {CONSTANT}", unbroken)
    for strategy, servers in ((SYNC, 1), (ASYNC, 0)):
        resumed = tmp_path / strategy.split()[-1]
        more = f" --num-parameter-servers {servers}" if servers else ""
        run(
            2 + servers,
            f"--train-iters 4 {CONSTANT} --load {first / 'run'} {strategy}{more}",
            resumed,
        )
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
    told = run(3, f"--train-iters 100 --eval-iters 4 {ASYNC} --num-parameter-servers 1", tmp_path)[
        -1
    ]
    counts = re.search(r"(\d+) updates, staleness [^,\n]*(?:, (\d+) gradients? too old)?", told)
    assert sum(map(int, counts.groups("0"))) == 200
    rows = records(tmp_path)
    # parts of two samples, of which the other worker takes some
    consumed = [row["consumed_samples"] for row in rows]
    assert (
        len(rows) < 200
        and consumed == sorted(set(consumed))
        and all(count % 2 == 0 for count in consumed)
    )
    (trained,) = records(tmp_path, "valid")
    assert trained["iteration"] == 100
    assert trained["loss"] < 0.8 * math.log(60), "of guesses among the ids"


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.timeout(200)
def test_damage_that_one_worker_alone_sees_sends_all_of_them_to_the_checkpoint_before(tmp_path):
    """The first worker reads the optimizer's state, the others do not."""
    unbroken, first, resumed = (tmp_path / name for name in ("unbroken", "first", "resumed"))
    flags = f"{CONSTANT} {SYNC} --num-parameter-servers 1"
    run(3, f"--train-iters 4 {flags}", unbroken)
    run(3, f"--train-iters 3 --save-interval 2 {flags}", first)
    damage(first / "run/iter_0000003/exp_avg-rank-00000.safetensors")
    told = run(3, f"--train-iters 4 {flags} --load {first / 'run'}", resumed)[0]
    assert "A damaged checkpoint was passed over, and iteration 2 was loaded." in told
    assert [row["loss"] for row in records(resumed)] == [
        row["loss"] for row in records(unbroken)[2:]
    ]
    equal(resumed, unbroken)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["model", slow("exp_avg_sq")])
def test_a_checkpoint_that_is_damaged_in_one_file_is_not_loaded(tmp_path, kind):
    run(2, f"--train-iters 1 {SYNC}", tmp_path)
    damage(file := next((tmp_path / "run/iter_0000001").glob(f"{kind}-*")))
    for strategy in ("", SYNC):
        with pytest.raises(RankFailure) as caught:
            run(2, f"--train-iters 2 {strategy} --load {tmp_path / 'run'}", tmp_path / "resumed")
        assert isinstance(caught.value.__cause__, DamagedError), caught.value
        assert "all of its checkpoints are damaged" in str(caught.value) and str(file) in str(
            caught.value
        )

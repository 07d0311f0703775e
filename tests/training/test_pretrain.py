"""pretrain_gpt.py as its users run it: alone and under torchrun, resumed, stopped by mistakes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_merak.cluster import CLUSTERS
from megatron_merak.pipeline_parallel.pictures.page import views_of
from tests.scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-2 --mock-data --vocab-size 60 --log-interval 2 --eval-iters 1 --hidden-dropout 0
    --attention-dropout 0"""


def pretrain(flags: str, ranks: int = 1, check: bool = True) -> subprocess.CompletedProcess:
    done = run_script("pretrain_gpt.py", [*SMALL.split(), *flags.split()], ranks)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def by_torchrun(flags: str, ranks: int) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(ROOT / "pretrain_gpt.py"), *SMALL.split(), *flags.split()]
    command = [sys.executable, *torchrun, *script]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)


def losses(path: Path, kind: str = "train") -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["iteration"]: row["loss"] for row in rows if row["kind"] == kind}


@pytest.mark.long
def test_one_process_and_four_tell_the_same_story(tmp_path):
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    told = pretrain(f"--train-iters 6 --metrics {alone}").stdout
    done = by_torchrun(
        f"--train-iters 6 --metrics {together} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        f"--timeline {tmp_path}/timeline.html --curve {tmp_path}/curve.png",
        ranks=4,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(together) == pytest.approx(losses(alone), abs=1e-5) and len(losses(alone)) == 6
    assert losses(together, "valid") == pytest.approx(losses(alone, "valid"), abs=1e-5)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (view,) = views_of((tmp_path / "timeline.html").read_text(encoding="utf-8"))
    assert (
        view.clock == "measured"
        and not view.timed
        and 0 < view.timeline.makespan < 100
        and len(view.timeline.events) == 2 * 2 * 4
    )
    assert view.peak_in_flight() == (2, 1) and len(view.timeline.transfers) == 2 * 4
    assert all(message.start <= message.end for message in view.timeline.transfers)
    assert "iteration        6/       6 | consumed samples:           48 |" in told
    assert "--adam-beta2 0.95 (Megatron-LM: 0.999)" in told


@pytest.mark.long
def test_a_run_that_stops_and_resumes_is_the_run_that_did_not_stop(tmp_path):
    unbroken, first, second, alone = (
        tmp_path / f"{name}.jsonl" for name in ("unbroken", "first", "second", "alone")
    )
    # steps of 2, 2, 4, 6, 8, 8
    layout = "--train-samples 30 --rampup-batch-size 2 2 10 --lr-warmup-samples 5"
    layout += " --pipeline-model-parallel-size 2 --hidden-dropout 0.1"
    pretrain(f"{layout} --metrics {unbroken}", ranks=2)
    told = pretrain(
        f"{layout} --metrics {first} --save {tmp_path}/c --exit-interval 3", ranks=2
    ).stdout
    pretrain(f"{layout} --metrics {second} --save {tmp_path}/c --load {tmp_path}/c", ranks=2)
    assert losses(first) | losses(second) == losses(unbroken)
    assert sorted(losses(second)) == [4, 5, 6] and "6 steps in all" in told
    layout = layout.replace("--pipeline-model-parallel-size 2", "")
    told = pretrain(f"{layout} --metrics {alone} --load {tmp_path}/c --ckpt-step 3").stdout
    assert "loaded the checkpoint of iteration 3" in told
    assert losses(alone) == pytest.approx(losses(second), abs=1e-5)


@pytest.mark.long
def test_an_emulated_cluster_changes_times_and_nothing_else(tmp_path):
    profile = CLUSTERS["rtx3090"]
    replace(profile, device=replace(profile.device, name="Card 1"), name="own").to_json(
        tmp_path / "mine.json"
    )
    layout = "--train-iters 3 --tensor-model-parallel-size 2 --timeline {0}/{1}.html --metrics {0}/{1}.jsonl"
    pretrain(layout.format(tmp_path, "real"), ranks=2)
    told = {}
    for name, cluster in (("3090", "rtx3090"), ("file", tmp_path / "mine.json")):
        flags = f"{layout.format(tmp_path, name)} --distributed-backend emu --emulate {cluster}"
        told[name] = pretrain(flags, ranks=2).stdout
        assert losses(tmp_path / f"{name}.jsonl") == losses(tmp_path / "real.jsonl")
    assert "Times of training steps are modelled on rtx3090" in told["3090"]
    predicted = {
        n: re.search(r"predicted on (.*): (.*) per step", text) for n, text in told.items()
    }
    assert predicted["3090"][1] == "RTX 3090 (rtx3090)" and predicted["file"][1] == "Card 1 (own)"
    assert predicted["file"][2] == predicted["3090"][2]
    assert "(ms): " in told["3090"] and "(modelled on rtx3090)" in told["3090"]
    rows = {
        n: [json.loads(row) for row in (tmp_path / f"{n}.jsonl").read_text().splitlines()]
        for n in told
    }
    times = {
        n: [row["modelled_seconds"] for row in rows[n] if row["kind"] == "train"] for n in told
    }
    assert len(times["3090"]) == 3 and times["3090"] == times["file"], "equal runs have equal times"
    assert 0 < max(times["3090"]) < 1e-3, "no time of this machine"
    (view,) = views_of((tmp_path / "3090.html").read_text(encoding="utf-8"))
    assert view.clock == "modelled" and 0 < view.timeline.makespan <= times["3090"][-1]


def further(*rows: tuple) -> list:
    return [pytest.param(*row, marks=pytest.mark.long) for row in rows]


@pytest.mark.parametrize(
    ("flags", "ranks", "told"),
    [
        ("--train-iters 2 --tensor-model-parallel-size 2", 3, "the number of ranks 3"),
        (
            "--train-iters 2 --load nowhere --exit-on-missing-checkpoint",
            2,
            "it has no complete checkpoint",
        ),
        *further(
            (
                "--train-iters 2 --distributed-backend emu --emulate x",
                2,
                "cluster x: there is no such one",
            ),
            (
                "--train-iters 2 --distributed-backend emu",
                2,
                "--emulate (missing): is needed with --distributed",
            ),
            (
                "--train-iters 2 --emulate laptop",
                2,
                "--emulate laptop: has no effect with --distributed-backend auto",
            ),
            ("--train-iters 2 --metrics /dev/null/x", 2, "--metrics /dev/null/x"),
            ("--train-iters 2 --save /dev/null/x", 2, "--save /dev/null/x"),
            ("--train-iters 2 --timeline /dev/null/x.png", 2, "--timeline /dev/null/x.png"),
        ),
    ],
)
def test_a_mistake_ends_the_job_and_is_told_in_one_line(flags, ranks, told):
    done = by_torchrun(flags, ranks)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert len(lines) == 1 and told in lines[0], done.stderr
    assert "consumed samples" not in done.stdout


def test_another_seed_does_not_resume(tmp_path):
    pretrain(f"--train-iters 1 --save {tmp_path}/c")
    done = pretrain(f"--train-iters 2 --load {tmp_path}/c --seed 7", check=False)
    assert done.returncode == 1 and "--seed 7: the checkpoint's run has seed 1234" in done.stderr

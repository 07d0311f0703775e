"""The look on real ranks: what it finds, how long it takes, and the command from start to end."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_merak.preflight.findings import Disk
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def looked(rank, world_size, directory):
    """Three ranks on two "hosts" of one machine."""
    import torch

    from megatron_merak.parallel.launch import World
    from megatron_merak.parallel.nodes import Nodes
    from megatron_merak.preflight.look import look

    world = World(rank, world_size, torch.device("cpu"))
    said = []
    found = look(world, dist.group.WORLD, Nodes((2, 1)), directory, say=said.append)
    return found.to_json(), said


def test_ranks_look_at_each_other(tmp_path):
    directory = tmp_path / "a" / "b"
    results = run_ranks(looked, 3, str(directory))
    found = results[0][0]
    assert all(each[0] == found for each in results)
    assert found["hosts"] == [0, 0, 1]
    ends = {(link["source"], link["destination"]) for link in found["links"]}
    assert ends == {(one, other) for one in range(3) for other in range(3) if one != other}
    assert all(0 < link["latency"] < 1 and link["rate"] > 1e6 for link in found["links"])
    assert all(seconds > 0 for seconds in found["reductions"].values())
    assert len(found["products"]) == 3 and min(found["products"]) > 1e6
    assert found["skews"][0] == 0 and abs(found["skews"][1]) < 0.5
    disks = [Disk.of(values) for values in found["disks"]]
    assert [disk.host for disk in disks] == [0, 1]
    assert all(disk.rate > 0 and disk.free and not disk.missing for disk in disks)
    assert not directory.parent.exists()  # what was made is removed
    assert any("round 1 of 3" in text for text in results[0][1])


def apart(rank, world_size, directory):
    """Each "host" has another directory of one name."""
    from megatron_merak.preflight import disks

    disks._PATIENCE = 0.3
    os.chdir(Path(directory) / str(rank))
    found = disks.disks("saved", rank, range(world_size), dist.group.WORLD)
    return [disk.missing for disk in found], os.listdir(".")


def test_a_directory_that_is_not_one_for_all(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert run_ranks(apart, 2, str(tmp_path)) == [([[1], [0]], [])] * 2


def command(*words: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "megatron_merak", *words],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_what_the_command_refuses():
    from megatron_merak.cli.preflight import main

    for words in (["--nproc-per-node", "0"], ["--timeout", "0"], ["--least-bandwidth", "nan"]):
        assert main(words) == 2


@pytest.mark.long
def test_the_command_on_eight_ranks(tmp_path):
    """It ends within a minute, by --nproc-per-node and by merak-launch."""
    began = time.monotonic()
    told = command("preflight", "--nproc-per-node", "8", "--json", str(tmp_path / "found.json"))
    assert time.monotonic() - began < 60
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["links"]) == 56
    assert told.returncode == bool(found["problems"]), told.stderr
    last = f"{len(found['problems'])} problem" if found["problems"] else "nothing is wrong"
    assert told.stdout.splitlines()[-1].startswith(f"8 ranks on 1 host: {last}")
    assert "preflight   " in told.stderr  # progress
    told = command("launch", "--nproc-per-node", "2", "preflight", "--save", str(tmp_path))
    assert re.search(r"2 ranks on 1 host", told.stdout), told.stderr


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named():
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "3",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "3",
    }
    began = time.monotonic()
    told = command("preflight", "--timeout", "3", **place, MASTER_PORT="29791")
    assert told.returncode == 1
    assert "ranks 1, 2 of 3: they did not come within 3 s" in told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert time.monotonic() - began < 30


@pytest.mark.long
def test_a_job_whose_directory_cannot_be_written_ends_before_the_model(tmp_path):
    flags = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64
        --micro-batch-size 2 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 --preflight""".split()
    told = command("pretrain", "--nproc-per-node", "2", *flags, "--save", str(tmp_path / "saved"))
    assert told.returncode == 0, told.stderr
    assert "preflight: 2 ranks on 1 host" in told.stdout
    (tmp_path / "file").write_text("")
    told = command("pretrain", "--nproc-per-node", "2", *flags, "--save", str(tmp_path / "file/x"))
    assert told.returncode == 1
    assert re.fullmatch(r"rank \d: directory \S+ on \S+: Not a directory\. .*\n", told.stderr)
    assert "tp 1" not in told.stdout

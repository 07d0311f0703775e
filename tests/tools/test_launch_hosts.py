"""Launchers of several hosts, all on this machine: who gets which ranks, and how they end."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.job_files.test_job_files import STUBS
from tests.pages import blocks, commands
from tests.several_hosts import emitted

ROOT = Path(__file__).resolve().parents[2]
SMALL = """pretrain --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 2 --hidden-size 32
    --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data
    --vocab-size 60 --log-interval 1 --eval-iters 0"""
LOSS = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")
TELLS = """
import os, sys
words = " ".join(os.environ[name] for name in ("GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"))
os.write(1, f"{words}\\n".encode())
"""
# Ends as a run that was saved does: with the status of the signal.
NOTICED = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(128 + number))
with open("started", "a") as file:
    file.write("x")
time.sleep(60)
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launchers(words: str, folder: Path, port: int, nodes=(0, 1)) -> list[subprocess.Popen]:
    """A launcher for each host of ``nodes``, the last first."""
    start = [sys.executable, "-m", "megatron_merak", "launch", "--nnodes", str(max(2, len(nodes)))]
    start += ["--master-port", str(port)]
    return [
        subprocess.Popen(
            [*start, "--node-rank", str(node), *shlex.split(words)],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in reversed(nodes)
    ]


def ended(started: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """(status, output, errors) of launchers, host 0 first."""
    found = []
    for process in reversed(started):
        out, err = process.communicate(timeout=100)
        found.append((process.returncode, out, err))
    return found


def until(condition, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
def test_ranks_are_in_the_order_of_the_hosts(tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    words = "--nproc-per-node 2 --interface lo tells.py"
    first, second = ended(launchers(words, tmp_path, free_port()))
    for (status, out, err), node in ((first, 0), (second, 1)):
        assert (status, err) == (0, "")
        told = [f"{node} {rank} 4 127.0.0.1 lo" for rank in (2 * node, 2 * node + 1)]
        assert sorted(out.splitlines()) == told


@pytest.mark.long
def test_two_hosts_with_one_number_are_refused(tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    words = "--nproc-per-node 1 --interface lo tells.py"
    port = free_port()
    started = launchers(words, tmp_path, port, nodes=(0,))
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    # a second host 0 finds the port taken
    (again,) = ended(launchers(words, tmp_path, port, nodes=(0,)))
    told = f"--master-port {port}: host 0 cannot listen there, or another job does."
    assert again[0] == 1 and told in again[2] and len(again[2].splitlines()) == 1, again
    started[0].terminate()
    assert ended(started) == [(-signal.SIGTERM, "", "")]
    for status, _, err in ended(launchers(words, tmp_path, free_port(), nodes=(0, 1, 1))):
        assert status == 1 and "the hosts have 0, 1, 1. Give every host its own, from 0 to 2" in err
        assert len(err.splitlines()) == 1


@pytest.mark.long
@pytest.mark.parametrize("hosts", [1, 2])
def test_notice_ends_a_job_that_may_start_again(hosts, tmp_path):
    """Ranks that end because of it have not failed."""
    (tmp_path / "noticed.py").write_text(NOTICED)
    words = "--nproc-per-node 2 --max-restarts 3 noticed.py"
    if hosts == 2:
        started = launchers(words, tmp_path, free_port())
    else:
        command = [sys.executable, "-m", "megatron_merak", "launch", *words.split()]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes)]
    file = tmp_path / "started"
    until(lambda: file.exists() and file.stat().st_size == 2 * hosts)
    for process in started:
        process.send_signal(signal.SIGUSR1)
    assert ended(started) == [(128 + signal.SIGUSR1, "", "")] * hosts
    assert file.stat().st_size == 2 * hosts


def losses(text: str) -> list[tuple[str, str]]:
    return LOSS.findall(text)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[tuple[str, str]]:
    """The losses of a run on one host."""
    command = [sys.executable, "-m", "megatron_merak", *SMALL.split()]
    done = subprocess.run(
        [*command, "--train-iters", "8", "--nproc-per-node", "4"],
        cwd=tmp_path_factory.mktemp("alone"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_a_run_on_two_hosts_saves_ends_and_goes_on_without_another_word(number, alone, tmp_path):
    words = f"--nproc-per-node 2 --max-restarts 3 {SMALL} --save run --load run --train-iters 8"
    started = launchers(f"{words} --save-interval 1", tmp_path, free_port())
    until(lambda: len([*tmp_path.glob("run/iter_*/manifest.json")]) > 1)
    for process in started:
        process.send_signal(number)
    parts = ended(started)
    if {status for status, _, _ in parts} != {0}:  # it was not over before the signal came
        assert [status for status, _, _ in parts] == [128 + number] * 2
        told = "".join(err for _, _, err in parts)
        assert [line for line in told.splitlines() if "interrupted by" not in line] in (
            [],
            [
                "127.0.0.1 reaches this host only from itself: the job's store listens on all interfaces"
            ],
        )
        assert f"interrupted by {number.name} after iteration" in told
    rest = ended(launchers(words, tmp_path, free_port()))
    assert [status for status, _, _ in rest] == [0, 0]
    assert "frame #" not in "".join(out + err for _, out, err in parts + rest)
    both = [step for out in (parts, rest) for _, text, _ in out for step in losses(text)]
    assert both == alone


@pytest.mark.long
def test_the_page_s_two_hosts_are_run(tmp_path):
    (block,) = [each for each in blocks("several_hosts", "bash") if each.mark == "run on two hosts"]
    started = []
    hosts = f"--nnodes 2 --master-port {free_port()}"
    for line in commands(block.text):
        words = line.replace("merak-launch", f"{sys.executable} -m megatron_merak launch")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = shlex.split(words.replace("--nnodes 2", hosts))
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes))
    first, second = ended(started[::-1])
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert [number for number, _ in losses(second[1])] == ["10", "20", "30"] and not losses(
        first[1]
    )


def on_path(folder: Path, stubs: dict[str, str]) -> dict[str, str]:
    for name, text in stubs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return environment() | {"PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


# Starts both halves of a step here, and ends with the higher status; passes on signals as srun does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" >host0 2>&1 &
first=$!
SLURM_NODEID=1 "$@" >host1 2>&1 &
second=$!
trap 'kill -USR1 $first $second' USR1
status=0
for each in $first $second; do
    while :; do
        wait $each
        code=$?
        kill -0 $each 2>/dev/null || break
    done
    [ $code -le $status ] || status=$code
done
exit $status
"""
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; else echo "$@" >>requeued; fi\n'


@pytest.mark.long
def test_the_batch_script_runs_on_two_hosts(alone, tmp_path):
    """Slurm's programs are stood in for by those that start both hosts on this machine."""
    run = f"{SMALL} --train-iters 8 --save run --load run"
    text = emitted(f"--emit slurm --nodes 2 --nproc-per-node 2 --time 1:00:00 -- {run}")
    (tmp_path / "job.slurm").write_text(text)
    variables = on_path(tmp_path, STUBS | {"srun": SRUN, "scontrol": SCONTROL})
    (tmp_path / "python3").unlink()
    variables |= {"SLURM_JOB_NODELIST": "h[0-1]", "SLURM_JOB_NAME": "x"}
    variables |= {"SLURM_JOB_ID": str((free_port() - 20000) % 10000)}
    done = subprocess.run(
        ["bash", "job.slurm"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert losses((tmp_path / "host1").read_text()) == alone
    assert not (tmp_path / "requeued").exists()


@pytest.mark.long
def test_notice_and_failures_submit_the_batch_script_again(tmp_path):
    text = emitted(
        f"--emit slurm --nodes 2 --nproc-per-node 2 --time 1:00:00 --restarts 1 -- {SMALL} --train-iters 8"
    )
    (tmp_path / "job.slurm").write_text(text)
    fails = "#!/bin/bash\nexit 9\n"
    sleeps = "#!/bin/bash\ntrap 'exit 138' USR1\necho >here\nwhile :; do sleep 0.1; done\n"
    variables = on_path(tmp_path, {"srun": sleeps, "scontrol": SCONTROL})
    variables |= {"SLURM_JOB_NODELIST": "h", "SLURM_JOB_NAME": "x", "SLURM_JOB_ID": "7"}
    job = subprocess.Popen(["bash", "job.slurm"], cwd=tmp_path, env=variables)
    until((tmp_path / "here").exists)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 0 and (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert not (tmp_path / "x-7.failures").exists(), "a notice is no failure"
    (tmp_path / "srun").write_text(fails)
    statuses = [
        subprocess.run(["bash", "job.slurm"], cwd=tmp_path, env=variables).returncode
        for _ in range(2)
    ]
    assert statuses == [0, 9] and (tmp_path / "requeued").read_text() == "requeue 7\n" * 2
    assert (tmp_path / "x-7.failures").read_text() == "9\n9\n"


def slurm_works() -> bool:
    if shutil.which("sbatch") is None:
        return False
    try:
        seen = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return seen.returncode == 0 and sum(map(int, seen.stdout.split())) >= 2


@pytest.mark.long
def test_slurm_runs_the_batch_script(alone, tmp_path):
    if not slurm_works():
        pytest.skip("there is no Slurm with two idle nodes here")
    run = f"{SMALL} --train-iters 8 --save run --load run"
    emitted(
        f"--emit slurm --nodes 2 --nproc-per-node 2 --time 0:10:00 --notice 60 --job-name two "
        f"--output {tmp_path}/job.slurm -- {run}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["sbatch", "--wait", "job.slurm"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment() | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (last,) = tmp_path.glob("two-*-1-*.log")
    assert losses(last.read_text()) == alone

"""The rank that others wait for in vain is named, and the job ends; one that is slow elsewhere is
not killed.
"""

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel import bulletin as bulletin_module
from megatron_merak.parallel.launch import launch, leave
from megatron_merak.parallel.pulse import Pulse
from megatron_merak.parallel.watchdog import HangLimits, Watchdog
from megatron_merak.pipeline_parallel.ops import Kind, Op
from tests.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LIMITS = HangLimits(
    first=20.0,
    factor=0.0,
    least=1.5,
    elsewhere=500.0,
    poll=0.1,
    suspicion=0.4,
    silence=0.8,
    beside=0.0,
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _together(rank: int, size: int, port: int, kind: str, directory: Path) -> float:
    """All ranks compute steps; the last one of them misbehaves in the second step, or after it."""
    with open(directory / f"told-{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    dist.destroy_process_group()
    values = (rank, size, rank, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})
    world = launch("gloo", limits=LIMITS)
    world.pulse.stage = rank
    began = time.monotonic()
    for step in (1, 2, 3):
        with world.pulse.in_step(step, completes=True):
            world.pulse.at(Op(rank, Kind.F, 3))
            world.pulse.launched("all-reduce")
            dist.all_reduce(torch.ones(1))
            time.sleep(0.3)  # the others learn where this rank is
            if step == 2 and rank == size - 1:
                _misbehave(kind, world)
        if step == 2 and rank == size - 1 and kind in SLOW:
            SLOW[kind](3)
    if kind == "fails behind the last step" and rank == size - 1:
        world.watchdog.farewell("has failed")
        dist.destroy_process_group()
        time.sleep(60)
    leave(world)
    return time.monotonic() - began


SLOW = {"sleeps": time.sleep, "holds the GIL": ctypes.PyDLL(None).sleep}


def _misbehave(kind: str, world) -> None:
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "never gives up the GIL":
        ctypes.PyDLL(None).sleep(60)
    elif kind == "hangs":
        threading.Event().wait(60)
    elif kind == "ended":
        world.watchdog.farewell()
        time.sleep(60)
    elif kind == "died":
        os._exit(0)


TOLD = {
    "stopped": r"rank 1 \(stage 1\) last seen in F3@1 of step 2, all-reduce 1: silent for .* it is stopped.*no stack",
    "never gives up the GIL": r"rank 1 \(stage 1\).* holds the GIL.*in _misbehave",
    "hangs": r"rank 1 \(stage 1\) last seen in F3@1 of step 2, all-reduce 1: did not arrive.*in _misbehave",
    "ended": r"rank 1 \(stage 1\) last seen in F3@1 of step 2, all-reduce 1: it has ended, and rank 0 waits in F3@0",
}


@pytest.mark.parametrize("kind", TOLD)
def test_a_rank_that_others_wait_for_in_vain_is_named(kind, tmp_path):
    with pytest.raises(RankFailure, match="rank . of 2 died with exit code 1"):
        run_ranks(_together, 2, free_port(), kind, tmp_path)
    told = (tmp_path / "told-0").read_text()
    assert re.search(TOLD[kind], told, re.DOTALL), told


@pytest.mark.parametrize("kind", SLOW)
def test_a_rank_that_is_slow_outside_of_steps_is_not_killed(kind, tmp_path):
    """It is slow for twice as long as a step may stand still, as in a callback of one rank."""
    assert min(run_ranks(_together, 2, free_port(), kind, tmp_path)) > 3


def test_every_rank_names_a_rank_that_ends(tmp_path):
    with pytest.raises(RankFailure, match="died with exit code 1"):
        run_ranks(_together, 4, free_port(), "ended", tmp_path)
    for rank in range(4):
        told = (tmp_path / f"told-{rank}").read_text()
        assert re.search(
            r"(?m)^rank 3 \(stage 3\) last seen in F3@3 of step 2.* has ended", told
        ), told


def test_a_rank_that_fails_behind_the_last_step_is_named_in_one_line(tmp_path):
    with pytest.raises(RankFailure, match="rank 0 of 2 died with exit code 1"):
        run_ranks(_together, 2, free_port(), "fails behind the last step", tmp_path)
    told = (tmp_path / "told-0").read_text()
    assert re.search(
        r"(?m)^rank 1 \(stage 1\) last seen after step 3: it has failed, and rank 0 waits", told
    ), told
    assert "Traceback" not in told


def _with_a_stopped_store(rank: int, size: int, port: int, directory: Path) -> tuple | None:
    """The last rank has the store, and is stopped for a while."""
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("process", str(os.getpid()))
        dist.barrier()
        dist.barrier()
        return None
    dist.barrier()
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    owner = int(store.get("process"))
    bulletin_module.ANSWER = 0.3
    ends: list[int] = []
    signs: list[str] = []
    watchdog = Watchdog(0, 2, store, LIMITS, report=lambda *told: None, end=ends.append)
    watchdog.start()
    time.sleep(0.5)
    os.kill(owner, signal.SIGSTOP)
    try:
        time.sleep(1)
        watchdog._watcher.sign_of_life = signs.append
        time.sleep(1)
        began = time.monotonic()
        watchdog.farewell()
        took = time.monotonic() - began
    finally:
        os.kill(owner, signal.SIGCONT)
    dist.barrier()
    return len(signs), took, ends


def test_a_stopped_launcher_does_not_end_ranks_that_train(tmp_path):
    """It has the store; without signs of life the watcher beside a rank would end it."""
    signs, took, ends = run_ranks(_with_a_stopped_store, 2, free_port(), tmp_path)[0]
    assert signs >= 3 and took < 2 and not ends


def _interrupted_while_it_joins(rank: int, size: int, port: int) -> None:
    """The last rank waits for the first one, which does not come."""
    dist.barrier()  # else the first may still be connecting when the last ends
    dist.destroy_process_group()
    values = (rank, size, rank, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        time.sleep(60)
        del store
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    launch("gloo")


def test_ctrl_c_ends_a_rank_that_waits_for_others_at_the_start():
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code -2"):
        run_ranks(_interrupted_while_it_joins, 2, free_port())


def test_limits_follow_the_longest_step_unless_a_timeout_is_given():
    pulse = Pulse()
    limits = HangLimits.of_timeout(1800, 1800)
    assert (limits.first, limits.elsewhere, limits.of_step(pulse)) == (600, 1710, 600)
    pulse.steps = 1
    for longest, limit in ((0.1, 60), (20, 200), (1000, 1710)):
        pulse.longest = longest
        assert limits.of_step(pulse) == limit
    given = HangLimits.of_timeout(3600, 1800)
    assert (given.first, given.of_step(pulse), given.elsewhere) == (3420, 3420, 3420)
    assert HangLimits.of_timeout(60, 600).elsewhere == 50


def test_a_pulse_says_where_a_rank_is():
    pulse = Pulse()
    assert pulse.place() == ("before the first step", False)
    with pulse.in_step(40):
        pulse.at(Op(1, Kind.F, 3))
        for _ in range(17):
            pulse.launched("all-reduce")
        assert pulse.place() == ("in F3@1 of step 40, all-reduce 17", True)
        with pulse.doing("capturing"):
            assert pulse.place() == ("capturing in F3@1 of step 40, all-reduce 17", False)
        pulse.at((Op(0, Kind.F, 4), Op(0, Kind.B, 3)))
        assert pulse.place().text == "in F4@0|B3@0 of step 40, all-reduce 17"
    assert pulse.steps == 0
    with pytest.raises(KeyError), pulse.in_step(40, completes=True), pulse.in_step(40):
        raise KeyError
    assert (pulse.place(), pulse.left) == (("after step 40", False), "in step 40, all-reduce 17")
    with pulse.in_step(41, completes=True):
        time.sleep(0.01)
    assert pulse.steps == 1 and pulse.longest >= 0.01


JOBS = {
    (
        "gpt",
        "stopped",
        2,
    ): r"rank 1 \(stage 1\) last seen in RECV_F0@1 of step 3: silent for \d+ s, it is stopped",
    ("gpt", "ends", 1): r"rank 1 last seen in F0@0 of step 3: it has ended, and rank 0 waits",
    (
        "gpt",
        "dies",
        2,
    ): r"rank 1 \(stage 1\) last seen in RECV_F0@1 of step 3: it has ended without a word",
    ("hf", "stopped", 1): r"rank 1 last seen in F0@0 of step 3: silent for \d+ s, it is stopped",
    (
        "hf",
        "ends",
        2,
    ): r"rank 1 \(stage 1\) last seen in RECV_F0@1 of step 3: it has ended, and rank 0 waits",
}


def _torchrun(door: str, kind: str, pp: int, directory: Path) -> tuple[int, str, float]:
    """Return exit status and output of a job of two ranks, and the seconds after which one
    misbehaved.
    """
    script = Path(__file__).with_name("hanging_job.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [str(script), door, kind, str(pp), str(directory)]
    environment = os.environ | {"PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=300,
    )
    now = re.search(r"^now ([\d.]+)", told.stdout, re.MULTILINE)
    return told.returncode, told.stdout, 0.0 if now is None else time.time() - float(now[1])


@pytest.mark.long
@pytest.mark.parametrize(("door", "kind", "pp"), JOBS)
def test_jobs_end_and_name_the_rank(door, kind, pp, tmp_path):
    status, told, seconds = _torchrun(door, kind, pp, tmp_path)
    named = re.findall(JOBS[door, kind, pp], told)
    assert status == 1 and len(named) == 1, told
    # Of which torchrun's own end takes some.
    assert seconds < (60 if kind == "stopped" else 30), told


@pytest.mark.long
def test_a_callback_of_one_rank_may_take_longer_than_a_step(tmp_path):
    """It takes twice as long as a step may stand still."""
    status, told, _ = _torchrun("hf", "slow", 2, tmp_path)
    assert status == 0 and told.count("trained") == 2, told

"""Jobs whose ranks are killed: the other workers go on, servers come back, and nothing hangs."""

import os
import re
import signal
import subprocess
import sys

import pytest

from megatron_merak.cli.hosts import HostPlace
from megatron_merak.cli.launch import _arguments, _place, _served, _torchrun, main
from megatron_merak.errors import LaunchError
from megatron_merak.parameter_server.supervisor import Hosts, servers_of

from .launched import ROOT, SMALL, Launched, environment

pytestmark = pytest.mark.long


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    "strategy",
    [
        "ps-async",
        pytest.param("ps-sync", marks=pytest.mark.slow),
        pytest.param("two servers", marks=pytest.mark.slow),
    ],
)
def test_killed_workers_and_servers_do_not_end_the_job(tmp_path, strategy):
    servers, iterations, strategy = 1, 400, strategy
    if strategy == "two servers":
        servers, strategy = 2, "ps-async"
    flags = f"{strategy} --num-parameter-servers {servers} --train-iters {iterations} --save {tmp_path / 'run'}"
    flags += " --ps-snapshot-interval 5"
    job = Launched(3 + servers, flags, tmp_path)
    job.after(20).kill(3)  # a server
    job.after(job.iteration + 40).kill(1)  # a worker
    job.after(job.iteration + 40).kill(0)  # the one that leads
    assert job.end() == 0, job.told
    assert "launch: server 3 was killed by signal 9: started again (1 of 3)" in job.told
    assert "launch: worker's rank 1 was killed by signal 9: the other workers go on" in job.told
    assert re.search(r"parameter server \(rank 3\) is back at update \d+", job.told)
    assert "worker 2 leads: those before it are gone" in job.told
    assert (
        job.iteration == iterations
        and (tmp_path / f"run/iter_{iterations:07d}/manifest.json").is_file()
    )
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", job.told)]
    assert max(losses[-5:]) < 0.8 * losses[0]
    assert re.search(r"parameter server \(rank 3\): [\d,]+ updates.*, lost ranks 0, 1", job.told)


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_server_that_does_not_come_back_ends_the_job_with_an_error(tmp_path):
    job = Launched(
        3, "ps-sync --global-batch-size 8 --num-parameter-servers 1 --train-iters 100000", tmp_path
    )
    job.after(5).kill(2)  # without --save there is no snapshot
    assert job.end() != 0
    assert "Start the job again from its last checkpoint" in job.told
    assert "launch: server 2 was killed by signal 9: started again (1 of 3)" in job.told


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_rank_that_serves_and_trains_takes_its_part_along(tmp_path):
    job = Launched(2, "ps-async --global-batch-size 8 --train-iters 100000", tmp_path)
    job.after(5).kill(1)
    assert job.end() != 0
    gone = r"parameter server \(rank 1\): it is gone, or gave this rank up \(.*Connection (closed|reset) by peer"
    assert re.search(gone, job.told), job.told


@pytest.mark.timeout(250)
def test_a_signal_stops_all_workers_after_one_step_and_the_run_resumes_from_there(tmp_path):
    run = f"ps-sync --num-parameter-servers 1 --train-iters 60 --save {tmp_path / 'run'} --load {tmp_path / 'run'}"
    parts = []
    sent = {
        "launcher": (None, signal.SIGTERM),
        "worker": (1, signal.SIGUSR1),
        "server": (3, signal.SIGHUP),
    }
    for name in (*sent, "end"):
        (tmp_path / name).mkdir()
        job = Launched(4, run, tmp_path / name)
        if name != "end":
            job.after(parts[-1].iteration + 3 if parts else 3)
            rank, number = sent[name]
            os.kill(job.process.pid if rank is None else job.pids()[rank], number)
            assert job.end() == 128 + number, job.told
            assert (
                f"interrupted by {number.name} after iteration {job.iteration}, which was saved"
                in job.told
            )
        assert name != "end" or job.end() == 0, job.told
        parts.append(job)
    straight = Launched(4, run.replace("run", "straight"), tmp_path)
    assert straight.end() == 0, straight.told
    losses = [
        re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", job.told) for job in (straight, *parts)
    ]
    assert losses[0] == [step for part in losses[1:] for step in part] and len(losses[0]) == 60


def test_a_wrong_flag_is_told_once_before_ranks_start():
    command = [
        sys.executable,
        str(ROOT / "tools/launch.py"),
        "--nproc-per-node",
        "3",
        "pretrain",
        *SMALL.split(),
    ]
    command += [
        "ps-sync",
        "--num-parameter-servers",
        "1",
        "--train-iters",
        "2",
        "--ps-max-staleness",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert (
        "--ps-max-staleness 3: has no effect with --data-parallel-strategy ps-sync" in done.stderr
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--nproc-per-node 0", "--nproc-per-node 0: it is below 1. Use at least 1"),
        (
            "--nproc-per-node 2 --master-port 0",
            "--master-port 0: it is not a valid port. Use a free port",
        ),
        (
            "--nproc-per-node 2 --nnodes 2 --node-rank 2",
            "--node-rank 2: there are 2 hosts. Count them from 0",
        ),
        (
            "--nproc-per-node 2 --max-restarts -1",
            "--max-restarts -1: it is below 0. Use at least 0",
        ),
    ],
)
def test_numbers_that_make_no_job_are_refused(flags, message, capsys):
    assert main([*flags.split(), "pretrain"]) == 1
    assert message in capsys.readouterr().err


def test_hosts_and_flags_say_who_is_who():
    hosts = Hosts(ranks_here=4, nodes=2, node=1, address="first", port=1234)
    assert (hosts.size, hosts.ranks) == (8, range(4, 8))
    seen = hosts.environment(5)
    assert [
        seen[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ] == list("5814")
    assert servers_of(["--lr", "1", "--num-parameter-servers", "2"]) == 2
    assert servers_of(["--num-parameter-servers=3"]) == 3 and servers_of([]) == 0
    assert servers_of(["--num-parameter-servers", "1", "--num-parameter-servers", "2"]) == 2, (
        "as argparse takes it"
    )
    with pytest.raises(LaunchError, match="--num-parameter-servers x: it is not a number"):
        servers_of(["--num-parameter-servers", "x"])


def test_jobs_without_servers_are_torchrun_s():
    """A script's --config may name servers, so such a script is started as before."""
    script = ["--nproc-per-node", "2", "train.py", "out", "--strategy=dp"]
    for words, served in (
        (script, False),
        ([*script, "--config", "c.yaml"], True),
        ([*script[:2], "pretrain", "--config", "c.yaml"], False),
        ([*script, "--data-parallel-strategy=ps-async"], True),
    ):
        options = _arguments(words)
        assert _served(options.script, options.flags) == served, words
    alone = [
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--standalone",
        "train.py",
        "out",
        "--strategy=dp",
    ]
    assert _torchrun(_arguments(script)) == alone
    assert _place(_arguments(script)) is None
    hosts = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "first", "--master-port", "7"]
    options = _arguments([*hosts, "--nproc-per-node", "2", "pretrain", "--lr", "1"])
    assert _torchrun(options)[2:] == ["-m", "megatron_merak", "pretrain", "--lr", "1"]
    assert _place(options) == HostPlace(1, 2, "first", 7)
    again = _arguments(["--max-restarts", "2", *script])
    assert _place(again) == HostPlace(0, 1, "127.0.0.1", 0), "its ranks meet again"

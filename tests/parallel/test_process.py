"""What a process sets up once: the same from every entry, and never over what the user has
chosen.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_merak import _native
from megatron_merak.parallel.launch import _check_answers
from megatron_merak.parallel.places import place_of
from megatron_merak.parallel.process import (
    Environment,
    Setup,
    end_with_launcher,
    launcher_place,
    set_up,
)
from tests.choice import later
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SAID = """
import torch, torch.distributed as dist
from megatron_merak.parallel.launch import launch, leave
world = launch()
print(f"\\n{world.collectives} {torch.get_num_threads()} {world.setup.threads} {torch.get_float32_matmul_precision()}")
leave(world)
"""


@pytest.fixture(autouse=True)
def restore():
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


def test_a_precision_that_the_user_set_stays():
    torch.set_float32_matmul_precision("high")
    assert set_up(CPU, "auto", Environment(own_malloc=True)).fp32_matmul == "high"


def test_a_precision_that_is_asked_for_is_set():
    setup = set_up(CPU, "highest", Environment(own_malloc=True))
    assert (
        setup.fp32_matmul == torch.get_float32_matmul_precision() == "highest"
        and not setup.keeps_memory
    )


def test_threads_are_shared_among_the_ranks_of_a_host(monkeypatch):
    monkeypatch.setattr("megatron_merak.parallel.process.cores", lambda: 7)
    assert set_up(CPU, "highest", Environment(3, True, True)).threads == torch.get_num_threads()
    assert (
        set_up(CPU, "highest", Environment(3, False, True)).threads == torch.get_num_threads() == 2
    )
    assert (
        set_up(CPU, "highest", Environment(8, False, True)).threads == torch.get_num_threads() == 1
    )


def test_it_says_what_it_chose_and_how_to_choose_otherwise():
    text = str(Setup("medium", True, 4))
    for word in (
        "4 threads",
        "OMP_NUM_THREADS",
        "'medium'",
        "fp32_matmul_precision",
        "MALLOC_TRIM_THRESHOLD_",
    ):
        assert word in text


@pytest.mark.parametrize("chosen", [None, later("1")])
def test_ranks_of_torchrun(tmp_path, chosen):
    """As shipped: shared memory, and every core is used, unless the user says otherwise."""
    script = tmp_path / "script.py"
    script.write_text(SAID)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT)} | (
        {} if chosen is None else {"OMP_NUM_THREADS": chosen}
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    said = [
        line.split() for line in done.stdout.splitlines() if line.startswith(("merak_shm", "None"))
    ]
    share = 1 if chosen else max(1, len(os.sched_getaffinity(0)) // 2)
    backend = "None" if getattr(_native.host(), "shared_memory", None) is None else "merak_shm"
    assert len(said) == 2 and done.returncode == 0, done.stderr
    for collectives, threads, told, _ in said:
        assert (collectives, threads) == (backend, told) and 1 <= int(threads) <= share


def adopted(rank, world_size):
    from megatron_merak import MerakArguments

    arguments = MerakArguments("unused", report_to="none", fp32_matmul_precision="highest")
    return (
        arguments.world.collectives,
        arguments.world.setup.fp32_matmul,
        str(arguments.world.device),
    )


def test_arguments_in_a_job_that_exists_already():
    backend = None if getattr(_native.host(), "shared_memory", None) is None else "merak_shm"
    assert run_ranks(adopted, 2) == [(backend, "highest", "cpu")] * 2


def adopted_without_backend(rank, world_size, path):
    """As accelerate and TRL do it in a job of one rank that torchrun starts."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        store=dist.FileStore(path, world_size), rank=rank, world_size=world_size
    )
    backend = dist.get_backend()
    return (backend, *adopted(rank, world_size)[1:])


def test_arguments_in_a_job_made_without_a_backend(tmp_path):
    assert run_ranks(adopted_without_backend, 1, str(tmp_path / "store")) == [
        ("undefined", "highest", "cpu")
    ]


def _of_a_launcher(rank, world_size, place):
    end_with_launcher(place)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_rank_whose_launcher_ended_while_it_started_ends():
    """The operating system ends it only with a launcher that lives when it is asked to."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        place = place_of(launcher.pid)
    with pytest.raises(
        Exception, match=rf"launcher process {launcher.pid}: it has ended. Start the job again"
    ):
        run_ranks(_of_a_launcher, 1, json.dumps(place))
    elsewhere = ["another host", *place[1:]]
    run_ranks(_of_a_launcher, 1, json.dumps(elsewhere))
    run_ranks(_of_a_launcher, 1, launcher_place())


def test_a_store_of_a_launcher_that_ended_is_not_waited_for():
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        with pytest.raises(OSError):
            _check_answers(*unheard.getsockname(), 0.0)
        unheard.listen()
        _check_answers(*unheard.getsockname(), 5.0)

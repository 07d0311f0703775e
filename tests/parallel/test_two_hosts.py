"""Jobs on two hosts, which are two network namespaces of this machine: as on one, over a link that is
slow, and when the cable is cut or a host is lost.
"""

import functools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.two_hosts import Host, TwoHosts, reason_without

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NODE = str(Path(__file__).with_name("torchrun_node.sh"))
SHAPE = """--tensor-model-parallel-size 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 60
    --mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 16 --lr 1e-2 --log-interval 1
    --eval-iters 0""".split()
FOR_EVER = [*SHAPE, "--train-iters", "1000000", "--distributed-timeout-minutes", "1"]
STEP = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")


@functools.cache
def reason() -> str:
    return reason_without()


@pytest.fixture
def hosts(tmp_path):
    if reason():
        pytest.skip(reason())
    with TwoHosts(tmp_path) as both:
        yield both


class Job:
    """``words`` on both hosts, started by node.sh: two ranks each."""

    def __init__(self, hosts: TwoHosts, words: list[str], directory: Path, restarts: int = 0):
        self.words = words
        self.restarts = str(restarts)
        self.directory = directory
        self.one = self.start(hosts.one)
        self.other = self.start(hosts.other)

    def start(self, host: Host) -> subprocess.Popen:
        log = self.directory / f"{host.name}.log"
        return host.start(
            [NODE, *self.words],
            log,
            HEAD="ha",
            NODES="2",
            RANKS_PER_NODE="2",
            INTERFACE="cable",
            RESTARTS=self.restarts,
            PYTHON=sys.executable,
        )

    def text(self) -> str:
        """What both hosts have printed."""
        return "".join(path.read_text() for path in sorted(self.directory.glob("h?.log")))

    def losses(self) -> dict[int, str]:
        return {int(step): loss for step, loss in STEP.findall(self.text())}

    def wait_for_step(self, step: int, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while max(self.losses(), default=0) < step:
            assert time.monotonic() < end, self.text()[-4000:]
            assert self.one.poll() is None, self.text()[-4000:]
            time.sleep(0.02)


def on_one_host(words: list[str], directory: Path) -> dict[int, str]:
    """The losses of the same job on one host."""
    told = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--nproc-per-node", "4", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    return {int(step): loss for step, loss in STEP.findall(told.stdout)}


def test_a_job_has_the_losses_of_one_host(hosts, tmp_path):
    words = [*SHAPE, "--train-iters", "6"]
    job = Job(hosts, words, tmp_path)
    assert [job.one.wait(100), job.other.wait(100)] == [0, 0], job.text()
    assert len(job.losses()) == 6
    assert job.losses() == on_one_host(words, tmp_path)


PREFLIGHT = """-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint ha:29500
    --rdzv-id look -m megatron_merak preflight --timeout 60""".split()


@pytest.mark.parametrize("slow", [False, True])
def test_the_preflight_names_a_slow_link(hosts, tmp_path, slow):
    if slow:
        hosts.other.slow("80mbit")
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    looks = [
        host.start(
            [sys.executable, *PREFLIGHT, "--save", str(tmp_path / "shared")],
            tmp_path / f"{host.name}.log",
            PYTHONPATH=str(ROOT),
            **variables,
        )
        for host in (hosts.one, hosts.other)
    ]
    statuses = [look.wait(100) for look in looks]
    told = (tmp_path / "ha.log").read_text()
    if slow:
        assert statuses == [1, 1]
        assert re.search(r"^slow link from hb to ha: \d+\.\d MB/s \(rank", told, re.MULTILINE), told
        assert "from ha to hb" not in told
    else:
        assert statuses == [0, 0], told
        assert "4 ranks on 2 hosts: nothing is wrong" in told


SILENT = r"^ranks? [\d, ]+\(?.*silent for \d+ s, .*or its host is lost; rank \d has waited"
NO_STORE = r"^store of the job: it does not answer .* rank \d has stood still for \d+ s in "


@pytest.mark.slow
def test_a_cut_cable_ends_the_ranks_of_both_hosts_by_name(hosts, tmp_path):
    """torchrun itself, on the host without the rendezvous, waits for as long as TCP does."""
    job = Job(hosts, FOR_EVER, tmp_path)
    job.wait_for_step(5)
    hosts.other.cut()
    assert job.one.wait(90) != 0
    assert re.search(SILENT, (tmp_path / "ha.log").read_text(), re.MULTILINE), job.text()
    end = time.monotonic() + 30
    while ranks := hosts.other.ranks():
        assert time.monotonic() < end, ranks
        time.sleep(0.1)
    assert re.search(NO_STORE, (tmp_path / "hb.log").read_text(), re.MULTILINE), job.text()


def test_a_lost_host_ends_the_other_by_name(hosts, tmp_path):
    """Its connections say nothing: after as long as a step may take."""
    job = Job(hosts, FOR_EVER, tmp_path)
    job.wait_for_step(5)
    hosts.other.kill()
    began = time.monotonic()
    assert job.one.wait(120) != 0
    assert time.monotonic() - began < 90
    assert re.search(SILENT, (tmp_path / "ha.log").read_text(), re.MULTILINE), job.text()


def test_a_host_that_comes_back_lets_the_job_resume(hosts, tmp_path):
    """It ends with the losses of an undisturbed run."""
    words = [*SHAPE, "--train-iters", "40"]
    saved = tmp_path / "saved"
    saving = ["--save-interval", "10", "--save", str(saved), "--load", str(saved)]
    job = Job(hosts, [*words, *saving], tmp_path, restarts=3)
    job.wait_for_step(23)
    hosts.other.kill()
    job.other.wait(20)
    hosts.other.mend()
    again = job.start(hosts.other)
    assert [job.one.wait(120), again.wait(120)] == [0, 0], job.text()[-4000:]
    assert "loaded the checkpoint of iteration 20" in job.text()
    assert len(job.losses()) == 40
    assert job.losses() == on_one_host(words, tmp_path)

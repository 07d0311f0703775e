"""Processes that load data: none hangs where it is forked, and all outlast a job's signals."""

import multiprocessing
import os
import signal
import time

import pytest
from torch.utils.data import DataLoader

from megatron_merak.errors import DataError
from megatron_merak.hf_trainer.batches import workers
from tests.hf_trainer.stand_in import samples
from tests.hf_trainer.test_inputs import build


def hangs():
    """As Python before 3.11.10 does where another thread holds its list of threads."""
    while True:
        time.sleep(100)


def dies():
    os.kill(os.getpid(), signal.SIGUSR1)


def faulty_forks(monkeypatch, fault, faults):
    """Let the first forks of this process be faulty; return the processes, as they are forked."""
    fork = os.fork
    forked = []

    def faulty():
        pid = fork()
        if pid == 0 and len(forked) < faults:
            fault()
        forked.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", faulty)
    monkeypatch.setattr(workers, "PATIENCE", (0.5, 10.0))
    return forked


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", [hangs, dies])
def test_a_process_that_never_begins_is_forked_again(tmp_path, monkeypatch, fault):
    alone = build(tmp_path, data=samples(8))
    helped = build(tmp_path, data=samples(8), changes={"dataloader_num_workers": 1})
    alone.train()
    forked = faulty_forks(monkeypatch, fault, 1)
    helped.train()
    assert helped.engine.seen == alone.engine.seen
    assert len(forked) > 1
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)


def test_where_no_process_begins_one_line_says_so(monkeypatch):
    forked = faulty_forks(monkeypatch, dies, 2)
    loader = DataLoader(
        range(4), num_workers=1, multiprocessing_context=workers.loading_context(None)
    )
    with pytest.raises(DataError, match="2 processes that load data were forked, and none began"):
        iter(loader)
    assert len(forked) == 2


def test_a_process_outlasts_signals_when_its_start_returns():
    """So whoever ends then finds that it leads a session, and ends it."""
    process = workers.loading_context("fork").Process(target=time.sleep, args=(100,), daemon=True)
    process.start()
    assert os.getsid(process.pid) == process.pid
    os.kill(process.pid, signal.SIGUSR1)
    os.kill(process.pid, signal.SIGTERM)
    process.join(0.3)
    assert process.is_alive()
    workers.end_workers()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


def test_other_ways_to_start_processes_stay_as_they_are():
    usual = multiprocessing.get_all_start_methods()[0]
    assert workers.loading_context("spawn") == "spawn"
    assert (workers.loading_context(None) is None) == (usual != "fork")

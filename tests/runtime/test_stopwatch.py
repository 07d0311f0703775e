"""Times of a GPU's work: by events on its stream, read when all is launched; the host's clock sees
launches only.
"""

from collections import deque

import torch

from megatron_merak.plan import Grid
from megatron_merak.runtime import executor
from megatron_merak.runtime.stopwatch import GpuStopwatch
from tests.parity.cases import Case
from tests.rehearsal.device import DEVICE, Rehearsal
from tests.rehearsal.trainers import gpt, mesh_of


class Gpu:
    """A device that works behind the host: an event happens when what was launched before it is
    done.
    """

    def __init__(self):
        self.host, self.queue, self.time, self.waits = 100.0, deque(), 0.0, 0
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing
                self.time = None

            def record(self, stream):
                assert stream == "stream"
                gpu.queue.append(self)

            def elapsed_time(self, other):
                return 1e3 * (other.time - self.time)

        self.Event = Event

    def current_stream(self, device):
        return "stream"

    def launch(self, seconds):
        self.host += 1e-6
        self.queue.append(seconds)

    def synchronize(self, device):
        self.waits += 1
        while self.queue:
            work = self.queue.popleft()
            if isinstance(work, float):
                self.time += work
            else:
                work.time = self.time
        self.host = max(self.host, 100.0 + self.time)

    def now(self):
        return self.host


def test_times_are_those_of_the_device():
    gpu = Gpu()
    gpu.launch(0.5)
    watch = GpuStopwatch(gpu.now, DEVICE, gpu)
    start = gpu.now()
    marks = [watch.mark()]
    for seconds in (2.0, 3.0):
        gpu.launch(seconds)
        marks.append(watch.mark())
    assert gpu.now() - start < 1e-3 and gpu.waits == 1
    found = [watch.seconds(mark) - start for mark in marks]
    torch.testing.assert_close(found, [0.0, 2.0, 5.0])
    assert gpu.waits == 2


def test_a_step_marks_every_op_and_waits_when_all_are_launched(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(
        executor, "GpuStopwatch", lambda now, device: GpuStopwatch(gpu.now, device, gpu)
    )
    with mesh_of(Grid(), 0) as mesh, Rehearsal():
        trainer, batches = gpt(Case("gpt2"), 2, mesh)
        engine = trainer.model.executor(2)
        perform = engine._passes
        monkeypatch.setattr(engine, "_passes", lambda op: (gpu.launch(1.0), perform(op))[1])
        monkeypatch.setattr(mesh.clock, "now", None)
        engine.trace = []
        trainer.step(batches)
        times = [
            (op, round(start - 100, 3), round(end - 100, 3)) for op, start, end in engine.trace
        ]
        assert (
            times == [("0F0", 0, 1), ("0B0", 1, 2), ("0F1", 2, 3), ("0B1", 3, 4)] and gpu.waits == 2
        )
        engine.trace = None
        trainer.step(batches)
        assert gpu.waits == 2

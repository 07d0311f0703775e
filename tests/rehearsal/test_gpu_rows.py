"""Rows of benchmarks/gpu_step.py on a GPU that only pretends: in a micro-batch nothing is on the CPU or waits."""

import sys
import time
from pathlib import Path

import pytest
import torch

from .device import DEVICE, Rehearsal
from .driver import driver

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_rows  # noqa: E402
import gpu_worker  # noqa: E402
from gpu_stopwatch import Stopwatch  # noqa: E402

SMALL = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 96, "vocabulary": 256}


class FromSecondStep(Stopwatch):
    """The first step computes tables, which later ones must not."""

    rehearsal: Rehearsal

    def step(self):
        super().step()
        if len(self.ends) == 1:
            self.rehearsal.findings.clear()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set", "ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("model", "contestant"),
    [("8b", "native")]
    + [
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (("7b", "native"), ("7b", "trainer"), ("8b-lora", "trainer"), ("8b", "captured"))
    ],
)
def test_a_row(model, contestant, tmp_path, monkeypatch):
    groups = 1 if model.startswith("8b") else 2
    shape = gpu_rows.replace(gpu_rows.SHAPES[model], **SMALL, groups=groups, lora=4 if "lora" in model else 0)
    monkeypatch.setitem(gpu_rows.SHAPES, model, shape)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 1)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(Stopwatch, "_start_profile", lambda self: None)
    drawn = gpu_worker.hf_model  # transformers asks C++ for the default device when it draws weights on a GPU
    monkeypatch.setattr(gpu_worker, "hf_model", lambda shape, sequence, _: drawn(shape, sequence, torch.device("cpu")))
    row, into = gpu_rows.Row(model, contestant, 2), tmp_path / "row.json"
    with Rehearsal() as rehearsal, driver():
        stopwatch = FromSecondStep(row, DEVICE, 32, 1, into, time.time())
        stopwatch.rehearsal = rehearsal
        gpu_worker.run(row, stopwatch)
    assert stopwatch.found["status"] == "measured" and stopwatch.found["device"] == "NVIDIA H200"
    assert stopwatch.found["mfu"] == pytest.approx(stopwatch.found["tflops"] * 1e12 / 989.4e12) and into.exists()
    assert rehearsal.findings and not rehearsal.inside(), "\n".join(rehearsal.inside())

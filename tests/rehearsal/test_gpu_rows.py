"""Training steps of a session on a GPU that only pretends: in a micro-batch nothing is on the CPU
or waits.
"""

import json
import sys
from pathlib import Path

import pytest

from .program import on_a_pretended_gpu

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_rows  # noqa: E402

SMALL = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 96, "vocabulary": 256}


def small(monkeypatch, model):
    groups = 1 if model in ("8b", "8b-lora", "qwen") else 2
    shape = gpu_rows.replace(
        gpu_rows.SHAPES[model], **SMALL, groups=groups, lora=4 if "lora" in model else 0
    )
    monkeypatch.setitem(gpu_rows.SHAPES, model, shape)


@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set", "ignore:Accessing the data pointer of FakeTensor"
)
@pytest.mark.parametrize(
    ("model", "contestant"),
    [("7b", "gpt")]
    + [
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            ("8b", "gpt"),
            ("qwen", "trainer"),
            ("8b-lora", "trainer"),
            ("7b-12", "captured"),
        )
    ],
)
def test_a_row(model, contestant, tmp_path, monkeypatch):
    small(monkeypatch, model)
    into = tmp_path / "row.json"
    on_a_pretended_gpu(["benchmarks/gpu_worker.py", f"{model} {contestant} 8", "--into", str(into)])
    found = json.loads(into.read_text())
    assert found["row"] == f"{model} {contestant} 2" and found["device"] == "NVIDIA H100 80GB HBM3"
    assert found["mfu"] == pytest.approx(found["tflops"] * 1e12 / 989.4e12)
    assert found["wrong"] == [] and found["launches"] > 50
    assert found["peak"] > gpu_rows.SHAPES[model].state_bytes

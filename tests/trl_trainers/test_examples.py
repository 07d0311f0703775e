"""The examples with TRL's trainers, run as their first lines say: what they learn, on one rank and
on two.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]


def output_of(name: str, directory: Path, steps: int, ranks: int = 1, *arguments: str) -> str:
    """What an example prints."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        f"examples/{name}.py",
    ]
    command += ["--output_dir", str(directory), "--steps", str(steps), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", text)]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_fine_tuning_packed_rows_with_adapters(tmp_path):
    text = output_of("sft_lora", tmp_path / "one", 20)
    before, after = re.search(
        r"unseen documents: (\S+) before, (\S+) with the adapters", text
    ).groups()
    assert float(after) < float(before) - 0.3
    AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "merged")
    model = str(tmp_path / "one" / "pretrained")
    again = output_of(
        "sft_lora", tmp_path / "two", 20, 2, "--model", model, "--pipeline_model_parallel_size", "2"
    )
    assert not (tmp_path / "two" / "pretrained").exists()
    assert losses(again) == pytest.approx(losses(text), abs=2e-3) and len(losses(text)) == 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_preferences_are_learned(tmp_path):
    text = output_of("preferences", tmp_path, 60)
    found = dict(re.findall(r"(fine-tuning loss|preference loss|preferred) +=\s+([\d.]+)", text))
    assert float(found["fine-tuning loss"]) < 1.5 and float(found["preferred"]) > 0.95

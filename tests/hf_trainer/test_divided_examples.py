"""The examples of divided sequences and experts, on one process and on ranks, by their commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["--max_steps", "3", "--logging_steps", "1", "--disable_tqdm", "true"]
EXPERTS = "--tensor_model_parallel_size 2 --sequence_parallel true --expert_model_parallel_size 2"
EXAMPLES = [
    ("long_context.py", "--context_parallel_size 2"),
    ("mixture.py", EXPERTS),
]


def losses(directory, ranks, example, *changes):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*launch, str(ranks), f"examples/{example}", *STEPS, *changes]
    command += ["--output_dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    steps = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", done.stdout)]
    (evaluated,) = re.findall(r"eval_loss += +([\d.]+)", done.stdout)
    return [*steps, float(evaluated)]


@pytest.mark.slow
@pytest.mark.parametrize(("example", "degrees"), EXAMPLES)
def test_ranks_tell_the_losses_of_one_process(tmp_path, example, degrees):
    alone = losses(tmp_path / "one", 1, example)
    shared = losses(tmp_path / "two", 2, example, *degrees.split())
    assert len(alone) == 4 and shared == pytest.approx(alone, abs=2e-3)
    assert degrees.replace(" ", "") in re.sub(
        r"[\s\\]", "", (ROOT / "examples" / example).read_text()
    )

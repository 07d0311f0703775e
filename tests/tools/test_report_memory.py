"""tools/report_memory.py as its users run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

TOOL = "report_memory"
ROOT = Path(__file__).parents[2]
FLAGS = """--world-size 4 --num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 500
    --micro-batch-size 2 --global-batch-size 16 --pipeline-model-parallel-size 4""".split()
FULL = "--recompute-granularity full".split()


def rows(text: str, heading: str) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines()]
    start = next(index for index, line in enumerate(lines) if line[:1] == [heading])
    return [line for line in lines[start + 1 :] if line and line[0].isdecimal()]


def test_the_classic_figures(run):
    """A 64000 x 5120 table in fp32 takes 1250 MB, its gradient as much; 175B parameters 700 GB, in
    fp16 350 GB.
    """
    text = run("--classic")
    table, gradient = (
        next(line for line in text.splitlines() if line.startswith(what))
        for what in ("64000", "its fp32")
    )
    assert table.split()[-4:] == ["1250", "MB", "625", "MB"] and gradient.split()[3:5] == [
        "1250",
        "MB",
    ]
    assert next(line for line in text.splitlines() if line.startswith("175B")).split()[2:] == [
        "700",
        "GB",
        "350",
        "GB",
    ]


def test_stages_ranks_and_a_picture(run, tmp_path):
    text = run(*FLAGS, "--picture", tmp_path / "memory.png")
    assert "modelled" in text and len(rows(text, "stage")) == 4
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    virtual = run(
        *FLAGS,
        "--pipeline-schedule",
        "interleaved",
        *"--num-virtual-stages-per-pipeline-rank 2".split(),
    )
    assert [row[1] for row in rows(virtual, "rank")] == ["0,4", "1,5", "2,6", "3,7"]


def test_recomputation_shows_in_the_activations(run):
    kept, again = run(*FLAGS), run(*FLAGS, *FULL)
    assert "recomputed units per stage: 0/2" in kept and "recomputed units per stage: 1/2" in again
    assert rows(kept, "stage")[0] != rows(again, "stage")[0]


def test_a_stored_plan(run, load, tmp_path):
    load("plan").main(["show", *FLAGS, "--json", str(tmp_path / "plan.json")])
    run("--classic")
    assert run("--plan", tmp_path / "plan.json") == run(*FLAGS)


def test_a_huggingface_model(run, tmp_path):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=128,
    )
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    flags = "--world-size 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --pipeline-model-parallel-size 2"
    text = run("--model", path, *flags.split())
    assert len(rows(text, "stage")) == 2 and "Captured" in text


def test_a_stored_plan_needs_no_torch(tmp_path):
    program = (
        "import runpy, sys; sys.argv = ['report_memory.py', *sys.argv[1:]]\n"
        "runpy.run_path('tools/report_memory.py', run_name='__main__')\n"
        "print([name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, *FLAGS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "nowhere.json"], ["plan nowhere.json", "cannot be read"]),
        (["--classic", "--bf16"], ["--classic --bf16", "Leave them out"]),
        ([*FLAGS, "--picture", "memory.svg"], ["--picture memory.svg", ".png"]),
        (
            [*FLAGS, *FULL, "--recompute-method", "capacity"],
            ["--recompute-method capacity", "--device-memory-gb"],
        ),
        ([*FLAGS[2:]], ["--world-size (missing)"]),
    ],
)
def test_mistakes_are_told(run, arguments, words):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert all(word in str(caught.value) for word in words), caught.value

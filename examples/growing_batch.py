"""GPT-3's batch schedule in small: batches that grow sixteenfold, beside batches that are large
from the start.

    python examples/growing_batch.py [--samples 4096] [--directory runs/growing_batch]

GPT-3 began with batches of 32 thousand tokens and grew them to 3.2 million; its learning rate
followed samples, with a short warm-up and a cosine. Both runs here read the same samples of
Python's standard library with the same learning rate at each of them, on 4 CPU ranks as 2 pipeline
x 2 data parallel. While batches are small the model takes more, noisier steps.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import stdlib_corpus

from megatron_merak.errors import MerakError

ROOT = Path(__file__).resolve().parent.parent
MODEL = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --num-layers 4 --hidden-size 96 --num-attention-heads 4 --seq-length 64
    --pipeline-model-parallel-size 2"""
BATCH, SMALLEST = 64, 4
GOAL = 6.0


def command(directory: Path, name: str, samples: int) -> list[str]:
    """One run of so many samples: ``name`` is 'growing' or 'constant'."""
    corpus, metrics = directory / "corpus", directory / f"{name}.jsonl"
    metrics.unlink(missing_ok=True)
    recipe = f"""--micro-batch-size 2 --global-batch-size {BATCH} --train-samples {samples} --lr 4e-3
        --lr-warmup-samples {samples // 16} --lr-decay-samples {samples * 7 // 8} --log-interval 32 --eval-iters 8"""
    ramp = f"--rampup-batch-size {SMALLEST} {SMALLEST} {samples // 4}" if name == "growing" else ""
    return [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        "--nproc-per-node",
        "4",
        *MODEL.split(),
        *recipe.split(),
        *ramp.split(),
        "--data-path",
        str(corpus / "stdlib_text_document"),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(corpus / "tokenizer.json"),
        "--metrics",
        str(metrics),
    ]


def rows_of(path: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == kind]


def draw(directory: Path) -> Path:
    """Loss, batch size and learning rate of both runs over the samples that they have seen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, batch, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    for name, color in (("constant", "#C05621"), ("growing", "#2B6CB0")):
        rows = rows_of(directory / f"{name}.jsonl", "train")
        seen = [row["consumed_samples"] for row in rows]
        sizes = [after - before for before, after in zip([0, *seen], seen, strict=False)]
        loss.plot(
            seen,
            [row["loss"] for row in rows],
            color=color,
            lw=1.2,
            label=f"{name} batch: {len(rows)} steps",
        )
        batch.plot(seen, sizes, color=color, lw=1.2, drawstyle="steps-pre")
        rate.plot(seen, [row["learning_rate"] for row in rows], color=color, lw=1.2)
    for axes, label in (
        (loss, "loss (nats per token)"),
        (batch, "samples per step"),
        (rate, "learning rate"),
    ):
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    rate.set_xlabel("samples")
    loss.legend(frameon=False)
    path = directory / "growing_batch.png"
    figure.savefig(path)
    return path


def main() -> int:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--samples", type=int, default=4096, help="training samples of each run")
    flags.add_argument(
        "--directory",
        type=Path,
        default=Path("runs/growing_batch"),
        help="where everything is written",
    )
    options = flags.parse_args()
    if options.samples < BATCH:
        reason = f"it is below a batch of {BATCH}"
        flags.error(f"--samples {options.samples}: {reason}. Give at least {BATCH}.")
    try:
        stdlib_corpus.build(options.directory / "corpus", vocab_size=2048, max_bytes=8_000_000)
    except MerakError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    told = []
    for name in ("constant", "growing"):
        done = subprocess.run(command(options.directory, name, options.samples), env=environment)
        if done.returncode:
            return done.returncode
        rows = rows_of(options.directory / f"{name}.jsonl", "train")
        (valid,) = rows_of(options.directory / f"{name}.jsonl", "valid")
        first = next((row["consumed_samples"] for row in rows if row["loss"] < GOAL), "no")
        reached = f"a loss of {GOAL} after {first} samples, {valid['loss']:.2f} in validation"
        told.append(f"{name + ' batch:':15} {len(rows):4} steps, {reached}")
    print("\n" + "\n".join([*told, f"picture: {draw(options.directory)}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

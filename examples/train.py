"""`make train`: pretrain a small GPT on the source code of Python's standard library, with all
three parallelisms.

    python examples/train.py [--train-iters 160] [--directory runs/train]

prepares the corpus, starts pretrain_gpt.py under torchrun (8 CPU ranks as 2 tensor x 2 pipeline x 2
data parallel, or the GPUs there are), and compares the validation loss with the entropy of the
unigram distribution. Run again, it resumes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron_merak.cli.report import write as write_report
from megatron_merak.counting import counted
from megatron_merak.errors import MerakError
from megatron_merak.training.pictures import draw_curve

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stdlib_corpus

ROOT = Path(__file__).resolve().parent.parent
MODEL = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --untie-embeddings-and-output-weights --num-layers 4 --hidden-size 128 --num-attention-heads 4
    --seq-length 128"""
STEPS = 160
RECIPE = """--micro-batch-size 4 --global-batch-size 32 --lr 4e-3 --log-interval 10
    --eval-interval 50 --eval-iters 4 --save-interval 50 --save-retain-interval 100"""


def degrees(devices: int) -> tuple[int, int, int]:
    """(ranks, tensor parallel, pipeline parallel) for this many GPUs, or for 8 CPU ranks where
    there is none.
    """
    ranks = next(n for n in (8, 4, 2, 1) if n <= devices) if devices else 8
    return ranks, 2 if ranks >= 4 else 1, 2 if ranks >= 2 else 1


def command(directory: Path, train_iters: int) -> list[str]:
    ranks, tensor, pipeline = degrees(torch.cuda.device_count())
    corpus, checkpoints = directory / "corpus", directory / "checkpoints"
    return [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        "--nproc-per-node",
        str(ranks),
        *MODEL.split(),
        *RECIPE.split(),
        "--train-iters",
        str(train_iters),
        "--lr-warmup-iters",
        str(min(20, train_iters // 8)),
        "--tensor-model-parallel-size",
        str(tensor),
        "--pipeline-model-parallel-size",
        str(pipeline),
        "--data-path",
        str(corpus / "stdlib_text_document"),
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(corpus / "tokenizer.json"),
        "--save",
        str(checkpoints),
        "--load",
        str(checkpoints),
        "--run-dir",
        str(directory),
        "--timeline",
        str(directory / "timeline.png"),
    ]


def conclude(directory: Path, entropy: float, steps: int) -> int:
    """Draw the curve and the report, and say how far the model got; status 1 when it learned less
    than one nat of context in as many steps as usual.
    """
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    draw_curve(rows, directory / "loss.png", {"unigram entropy": entropy})
    write_report(directory, directory / "report.html")
    loss = [row["loss"] for row in rows if row["kind"] == "valid"][-1]
    where = f"{abs(entropy - loss):.3f} {'below' if loss < entropy else 'above'}"
    print(
        f"\nvalidation loss {loss:.3f} nats per token: {where} the unigram entropy of {entropy:.3f}"
    )
    for name in ("report.html", "loss.png", "timeline.png", "metrics.jsonl", "checkpoints"):
        if (directory / name).exists():
            print(f"  {directory / name}")
    if loss < entropy - 1:
        return 0
    print("It has learned less than a nat of context: raise --train-iters.", file=sys.stderr)
    return int(steps >= STEPS)


def main() -> int:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument(
        "--train-iters",
        type=int,
        default=STEPS,
        help="optimizer steps; raise it to train a finished run further",
    )
    flags.add_argument(
        "--directory", type=Path, default=Path("runs/train"), help="where everything is written"
    )
    options = flags.parse_args()
    try:
        facts = stdlib_corpus.build(
            options.directory / "corpus", vocab_size=8192, max_bytes=16_000_000
        )
    except MerakError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    entropy = facts["unigram_entropy_nats"]
    documents, tokens = counted(facts["documents"], "document"), counted(facts["tokens"], "token")
    print(f"corpus: {documents}, {tokens}, unigram entropy {entropy:.3f} nats")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command(options.directory, options.train_iters), env=environment)
    return done.returncode or conclude(options.directory, entropy, options.train_iters)


if __name__ == "__main__":
    sys.exit(main())

"""How fast is merak-preprocess beside Megatron-LM's tools/preprocess_data.py?

    python -m benchmarks preprocess                    # four minutes
    python -m benchmarks preprocess --megabytes 0.2 --repeats 1

The text is the source code of this Python's standard library, as JSON lines, tokenized with a byte-level
vocabulary of 8192 ids made from it. The peer is that tool's loop over megatron-core's own parts:
its tokenizer, its IndexedDatasetBuilder, and multiprocessing.Pool.imap in chunks of 32 documents.
Both run alone, in turns, as commands with 1 and 2 workers, and the bytes that they write are
compared. MB/s is text per second of the whole command; MB/s a core is text per CPU second of all
processes, without those of the start, which a run on almost no text takes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import ROOT
from benchmarks.runs import circumstances
from examples.stdlib_corpus import source_files
from megatron_merak.data.train_tokenizer import train_byte_bpe

PEER = Path(__file__).with_name("peer.py")
VOCABULARY = 8192


class Times(NamedTuple):
    """Seconds of one run: on the wall, and of all its processes' CPUs."""

    wall: float
    cpu: float


def prepare(root: Path, megabytes: float) -> int:
    """Write the text and a tokenizer in two forms; return the bytes of the text."""
    files = source_files(Path(sysconfig.get_path("stdlib")), int(megabytes * 1e6))
    texts = [content.decode() for _, content in files]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (root / "text.jsonl").write_text(lines)
    (root / "start.jsonl").write_text(json.dumps({"text": texts[0][:100]}) + "\n")
    train_byte_bpe(texts[:400], VOCABULARY, root / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    return sum(len(text.encode()) for text in texts)


def commands(root: Path, text: str, workers: int) -> dict[str, list[str]]:
    """Both commands, by contestant."""
    shared = ["--input", str(root / text), "--workers", str(workers), "--append-eod"]
    ours = ["-m", "megatron_merak", "preprocess", *shared, "--output-prefix", str(root / "ours")]
    ours += ["--tokenizer-type", "HuggingFaceTokenizer"]
    ours += ["--tokenizer-model", str(root / "tokenizer.json")]
    theirs = [str(PEER), *shared, "--output-prefix", str(root / "theirs")]
    theirs += ["--tokenizer-model", str(root)]
    return {"merak-preprocess": ours, "megatron-core": theirs}


def timed(command: Sequence[str]) -> Times:
    """Run a command, its tokenizer without threads of its own, to its end."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env=environment)
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Times(wall, cpu)


def compare(root: Path) -> None:
    """Raise AssertionError unless both wrote the same bytes."""
    for suffix in ("bin", "idx"):
        ours, theirs = (root / f"{name}_text_document.{suffix}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes(), f"the .{suffix} files differ"


def rates(
    root: Path, size: int, workers: int, repeats: int
) -> dict[str, list[tuple[float, float]]]:
    """Return MB/s on the wall and a core of each contestant, of runs in turns."""
    measured: dict[str, list[tuple[float, float]]] = {}
    for _ in range(repeats):
        starts = commands(root, "start.jsonl", workers)
        for name, command in commands(root, "text.jsonl", workers).items():
            start = timed(starts[name])
            whole = timed(command)
            rate = (size / 1e6 / whole.wall, size / 1e6 / (whole.cpu - start.cpu))
            measured.setdefault(name, []).append(rate)
        compare(root)
    return measured


def shown(rates: Sequence[float]) -> str:
    """The median of rates, and from the slowest to the fastest."""
    return f"{median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=16.0, help="of text (16)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each contestant (3)")
    options = parser.parse_args()
    where = circumstances()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        size = prepare(root, options.megabytes)
        print(
            f"{where['machine']}, {where['cores']} cores, load {os.getloadavg()[0]:.1f} at the "
            f"start, {where['date']}; {size / 1e6:.1f} MB of text, median of {options.repeats} "
            "runs (slowest-fastest) in turns; the same bytes each time"
        )
        print("\n| workers | program | MB/s | MB/s a core |\n|---|---|---|---|")
        for workers in (1, 2):
            for name, runs in rates(root, size, workers, options.repeats).items():
                walls, cores = zip(*runs, strict=True)
                print(f"| {workers} | {name} | {shown(walls)} | {shown(cores)} |", flush=True)
    return 0

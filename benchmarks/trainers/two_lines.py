"""The same training script through HuggingFace's Trainer and, two lines changed, through MerakTrainer: as shipped.

    python -m benchmarks two_lines --json result.json   # every row, 5 repeats in turns; 25 minutes on two idle cores
    python -m benchmarks two_lines --only 'fp32 one' --repeats 3
    python -m benchmarks two_lines --quick              # a tiny model, once: does it all still run?
    python -m benchmarks two_lines --from result.json --into README.md docs/evidence/benchmarks.md   # no run: its table

The script is two_lines_script.py. Nothing is tuned on either side: no thread count, no allocator, no precision.
HuggingFace's Trainer has no pipeline and no tensor parallelism for this model; those rows stand beside torch's own, out
of the box (`python -m benchmarks step`), and Megatron-core's tensor parallelism where that package is installed. It is
an error if losses disagree. Rows are printed, and the JSON is written, as soon as they are measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks import ROOT
from benchmarks.runs import add_options, parsed, show
from benchmarks.step.cases import (
    DATA,
    LAYOUTS,
    ONE,
    PEER_OF,
    PIPELINE,
    PRECISIONS,
    TENSOR,
    Case,
    ModelShape,
)
from benchmarks.step.launcher import Settings, free_port, run_case
from benchmarks.trainers.measuring import MEASURED
from benchmarks.trainers.rows import (
    HEADER,
    OURS,
    Row,
    beside,
    check_chosen,
    disagreement,
    page,
    save,
)
from benchmarks.two_lines_page import versions

SCRIPT = Path(__file__).resolve().with_name("two_lines_script.py")
BEGIN, END = "<!-- written by: python -m benchmarks two_lines -->", "<!-- end of two_lines -->"
CHANGES = {
    "from transformers import Trainer, TrainingArguments  # 1": (
        "from megatron_merak import MerakArguments as TrainingArguments, MerakTrainer as Trainer  # 1"
    ),
    "arguments = TrainingArguments(**settings_of(options))  # 2": (
        'arguments = TrainingArguments(**settings_of(options), **options["degrees"])  # 2'
    ),
}
PEERS = {ONE: "HF Trainer", DATA: "HF Trainer (DDP)", PIPELINE: "torch 1F1B", TENSOR: "torch TP"}
MEGATRON = "Megatron-core TP"
FULL = {
    "vocabulary": 32000,
    "hidden": 512,
    "layers": 8,
    "mlp": 1376,
    "sequence": 256,
    "micro_batches": 8,
}
QUICK = {"vocabulary": 512, "hidden": 64, "layers": 2, "mlp": 128, "sequence": 32}


def changed(text: str) -> str:
    """The script with its two lines changed."""
    for before, after in CHANGES.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def run_script(row: Row, options: dict, warmup: int, timeout: float) -> None:
    """Run the script as a user starts it and add what it measured. Raises RuntimeError when it
    fails.

    options: those of the script; "more" are further training arguments.
    """
    tp, pp, dp = LAYOUTS[row.layout]
    given = {
        **options,
        "bf16": row.precision == "bf16",
        "degrees": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp},
        "replicas": dp,
    }
    measure(row, SCRIPT, given, ranks=tp * pp * dp, warmup=warmup, timeout=timeout)


def measure(row: Row, script: Path, options: dict, ranks: int, warmup: int, timeout: float) -> None:
    """Run a script as a user starts it, two lines changed if it is ours, and add what it measured.

    options: those of the script, but for its directory.
    warmup:  steps that are not counted.

    Raises RuntimeError when it fails.
    """
    text = script.read_text(encoding="utf-8")
    unset = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    paths = [str(ROOT), str(script.parent), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory(prefix="two_lines_") as directory:
        copy = Path(directory) / "script.py"
        copy.write_text(
            changed(text) if row.contestant.startswith(OURS) else text, encoding="utf-8"
        )
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        launcher += ["--master-port", str(free_port())]
        given = json.dumps({**options, "directory": directory})
        command = [sys.executable, *(launcher if ranks > 1 else []), str(copy), given]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout
        )
    said = [line for line in done.stdout.splitlines() if line.startswith(MEASURED)]
    if done.returncode or len(said) != 1:
        raise RuntimeError(
            f"{row.name} ended with status {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
        )
    found = json.loads(said[0].removeprefix(MEASURED))
    row.rates.append(
        options["sequence"] * options["micro_batches"] / median(found["seconds"][warmup:])
    )
    row.losses.append(found["losses"])
    row.peaks.append(found["peak_mib"])


def shape_of(options: dict) -> ModelShape:
    return ModelShape(**{name: options[name] for name in FULL})


def run_peer(row: Row, options: dict, warmup: int, timeout: float) -> None:
    """Run torch's own pipeline or tensor parallelism, or Megatron's, out of the box."""
    shape = shape_of(options)
    split = shape.layers // 2 if row.layout == PIPELINE else None
    peer = "megatron-core" if row.contestant == MEGATRON else PEER_OF[row.layout]
    case = Case(peer, row.layout, row.precision, tuned=False, first_stage_layers=split)
    timed_peer(row, case, shape, warmup=warmup, steps=options["steps"], timeout=timeout)


def timed_peer(
    row: Row, case: Case, shape: ModelShape, warmup: int, steps: int, timeout: float
) -> None:
    """Run a peer of benchmarks/step/step.py for as many steps as the script, and add what it
    measured.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    settings = Settings(
        warmup=warmup + 1,
        steps=steps - warmup - 1,
        seed=1234,
        timeout=timeout,
        cores=cores,
        keep_memory=False,
    )
    results = run_case(case, shape, settings)
    slowest = [max(walls) for walls in zip(*(rank["wall_s"] for rank in results), strict=True)]
    row.rates.append(shape.tokens / median(slowest))
    row.losses.append(results[-1]["losses"])
    row.peaks.append(max(rank["peak_bytes"] for rank in results) >> 20)


def contestants(precision: str, layout: str) -> list[Row]:
    """The rows of one layout, peers first."""
    peers = [PEERS[layout]]
    if layout == TENSOR and "megatron-core" in versions():
        peers.append(MEGATRON)
    rows = [Row(precision, layout, peer, script=layout in (ONE, DATA)) for peer in peers]
    return [*rows, Row(precision, layout, OURS)]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows with TEXT in 'fp32 pp2'-like names"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of a run; the first is not counted (4)"
    )
    parser.add_argument("--warmup", type=int, default=0, help="more steps that are not counted (0)")
    add_options(parser, repeats=5, timeout=900)
    return parsed(parser, argv)


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    if given.saved:
        return show(page(given.saved), given.into, BEGIN, END)
    return run(given)


def run(given: argparse.Namespace) -> int:
    """Measure; 1 where losses disagree."""
    options = FULL | {"steps": given.steps} | (QUICK if given.quick else {})
    groups = [contestants(*each) for each in product(PRECISIONS, (ONE, PIPELINE, TENSOR, DATA))]
    groups = [each for each in groups if given.only in f"{each[0].precision} {each[0].layout}"]
    check_chosen(groups, given.only)
    rows: list[Row] = []
    print(HEADER, flush=True)
    for group in groups:
        for repeat in range(1 if given.quick else given.repeats):
            for row in group:
                (run_script if row.script else run_peer)(row, options, given.warmup, given.timeout)
                print(
                    f"[{repeat + 1}] {row.name}: {row.rates[-1]:.0f} tokens/s",
                    file=sys.stderr,
                    flush=True,
                )
        rows += group
        print("\n".join(beside(group[-1], group)), flush=True)
        if given.json:
            save(given.json, rows, options)
    if wrong := disagreement(rows):
        print(f"Losses differ. {wrong}")
        return 1
    return 0

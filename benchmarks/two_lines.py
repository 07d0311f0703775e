"""The same training script through HuggingFace's Trainer and, two lines changed, through MerakTrainer: as shipped.

    python benchmarks/two_lines.py                     # every row, 5 repeats in turns; 40 minutes on two idle cores
    python benchmarks/two_lines.py --only 'fp32 one' --repeats 3 --json result.json
    python benchmarks/two_lines.py --quick             # a tiny model, once: does it all still run?

The script is benchmarks/two_lines_script.py. Nothing is tuned on either side: no thread count, no allocator, no
precision. HuggingFace's Trainer has no pipeline and no tensor parallelism for this model; those rows stand beside
torch's own, out of the box (benchmarks/step.py). It is an error if losses disagree.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from cases import DATA, LAYOUTS, ONE, PEER_OF, PIPELINE, PRECISIONS, TENSOR, Case, ModelShape
from launcher import Settings, free_port, run_case

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "two_lines_script.py"
CHANGES = {
    "from transformers import Trainer, TrainingArguments  # 1": (
        "from megatron_merak import MerakArguments as TrainingArguments, MerakTrainer as Trainer  # 1"
    ),
    "arguments = TrainingArguments(**settings)  # 2": (
        'arguments = TrainingArguments(**settings, **options["degrees"])  # 2'
    ),
}
OURS, PEERS = "MerakTrainer", {ONE: "HF Trainer", DATA: "HF Trainer (DDP)", PIPELINE: "torch 1F1B", TENSOR: "torch TP"}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
QUICK = {"vocabulary": 512, "hidden": 64, "layers": 2, "mlp": 128, "sequence": 32}
MEASURED = "measured "


@dataclass
class Row:
    """One contestant in one layout: tokens per second and the losses of each repeat."""

    precision: str
    layout: str
    contestant: str
    rates: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.precision} {self.layout} {self.contestant}"


def changed(text: str) -> str:
    """The script with its two lines changed."""
    for before, after in CHANGES.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def run_script(row: Row, options: dict, warmup: int, timeout: float) -> None:
    """Run the script as a user starts it and add what it measured. Raises RuntimeError when it fails."""
    tp, pp, dp = LAYOUTS[row.layout]
    ranks, text = tp * pp * dp, SCRIPT.read_text(encoding="utf-8")
    degrees = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    unset = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="two_lines_") as directory:
        script = Path(directory) / "script.py"
        script.write_text(changed(text) if row.contestant == OURS else text, encoding="utf-8")
        given = {**options, "bf16": row.precision == "bf16", "degrees": degrees, "replicas": dp, "directory": directory}
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
        command = [sys.executable, *(launcher if ranks > 1 else []), str(script), json.dumps(given)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    said = [line for line in done.stdout.splitlines() if line.startswith(MEASURED)]
    if done.returncode or len(said) != 1:
        raise RuntimeError(
            f"{row.name} ended with status {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
        )
    found = json.loads(said[0].removeprefix(MEASURED))
    row.rates.append(options["sequence"] * options["micro_batches"] / median(found["seconds"][warmup:]))
    row.losses.append(found["losses"])


def run_peer(row: Row, options: dict, warmup: int, timeout: float) -> None:
    """Run torch's own pipeline or tensor parallelism out of the box; its losses are checked by step.py."""
    shape = ModelShape(
        layers=options["layers"], hidden=options["hidden"], mlp=options["mlp"], vocabulary=options["vocabulary"],
        sequence=options["sequence"], micro_batches=options["micro_batches"],
    )  # fmt: skip
    split = shape.layers // 2 if row.layout == PIPELINE else None
    case = Case(PEER_OF[row.layout], row.layout, row.precision, False, split)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    steps = options["steps"] - warmup - 1
    results = run_case(case, shape, Settings(warmup + 1, steps, 1234, timeout, cores, False))
    slowest = [max(walls) for walls in zip(*(rank["wall_s"] for rank in results), strict=True)]
    row.rates.append(shape.tokens / median(slowest))


def disagreement(rows: list[Row]) -> str:
    """The first loss that differs from the other contestants' of the same precision; "" where all agree."""
    first: dict[str, list[float]] = {}
    for row in rows:
        for losses in row.losses:
            expected = first.setdefault(row.precision, losses)
            for step, (ours, theirs) in enumerate(zip(losses, expected, strict=True)):
                if not abs(ours - theirs) <= TOLERANCE[row.precision] * abs(theirs):
                    return f"{row.name}: loss {ours} at step {step}, {theirs} in another"
    return ""


def table(rows: list[Row]) -> str:
    """A row per layout and precision: tokens per second of the peer and of ours, median (range), and their ratio."""
    lines = ["| | peer | tokens/s | MerakTrainer, tokens/s | |", "|---|---|--:|--:|--:|"]
    for ours in (row for row in rows if row.contestant == OURS and row.rates):
        for peer in rows:
            if (peer.precision, peer.layout) == (ours.precision, ours.layout) and peer is not ours:
                place = "one process" if ours.layout == ONE else ours.layout.upper().replace("2", "=2")
                ratio = median(ours.rates) / median(peer.rates)
                figures = f"{_spread(peer.rates)} | {_spread(ours.rates)} | {ratio:.2f}x"
                lines.append(f"| {ours.precision}, {place} | {peer.contestant} | {figures} |")
    return "\n".join(lines)


def _spread(rates: list[float]) -> str:
    return f"{median(rates):.0f} ({min(rates):.0f}-{max(rates):.0f})"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with TEXT in 'fp32 pp2'-like names")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each contestant, in turns (5)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a run (6)")
    parser.add_argument("--warmup", type=int, default=1, help="intervals between steps that are not counted (1)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one run may take (900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    parser.add_argument("--quick", action="store_true", help="a tiny model, once: a smoke test, not a measurement")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    options = {"vocabulary": 32000, "hidden": 512, "layers": 8, "mlp": 1376, "sequence": 256, "micro_batches": 8}
    options |= {"steps": given.steps} | (QUICK if given.quick else {})
    rows = []
    for precision in PRECISIONS:
        for layout in (ONE, PIPELINE, TENSOR, DATA):
            pair = [Row(precision, layout, PEERS[layout]), Row(precision, layout, OURS)]
            if given.only not in f"{precision} {layout}":
                continue
            rows += pair
            for repeat in range(1 if given.quick else given.repeats):
                for row in pair:
                    by_torch = row.contestant != OURS and layout in (PIPELINE, TENSOR)
                    (run_peer if by_torch else run_script)(row, options, given.warmup, given.timeout)
                    print(f"[{repeat + 1}] {row.name}: {row.rates[-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    if wrong := disagreement(rows):
        print(f"Losses differ. {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

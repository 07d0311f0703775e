"""Ways to train on two replicas, through the trainers as shipped: speed and memory of one script.

    python benchmarks/data_parallel.py --json result.json   # 5 repeats in turns; 20 minutes on two idle cores
    python benchmarks/data_parallel.py --quick              # a tiny model, once: does it all still run?
    python benchmarks/data_parallel.py --from result.json --into docs/data_parallel.md   # no run: its table

The script is that of two_lines.py. HuggingFace's Trainer runs it under DistributedDataParallel; on CPUs it ignores fsdp
without a word, so that FSDP2 and DDP with ZeroRedundancyOptimizer are torch's own, out of the box, over HuggingFace's
model (peer_sharded.py), as is DeepSpeed's ZeRO stage 1 where deepspeed is installed (peer_deepspeed.py). MerakTrainer
has all state on every replica, or optimizer state shared, or everything.
"""

import argparse
import json
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median

from cases import DATA, PRECISIONS, Case, ModelShape
from two_lines import QUICK, run_script, timed_peer
from two_lines_page import OURS, PageError, Row, disagreement, save, write

SCRIPTS = {  # contestant -> training arguments beside those of the script
    "HF Trainer, DDP": {},
    OURS: {},
    f"{OURS}, use_distributed_optimizer": {"use_distributed_optimizer": True},
    f"{OURS}, fsdp full_shard": {"fsdp": "full_shard"},
}
PEERS = {"torch DDP, ZeroRedundancyOptimizer": "torch-zero-1", "torch FSDP2": "torch-fsdp2"}
if find_spec("deepspeed"):
    PEERS["DeepSpeed, ZeRO stage 1"] = "deepspeed-zero-1"
WAYS = ("HF Trainer, DDP", *PEERS, *list(SCRIPTS)[1:])
BEGIN, END = "<!-- written by benchmarks/data_parallel.py -->", "<!-- end of data_parallel -->"


def table(rows: list[Row]) -> str:
    """A row per precision and way: tokens per second, its ratio to DDP, and the peak of a rank."""
    lines = ["| two replicas | | tokens/s | | peak of a rank, MiB |", "|---|---|--:|--:|--:|"]
    for row in rows:
        first = next(each for each in rows if each.precision == row.precision)
        rate, base = median(row.rates), median(first.rates)
        spread = f"{rate:.0f} ({min(row.rates):.0f}-{max(row.rates):.0f})"
        peak = f"{median(row.peaks):.0f}"
        lines.append(f"| {row.precision} | {row.contestant} | {spread} | {rate / base:.2f}x | {peak} |")
    return "\n".join(lines)


def page(path: Path) -> str:
    """The table of a saved run under a line that says where and when it was measured."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in found["rows"]]
    packages = ", ".join(f"{package} {number}" for package, number in found["versions"].items())
    runs = f"Median of {max(len(row.rates) for row in rows)} runs (slowest-fastest), contestants in turns."
    return f"{found['machine']}, {found['cores']} cores, {packages}, {found['date']}. {runs}\n\n{table(rows)}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with TEXT in 'fp32 torch FSDP2'-like names")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each contestant, in turns (5)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one run may take (900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    parser.add_argument("--from", dest="saved", type=Path, metavar="FILE", help="run nothing: the table of this JSON")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write that table into this page")
    parser.add_argument("--quick", action="store_true", help="a tiny model, once: a smoke test, not a measurement")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, or show what was measured; 1 where losses disagree, 2 for a page without marks."""
    given = parse(argv)
    if given.saved:
        text = page(given.saved)
        try:
            write(given.into, text, BEGIN, END) if given.into else print(text)
        except PageError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    options = {"vocabulary": 32000, "hidden": 512, "layers": 8, "mlp": 1376, "sequence": 256, "micro_batches": 8}
    options |= {"steps": 4} | (QUICK if given.quick else {})
    names = ("layers", "hidden", "mlp", "vocabulary", "sequence", "micro_batches")
    shape = ModelShape(**{name: options[name] for name in names})
    rows = [Row(precision, DATA, name, script=name in SCRIPTS) for precision, name in product(PRECISIONS, WAYS)]
    rows = [row for row in rows if given.only in f"{row.precision} {row.contestant}"]
    for repeat in range(1 if given.quick else given.repeats):
        for row in rows:
            if row.script:
                run_script(row, options | {"more": SCRIPTS[row.contestant]}, 0, given.timeout)
            else:
                case = Case(PEERS[row.contestant], DATA, row.precision, False)
                timed_peer(row, case, shape, 0, options["steps"], given.timeout)
            text = f"[{repeat + 1}] {row.precision} {row.contestant}: {row.rates[-1]:.0f} tokens/s, {row.peaks[-1]} MiB"
            print(text, file=sys.stderr, flush=True)
        if given.json:
            save(given.json, rows, options)
    print(table(rows))
    if wrong := disagreement(rows):
        print(f"Losses differ. {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

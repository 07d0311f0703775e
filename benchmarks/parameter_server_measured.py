"""Two replicas with and without parameter servers, on this machine through pretrain_gpt.py: tokens per second.

    python benchmarks/parameter_server_measured.py --json result.json  # 3 repeats in turns; 15 minutes on 2 idle cores
    python benchmarks/parameter_server_measured.py --quick             # a tiny model, once: does it all still run?
    python benchmarks/parameter_server_measured.py --from result.json --into docs/parameter_server.md

Servers are co-located: both ranks train. The first iteration of a run is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from two_lines_page import PageError, processor, versions, write

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "`allreduce`": [],
    "`--use-distributed-optimizer`": ["--use-distributed-optimizer"],
    "`ps-sync`": ["--data-parallel-strategy", "ps-sync"],
    "`ps-async`": ["--data-parallel-strategy", "ps-async"],
}
FULL = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 32000 --train-iters 8"
QUICK = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 96 --train-iters 3"
COMMON = (
    "--nproc-per-node 2 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --mock-data --log-interval 1 "
    "--eval-iters 0"
)
BEGIN, END = "<!-- written by benchmarks/parameter_server_measured.py -->", "<!-- end of parameter_server_measured -->"


def tokens_per_second(flags: list[str], timeout: float) -> float:
    """The rate of a run of pretrain_gpt.py without its first iteration. Raises RuntimeError where the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.json"
        command = [sys.executable, ROOT / "pretrain_gpt.py", *flags, "--metrics", metrics]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
        if ended.returncode:
            raise RuntimeError(f"exit status {ended.returncode}: {ended.stderr[-2000:]}")
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    first, *rest = [record for record in records if record["kind"] == "train"]
    samples = rest[-1]["consumed_samples"] - first["consumed_samples"]
    return samples * int(flags[flags.index("--seq-length") + 1]) / sum(record["seconds"] for record in rest)


def table(rates: dict[str, list[float]]) -> str:
    base = median(next(iter(rates.values())))
    lines = ["| two replicas | tokens/s | |", "|---|--:|--:|"]
    for way, found in rates.items():
        middle = median(found)
        lines.append(f"| {way} | {middle:.0f} ({min(found):.0f}-{max(found):.0f}) | {middle / base:.2f}x |")
    return "\n".join(lines)


def page(saved: dict) -> str:
    """The table of a saved run, and above it where and when and with which command it was measured."""
    packages = ", ".join(f"{package} {number}" for package, number in saved["versions"].items())
    runs = f"Median of {len(next(iter(saved['rates'].values())))} runs (slowest-fastest), ways in turns."
    where = f"{saved['machine']}, {saved['cores']} cores, {packages}, {saved['date']}. {runs}"
    return f"{where}\n\n```\npython pretrain_gpt.py {saved['flags']}\n```\n\n{table(saved['rates'])}"


def measure(flags: str, repeats: int, timeout: float) -> dict[str, list[float]]:
    """Way -> tokens per second of each of its runs; the ways take turns."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way, more in WAYS.items():
            rates[way].append(tokens_per_second([*flags.split(), *more], timeout))
            print(f"[{repeat + 1}] {way}: {rates[way][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return rates


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way, in turns (3)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one run may take (600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements here")
    parser.add_argument("--from", dest="saved", type=Path, metavar="FILE", help="run nothing: the table of this JSON")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write that table into this page")
    parser.add_argument("--quick", action="store_true", help="a tiny model, once: a smoke test, not a measurement")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, or show what was measured; 1 for a page without marks."""
    given = parse(argv)
    if given.saved:
        saved = json.loads(given.saved.read_text(encoding="utf-8"))
    else:
        flags = f"{QUICK if given.quick else FULL} {COMMON}"
        rates = measure(flags, 1 if given.quick else given.repeats, given.timeout)
        saved = {"flags": flags, "rates": rates, "machine": processor(), "cores": os.cpu_count()}
        saved |= {"versions": versions(), "date": datetime.now(UTC).date().isoformat()}
    if given.json:
        given.json.write_text(json.dumps(saved, indent=1), encoding="utf-8")
    try:
        write(given.into, page(saved), BEGIN, END) if given.into else print(page(saved))
    except PageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

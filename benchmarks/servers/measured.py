"""Two replicas with and without parameter servers, on this machine through pretrain_gpt.py: tokens per second.

    python -m benchmarks servers_measured --json result.json  # 3 repeats in turns; 15 minutes on 2 idle cores
    python -m benchmarks servers_measured --quick             # a tiny model, once: does it all still run?
    python -m benchmarks servers_measured --from result.json --into docs/evidence/servers.md

Servers are co-located: both ranks train. The first iteration of a run is left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import ROOT
from benchmarks.runs import add_options, circumstances, heading, parsed, show, spread

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
BEGIN, END = (
    "<!-- written by: python -m benchmarks servers_measured -->",
    "<!-- end of servers_measured -->",
)


def tokens_per_second(flags: list[str], timeout: float) -> float:
    """The rate of a run of pretrain_gpt.py without its first iteration. Raises RuntimeError where
    the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.json"
        command = [sys.executable, ROOT / "pretrain_gpt.py", *flags, "--metrics", metrics]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
        if ended.returncode:
            raise RuntimeError(f"exit status {ended.returncode}: {ended.stderr[-2000:]}")
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    first, *rest = [record for record in records if record["kind"] == "train"]
    samples = rest[-1]["consumed_samples"] - first["consumed_samples"]
    return (
        samples
        * int(flags[flags.index("--seq-length") + 1])
        / sum(record["seconds"] for record in rest)
    )


def table(rates: dict[str, list[float]]) -> str:
    base = median(next(iter(rates.values())))
    lines = ["| two replicas | tokens/s | |", "|---|--:|--:|"]
    for way, found in rates.items():
        lines.append(f"| {way} | {spread(found)} | {median(found) / base:.2f}x |")
    return "\n".join(lines)


def page(saved: dict) -> str:
    """The table of a saved run, and above it where and when and with which command it was
    measured.
    """
    where = heading(saved, len(next(iter(saved["rates"].values()))), "ways")
    command = f"python pretrain_gpt.py {saved['flags']}"
    return f"{where}\n\n```\n{command}\n```\n\n{table(saved['rates'])}"


def measure(flags: str, repeats: int, timeout: float) -> dict[str, list[float]]:
    """Way -> tokens per second of each of its runs; the ways take turns."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way, more in WAYS.items():
            rates[way].append(tokens_per_second([*flags.split(), *more], timeout))
            print(
                f"[{repeat + 1}] {way}: {rates[way][-1]:.0f} tokens/s", file=sys.stderr, flush=True
            )
    return rates


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, repeats=3, timeout=600)
    return parsed(parser, argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, or show what was measured; 2 for a page without marks."""
    given = parse(argv)
    if given.saved:
        saved = json.loads(given.saved.read_text(encoding="utf-8"))
    else:
        flags = f"{QUICK if given.quick else FULL} {COMMON}"
        rates = measure(flags, 1 if given.quick else given.repeats, given.timeout)
        saved = {"flags": flags, "rates": rates} | circumstances()
    if given.json:
        given.json.write_text(json.dumps(saved, indent=1), encoding="utf-8")
    return show(page(saved), given.into, BEGIN, END)

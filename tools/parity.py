"""Measure every model type of transformers against its own eager model and write docs/evidence/parity.md.

python tools/parity.py --write                all types; an interrupted run continues where it stopped
python tools/parity.py --divided --write      causal language models on ranks that divide sequences
                                              and experts, into docs/evidence/parity_divided.md
python tools/parity.py --only 'qwen*'         some types, printed
"""

import argparse
import fnmatch
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    options = parse()
    from tests.zoo import heads
    from tests.zoo.measure import CELLS, DIVIDED
    from tests.zoo.sweep import digest, read_cache, sweep
    from tests.zoo.table import divided_page, facts, markdown

    key = digest()
    done = read_cache(options.cache, None if options.any_source else key)
    chosen = [
        name
        for name, head in heads().items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.only)
        and (head.causal or not options.divided)
    ]
    left = [name for name in chosen if options.again or name not in done]
    print(f"{len(chosen)} types, {len(chosen) - len(left)} known from {options.cache}", flush=True)
    start, count = time.monotonic(), len(left)

    def report(row, remaining):
        spent = time.monotonic() - start
        ahead = spent / max(1, count - remaining) * remaining / 60
        print(f"[{count - remaining}/{count}, {ahead:.0f} min left] {describe(row)}", flush=True)

    asked = DIVIDED if options.divided else CELLS
    sweep(left, options.jobs, options.timeout, options.cache, key, report, asked)
    done = read_cache(options.cache, None if options.any_source else key)
    rows = [done[name] for name in chosen if name in done]
    if options.divided:
        page = divided_page(rows)
        print(page.partition("\n## ")[0])
        if options.write:
            (ROOT / "docs" / "evidence" / "parity_divided.md").write_text(page, encoding="utf-8")
        return
    for name, value in facts(rows).items():
        print(f"{name}: {value}")
    if options.write:
        (ROOT / "docs" / "evidence" / "parity.md").write_text(markdown(rows), encoding="utf-8")
        print("wrote docs/evidence/parity.md")


def describe(row) -> str:
    from tests.zoo.measure import CELLS, DIVIDED
    from tests.zoo.table import cell

    if "left_out" in row:
        return f"{row['type']}: left out, {row['left_out'][:150]}"
    if "how" not in row:
        return (
            f"{row['type']}: not captured, {(row.get('refused') or row.get('broken', '?'))[:300]}"
        )
    cells = ", ".join(
        f"{name} {cell(row[name], name)}" for name in (*CELLS, *DIVIDED) if name in row
    )
    return f"{row['type']}: {cells}, share {row['share'] or 0:.2f}, {row['seconds']:.0f} s"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="types to measure"
    )
    parser.add_argument("--jobs", type=int, default=2, help="types at a time")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for one type"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        help="where rows are kept, by default build/parity.jsonl, or build/parity_divided.jsonl",
    )
    parser.add_argument(
        "--divided",
        action="store_true",
        help="measure sequence, context and expert parallelism, of causal language models",
    )
    parser.add_argument("--again", action="store_true", help="measure even what is known")
    parser.add_argument(
        "--any-source", action="store_true", help="take rows that other sources or versions gave"
    )
    parser.add_argument("--write", action="store_true", help="write the page")
    options = parser.parse_args()
    name = "parity_divided" if options.divided else "parity"
    options.cache = options.cache or ROOT / "build" / f"{name}.jsonl"
    if options.write and options.only != ["*"]:
        parser.error("--write needs all types")
    return options


if __name__ == "__main__":
    main()

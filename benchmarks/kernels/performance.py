"""What compiled kernels are worth in a training step, into docs/evidence/performance.md.

    python -m benchmarks performance             # about half an hour on two idle cores
    python -m benchmarks performance --quick     # a tiny model, once, printed: does it all still run?

One process and one thread each. Contestants take turns (A B C A B C ...), each time in fresh processes.
"""

import argparse
import datetime
from dataclasses import replace

from benchmarks import EVIDENCE
from benchmarks.step.cases import PRECISIONS, QUICK, ModelShape, kernel_cases
from benchmarks.step.launcher import Settings
from benchmarks.step.report import Series, disagreements
from benchmarks.step.step import available_cores, run_group
from benchmarks.two_lines_page import processor

PAGE = EVIDENCE / "performance.md"
TOKENS = 8  # micro-batches times their size: the work of a step does not depend on how it is cut

TEXT = """# Speed of a training step with and without compiled kernels

The table times one optimizer step of a Llama with {parameters:.0f} million parameters (hidden {hidden}, {layers}
layers, vocabulary {vocabulary}): 8 sequences of {sequence} tokens, in one process with one thread. *Without compiled
kernels* is the same program with `MERAK_EXT=0`. The peers are HuggingFace's model with our matmul precision and fused
AdamW, with and without `torch.compile`. Times are medians of {repeats} fresh processes each, which alternate.
{machine}, torch {torch}, {date}.

{rows}

All losses agree within the tolerances of `benchmarks/step/report.py`. Regenerate: `python -m benchmarks performance`
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="fresh runs per contestant (5)")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per run (4)")
    parser.add_argument(
        "--micro-batch", type=int, nargs="+", default=[1, 4], help="sequences per micro-batch (1 4)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=list(PRECISIONS))
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one repeat; prints, writes nothing"
    )
    return parser.parse_args(argv)


def rows(measured: dict[int, list[Series]]) -> str:
    """A line per contestant: step time with its spread, and how many times slower than
    ours it is.
    """
    lines = [
        "| precision | micro-batch | contestant | ms per step | from - to | ours is faster by |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for size, series in measured.items():
        for one in series:
            ours = next(
                s
                for s in series
                if s.case.contestant == "ours" and s.case.precision == one.case.precision
            )
            time, best = one.step_ms(), ours.step_ms().median
            ratio = "" if one is ours else f"{time.median / best:.2f}x"
            spread = f"{time.low:.0f} - {time.high:.0f}"
            lines.append(
                f"| {one.case.precision} | {size} | {one.case.row} | {time.median:.0f} | {spread} | {ratio} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    shape = QUICK if options.quick else ModelShape()
    if options.quick:
        options.repeats, options.steps = 1, 2
    settings = Settings(
        warmup=2,
        steps=options.steps,
        seed=1234,
        timeout=900.0,
        cores=tuple(available_cores()[:1]),
        keep_memory=False,
    )
    measured: dict[int, list[Series]] = {}
    for size in options.micro_batch:
        cut = replace(shape, micro_batch=size, micro_batches=TOKENS // size)
        for precision in options.precision:
            cases = [case for case in kernel_cases() if case.precision == precision]
            measured.setdefault(size, []).extend(run_group(cases, cut, settings, options.repeats))
    wrong = [line for series in measured.values() for line in disagreements(series)]
    table = rows(measured)
    print(table)
    print("\n".join(["Losses differ:", *wrong]) if wrong else "Losses of all contestants agree.")
    if not wrong and not options.quick:
        versions = measured[options.micro_batch[0]][0].runs[0][0]["versions"]
        PAGE.write_text(
            TEXT.format(
                parameters=shape.parameters / 1e6,
                hidden=shape.hidden,
                layers=shape.layers,
                vocabulary=shape.vocabulary,
                sequence=shape.sequence,
                repeats=options.repeats,
                machine=processor(),
                torch=versions["torch"],
                date=datetime.date.today(),
                rows=table,
            ),
            encoding="utf-8",
        )
    return int(bool(wrong))

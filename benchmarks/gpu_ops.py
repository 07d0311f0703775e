"""Every memory-bound operation on one GPU, as a share of what a copy moves, beside PyTorch eager and compiled.

python benchmarks/gpu_ops.py --into FILE                 JSON, each operation as soon as it is measured, and a table
python benchmarks/gpu_ops.py --into FILE --device cpu    tiny sizes: do both sides do the same work? Times nothing
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_cases import CASES, FULL, TINY, Case, Inputs, size_of, tensors_of
from gpu_stopwatch import write
from torch import Tensor

from megatron_merak import ops

WARM_UPS, REPEATS = 5, 30
COPIED = 1 << 30  # bytes of the tensor whose copy is the yardstick
# of the largest value: PyTorch's own operations round to bf16 between their steps
TOLERANCE = 2**-6


def _liger_norm(module: Any) -> Callable:
    return lambda x, weight, eps: module.LigerRMSNormFunction.apply(x, weight, eps)


def _apex_norm(module: Any) -> Callable:
    return lambda x, weight, eps: module.fused_rms_norm_affine(x, weight, weight.shape, eps)


def _engine_norm(module: Any) -> Callable:
    norm = module.RMSNorm(FULL.hidden, eps=1e-5, params_dtype=torch.bfloat16, device="cuda")
    return lambda x, weight, eps: norm(x)


def _liger_swiglu(module: Any) -> Callable:
    return lambda gate, up, activation: module.LigerSiLUMulFunction.apply(gate, up)


# Other libraries' kernels, measured where they can be imported: operation -> (library, module, its
# function).
PEERS = {
    "rms_norm": (
        ("liger", "liger_kernel.ops.rms_norm", _liger_norm),
        ("apex", "apex.normalization.fused_layer_norm", _apex_norm),
        ("transformer_engine", "transformer_engine.pytorch", _engine_norm),
    ),
    "gated": (("liger", "liger_kernel.ops.swiglu", _liger_swiglu),),
}


@dataclass(frozen=True)
class Row:
    """One operation: bytes it has to move, and the milliseconds of each way to do it (median,
    fastest, slowest).

    problems: of the ways that could not be measured, why.
    """

    case: Case
    moved: int
    times: dict[str, tuple[float, float, float]]
    problems: dict[str, str] = field(default_factory=dict)

    def speed(self) -> float:
        """GB/s of the bytes that have to be moved, whatever else is."""
        return self.moved / self.times["ours"][0] / 1e6


def peers(case: Case) -> dict[str, Callable]:
    found = {}
    for library, name, make in PEERS.get(case.op, ()):
        try:
            found[library] = make(import_module(name))
        except ImportError:
            continue
    return found


def copies(arguments: tuple) -> tuple:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)


def difference(case: Case, make: Inputs) -> float:
    """Largest difference from plain PyTorch, of results and of what changes in place, over the
    largest value.
    """
    ours = case.make(make)
    eager = copies(ours)
    results = zip(tensors_of(case.ours(*ours)), tensors_of(case.eager(*eager)), strict=True)
    worst = 0.0
    for a, b in (*results, *zip(tensors_of(ours), tensors_of(eager), strict=True)):
        assert a.shape == b.shape, (case.op, a.shape, b.shape)
        off = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)
        worst = max(worst, float(off))
    return worst


def milliseconds(run: Callable[[], Any]) -> tuple[float, float, float]:
    """Of one call, between events on the stream; the host stays ahead and is not timed."""
    for _ in range(WARM_UPS):
        run()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(REPEATS)
    ]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) for start, stop in events]
    return median(times), min(times), max(times)


def copy_speed(device: torch.device) -> float:
    """GB/s read and written by the copy of a large tensor."""
    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * size_of(source) / milliseconds(lambda: into.copy_(source))[0] / 1e6


def measure(case: Case, device: torch.device) -> Row:
    arguments = case.make(Inputs(FULL, device))
    moved = case.moved(arguments, case.ours(*copies(arguments)))
    ways = {
        "ours": case.ours,
        "eager": case.eager,
        "compiled": torch.compile(case.eager, dynamic=False),
    }
    times, problems = {}, {}
    for name, run in (ways | peers(case)).items():
        try:
            times[name] = milliseconds(lambda run=run: run(*arguments))
        # another's: a compiler that is not there, a library that refuses
        except Exception as error:
            if name == "ours":
                raise
            problems[name] = f"{type(error).__name__}: {error}"[:300]
    return Row(case, moved, times, problems)


def save(path: Path, rows: list[Row], copied: float) -> None:
    """Write what is measured so far."""
    found = [
        {"op": row.case.op, "moved": row.moved, "ms": row.times, "problems": row.problems}
        for row in rows
    ]
    shares = [row.speed() / copied for row in rows]
    figure = f"{len(rows)} operations, {median(shares):.0%} of a copy's speed (median), least {min(shares):.0%}"
    for way in ("eager", "compiled"):
        ratios = [row.times[way][0] / row.times["ours"][0] for row in rows if way in row.times]
        figure += f", {median(ratios):.2f} times {way}" if ratios else ""
    write(
        path,
        {"figure": figure, "copy_gb_per_s": copied, "rows": found, "table": table(rows, copied)},
    )


def table(rows: list[Row], copied: float) -> str:
    lines = [
        "| operation | MB | ours, ms | GB/s | of copy | over eager | over compiled | others |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        time, low, high = row.times["ours"]
        ratios = {way: f"{times[0] / time:.2f}" for way, times in row.times.items()}
        others = ", ".join(
            f"{way} {ratios[way]}" for way in ratios if way not in ("ours", "eager", "compiled")
        )
        cells = (
            row.case.label,
            f"{row.moved / 1e6:.0f}",
            f"{time:.3f} ({low:.3f} to {high:.3f})",
            f"{row.speed():.0f}",
            f"{row.speed() / copied:.0%}",
            ratios.get("eager", "-"),
            ratios.get("compiled", "-"),
            others or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured(device: torch.device, into: Path) -> str:
    """Measure every operation, and write each as soon as it is there; the table. Raises SystemExit
    without kernels.
    """
    problem = ops.PROBLEMS["_ops_cuda"]
    if problem:
        raise SystemExit(f"There is nothing of ours to measure: {problem}")
    rows: list[Row] = []
    with torch.no_grad():
        copied = copy_speed(device)
        for case in (case for case in CASES if case.registered):
            rows.append(measure(case, device))
            save(into, rows, copied)
    return table(rows, copied)


def check() -> str:
    """Both sides of every case on a CPU, and the table with made-up times. Raises AssertionError
    where they differ.
    """
    rows, device = [], torch.device("cpu")
    for case in CASES:
        if not case.registered:
            print(f"{case.op} is not registered: left out")
            continue
        worst = difference(case, Inputs(TINY, device))
        assert not case.comparable or worst <= TOLERANCE, (
            f"{case.op}: ours is {worst:.1e} from plain PyTorch"
        )
        arguments = case.make(Inputs(TINY, device))
        moved = case.moved(arguments, case.ours(*copies(arguments)))
        assert moved > 0, case.op
        rows.append(Row(case, moved, dict.fromkeys(("ours", "eager", "compiled"), (1.0, 1.0, 1.0))))
    return f"{table(rows, 1.0)}\n\n{len(rows)} operations do the work of plain PyTorch. The times are made up.\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--into", type=Path, required=True, metavar="FILE", help="JSON, after every operation"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: compare at tiny sizes"
    )
    given = parser.parse_args()
    if given.device == "cpu":
        text = check()
        print(text)
        write(given.into, {"figure": text.splitlines()[-1]})
        return
    print(measured(torch.device("cuda", torch.cuda.current_device()), given.into))


if __name__ == "__main__":
    main()

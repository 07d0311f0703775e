"""Compiled operations beside PyTorch's and torch.compile's: forward and backward on the CPU, in one process.

    python -m benchmarks ops                          # the table; some minutes, most of them torch.compile's
    python -m benchmarks ops --threads 2 --json       # one JSON object per row
    python -m benchmarks ops --only rotary --quick    # small shapes, once: does it all still run?

Contestants of a row alternate (A B C A B C ...) on the same tensors; ours must agree with PyTorch's in float64. Times
are medians: of this thread's CPU time for one thread, of wall time for more. Freed memory stays with the process, as it
does in training, for all of them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_merak import ops
from megatron_merak.parallel.memory import keep_freed_memory

EPS = 1e-5
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Largest difference from the exact result, of its largest value: the rounding of results, and of
# sums that are kept.
AGREE = {"fp32": 2e-6, "bf16": 6e-3}
WINDOW = 0.02  # seconds that one measurement takes at least


@dataclass(frozen=True)
class Row:
    """``ours`` and ``peer`` of such tensors, the peer in float64 too. ``agrees``: False where
    chance decides.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Callable[..., Tensor | tuple[Tensor, ...]]
    peer: Callable[..., Tensor | tuple[Tensor, ...]]
    agrees: bool = True


def peer_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, EPS), total


def peer_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotary_row(batch: int, length: int, heads: int, dim: int) -> Row:
    """The peer as HuggingFace writes it: tables of the whole width, halves joined anew."""
    cos, sin = ops.rotary_angles(length, dim, 10000.0)
    kinds = (*TYPES.values(), torch.float64)
    whole = {kind: [torch.cat((t, t), -1).to(kind) for t in (cos, sin)] for kind in kinds}

    def peer(x: Tensor) -> Tensor:
        wide_cos, wide_sin = whole[x.dtype]
        return x * wide_cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * wide_sin

    return Row("rotary", ((batch, length, heads, dim),), lambda x: ops.rotary(x, cos, sin), peer)


def softmax_row(batch: int, heads: int, length: int) -> Row:
    future = torch.ones(length, length, dtype=torch.bool).triu_(1)
    return Row(
        "causal softmax",
        ((batch, heads, length, length),),
        lambda x: ops.masked_softmax(x, None, 0.125, True),
        lambda x: torch.softmax((x * 0.125).masked_fill(future, -torch.inf), -1),
    )


def loss_row(tokens: int, classes: int) -> Row:
    target = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(1))
    return Row(
        "cross entropy",
        ((tokens, classes),),
        lambda x: ops.cross_entropy(x, target),
        lambda x: F.cross_entropy(
            x.to(torch.promote_types(x.dtype, torch.float32)), target, reduction="none"
        ),
    )


def table(quick: bool = False) -> list[Row]:
    """1024 rows of a model of hidden size 512, feed-forward 1408, 8 heads of 64,
    vocabulary 32000.
    """
    t, h, f = (16, 32, 48) if quick else (1024, 512, 1408)
    batch, length, heads, dim = (2, 8, 4, 8) if quick else (4, 256, 8, 64)
    rows = [
        Row(
            "rms norm",
            ((t, h), (h,)),
            lambda x, w: ops.rms_norm(x, w, EPS),
            lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        ),
        Row(
            "layer norm",
            ((t, h), (h,), (h,)),
            lambda x, w, b: ops.layer_norm(x, w, b, EPS),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        ),
        Row(
            "add + rms norm",
            ((t, h), (t, h), (h,)),
            lambda x, y, w: ops.add_rms_norm(x, y, w, EPS),
            peer_add_rms_norm,
        ),
        rotary_row(batch, length, heads, dim),
        Row("swiglu", ((t, 2 * f),), ops.swiglu, peer_swiglu),
        Row(
            "gated gelu",
            ((t, f), (t, f)),
            lambda x, y: ops.gated(x, y, "gelu"),
            lambda x, y: F.gelu(x) * y,
        ),
        Row(
            "bias + gelu tanh",
            ((t, f), (f,)),
            lambda x, b: ops.bias_gelu(x, b),
            lambda x, b: F.gelu(x + b, approximate="tanh"),
        ),
        Row(
            "bias + gelu",
            ((t, f), (f,)),
            lambda x, b: ops.bias_gelu(x, b, "gelu"),
            lambda x, b: F.gelu(x + b),
        ),
        Row(
            "bias + dropout + add",
            ((t, h), (h,), (t, h)),
            lambda x, b, y: ops.bias_dropout_add(x, b, y, 0.1, True),
            lambda x, b, y: y + F.dropout(x + b, 0.1),
            agrees=False,
        ),
    ]
    if callable(getattr(ops, "masked_softmax", None)):
        rows.append(softmax_row(batch, heads, length))
    if callable(getattr(ops, "cross_entropy", None)):
        rows.append(loss_row(t // 4, 50 if quick else 32000))
    return rows


def tensors(row: Row, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in row.shapes]
    return [x.requires_grad_() for x in made]


def step(
    fn: Callable, inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of ``fn``: its results and gradients."""

    def run() -> tuple[Tensor, ...]:
        made = fn(*inputs)
        made = made if isinstance(made, tuple) else (made,)
        return *made, *torch.autograd.grad(made, inputs, upstream)

    return run


def gradients_of(results: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """Random gradients of a function's results."""
    results = results if isinstance(results, tuple) else (results,)
    return [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(x.dtype)
        for x in results
    ]


def difference(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """The largest difference of any result, of its largest value."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, wanted, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def measure(
    contestants: dict[str, Callable], repeats: int, threads: int, window: float
) -> dict[str, float]:
    """Median milliseconds of each, of ``repeats`` measurements in turn."""
    clock = time.thread_time if threads == 1 else time.perf_counter

    def seconds(fn: Callable, count: int) -> float:
        begin = clock()
        for _ in range(count):
            fn()
        return (clock() - begin) / count

    counts = {
        name: max(1, int(window / max(1e-7, seconds(fn, 3)))) for name, fn in contestants.items()
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, fn in contestants.items():
            times[name].append(seconds(fn, counts[name]))
    return {name: 1e3 * median(each) for name, each in times.items()}


def run_row(row: Row, kind: str, options: argparse.Namespace) -> dict[str, object]:
    """What ``--json`` prints of a row. Raises SystemExit where ours is wrong."""
    inputs = tensors(row, TYPES[kind])
    upstream = gradients_of(row.ours(*inputs))
    contestants = {
        "ours": step(row.ours, inputs, upstream),
        "eager": step(row.peer, inputs, upstream),
    }
    if options.compile:
        torch._dynamo.reset()
        contestants["compile"] = step(torch.compile(row.peer, dynamic=False), inputs, upstream)
    if row.agrees:
        exact = step(
            row.peer,
            [x.detach().double().requires_grad_() for x in inputs],
            [g.double() for g in upstream],
        )
        error = difference(contestants["ours"](), exact())
        if not error <= AGREE[kind]:
            sys.exit(f"{row.op} {kind}: ours and PyTorch's in float64 differ by {error:.1e}")
    times = measure(contestants, options.repeats, options.threads, 0.0 if options.quick else WINDOW)
    found: dict[str, object] = {
        "op": row.op,
        "dtype": kind,
        "shape": list(row.shapes[0]),
        "threads": options.threads,
    }
    found |= {f"{name}_ms": times.get(name) for name in ("ours", "eager", "compile")}
    return found | {
        f"{name}_ratio": times[name] / times["ours"] if name in times else None
        for name in ("eager", "compile")
    }


def line(found: dict[str, object]) -> str:
    def cell(value: object, width: int, digits: int) -> str:
        return f"{value:{width}.{digits}f}" if isinstance(value, float) else f"{'-':>{width}}"

    times = " ".join(cell(found[f"{name}_ms"], 9, 3) for name in ("ours", "eager", "compile"))
    ratios = " ".join(cell(found[f"{name}_ratio"], 8, 2) for name in ("eager", "compile"))
    shape = "x".join(map(str, found["shape"]))
    return f"{found['op']:22s} {found['dtype']:5s} {shape:16s} {times} {ratios}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="rows with TEXT in their name"
    )
    parser.add_argument("--dtype", choices=TYPES, nargs="+", default=list(TYPES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--repeats", type=int, default=9, help="measurements of each contestant (9)"
    )
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave torch.compile out"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per row instead of the table"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small shapes, once: a smoke test, not a measurement"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.repeats = 1 if options.quick else options.repeats
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    if ops.PROBLEMS["_ops_cpu"]:
        print(f"These are not the kernels: {ops.PROBLEMS['_ops_cpu']}", file=sys.stderr)
    rows = [
        row
        for row in table(options.quick)
        if not options.only or any(text in row.op for text in options.only)
    ]
    if not options.json:
        print(
            f"{'':46s} {'ms: ours':>9s} {'eager':>9s} {'compile':>9s} {'eager/':>8s} {'compile/ours':>8s}"
        )
    for row in rows:
        for kind in options.dtype:
            found = run_row(row, kind, options)
            print(json.dumps(found) if options.json else line(found), flush=True)
    return 0

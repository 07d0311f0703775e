"""Where one step's time goes, from the trace that torch.profiler writes: by class of kernel, and
idle between them.
"""

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The first pattern that a kernel's name, or on a CPU an operation's, matches decides; the rest is
# "other".
CLASSES = {
    "attention": r"sdpa|flash|fmha|attention|mem_eff",
    "optimizer": r"adam|multi_tensor_apply|sum_of_squares|foreach|lamb|vector_norm",
    "copies": r"memcpy|memset|copy|cat(_|\b|array)|accumulate|cast|fill|aten::(to|contiguous|clone)\b",
    "products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk|::(add|baddb|b)?mm(_|\b)|matmul|linear",
    "norms and pointwise": (
        r"^(?!nccl).*(merak|norm|elementwise|pointwise|triton|reduce|softmax|index|embedding|gather|scatter|cross_entropy|nll"
        r"|silu|gated|rotary|aten::(add|mul|sub|div|neg|exp|pow|rsqrt|mean|sum|where|sigmoid)(_|\b))"
    ),
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in CLASSES.items()}
GPU_CATEGORIES, CPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",)
LONGEST = 25  # names that are told with their times


@dataclass(frozen=True)
class Event:
    """A kernel or an operation: microseconds when it began, how long it took, and its own part of
    that.
    """

    name: str
    start: float
    duration: float
    own: float

    @property
    def end(self) -> float:
        return self.start + self.duration


def class_of(name: str) -> str:
    """The class of a kernel or of an operation by its name."""
    return next((each for each, pattern in _PATTERNS.items() if pattern.search(name)), "other")


def events_of(trace: Mapping, device: str) -> list[Event]:
    """The kernels and copies of a GPU, or the operations of a CPU less what they called, by their
    start.
    """
    wanted = CPU_CATEGORIES if device == "cpu" else GPU_CATEGORIES
    rows = [
        row for row in trace["traceEvents"] if row.get("cat") in wanted and row.get("ph") == "X"
    ]
    rows.sort(key=lambda row: (row["ts"], -row["dur"]))
    own = [row["dur"] for row in rows]
    if device == "cpu":
        _take_inner(rows, own)
    return [
        Event(row["name"], row["ts"], row["dur"], mine) for row, mine in zip(rows, own, strict=True)
    ]


def _take_inner(rows: list[dict], own: list[float]) -> None:
    """Subtract from each operation those that ran inside of it on the same thread."""
    open_: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        stack = open_[row.get("tid")]
        while stack and rows[stack[-1]]["ts"] + rows[stack[-1]]["dur"] <= row["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= row["dur"]
        stack.append(index)


def idle(events: Iterable[Event]) -> list[float]:
    """The microseconds of each gap in which nothing ran, between the first start and the
    last end.
    """
    gaps, end = [], None
    for event in events:
        if end is not None and event.start > end:
            gaps.append(event.start - end)
        end = event.end if end is None else max(end, event.end)
    return gaps


def breakdown(trace: Mapping, device: str) -> dict:
    """Milliseconds of each class, of the gaps, and of the longest names; the kernels of
    attention.
    """
    events = events_of(trace, device)
    if not events:
        return {"problem": "the profiler saw no kernel: it may not be allowed to here"}
    by_class = defaultdict(float)
    by_name = defaultdict(float)
    calls = defaultdict(int)
    for event in events:
        by_class[class_of(event.name)] += event.own / 1e3
        by_name[event.name] += event.own / 1e3
        calls[event.name] += 1
    gaps = idle(events)
    span = (max(event.end for event in events) - events[0].start) / 1e3
    longest = heapq.nlargest(LONGEST, by_name, key=by_name.__getitem__)
    attention = [name for name in by_name if class_of(name) == "attention"]
    return {
        "span_ms": span,
        "kernels": len(events),
        "class_ms": {name: by_class.get(name, 0.0) for name in (*CLASSES, "other")},
        "idle_ms": sum(gaps) / 1e3,
        "gaps": len(gaps),
        "gaps_over_10us_ms": sum(gap for gap in gaps if gap > 10) / 1e3,
        "attention_kernels": sorted(attention, key=by_name.__getitem__, reverse=True)[:4],
        "longest": [{"name": name[:160], "class": class_of(name), "ms": by_name[name], "calls": calls[name]}
                    for name in longest],
    }  # fmt: skip

"""The probe itself: all ranks of a job measure their devices at the same time, then their links."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..cluster import AttentionRate, Device, ProductRate, Profile, Rates, find_device
from ..cluster.link_times import LinkTime
from ..parallel.agree import gather_json, together
from ..parallel.launch import World
from ..parallel.nodes import Nodes
from ..preflight.products import product_rate, products_of
from ..preflight.stopwatch import FEWEST, WARM_UPS, timings
from .attention import attention_rate
from .links import Wires
from .passes import OF, passes_of, step_seconds
from .shapes import Heads, ModelShape, Sides, attention_grid, of_models, product_grid

_CALLS = FEWEST + WARM_UPS
# parts of the time: rates of sizes, of which products and attention, and reference models
_RATES, _STEPS = 0.6, 0.4
_PRODUCTS, _ATTENTION = 0.65, 0.35
_PATIENCE = 2  # times as long as planned, where others are at work on this machine
_FIRST = 7  # sizes that are measured whatever they take: those of one model
_COPIES = 0.2  # seconds
_TOKENS = {"cpu": 512, "cuda": 8192}  # of attention
_LARGE = {"cpu": 1 << 27, "cuda": 1 << 30}  # bytes that no cache holds

_Row = TypeVar("_Row", ProductRate, AttentionRate)
_Size = TypeVar("_Size")


def probe(
    world: World,
    control: dist.ProcessGroup | None,
    nodes: Nodes,
    shapes: Sequence[ModelShape] = (),
    dtypes: Sequence[str] = (),
    seconds: float = 20.0,
    say: Callable[[str], object] = lambda _: None,
) -> Profile:
    """Return what was measured, alike on every rank. Collective over all ranks of a job.

    control: all ranks, for agreement on the CPU.
    nodes:   their hosts.
    shapes:  of models; none: a grid of sizes.
    dtypes:  of products and attention, the first also of the passes; none: fp32 on a CPU, bf16 on
             a GPU.
    seconds: that one rank's own measurements take, about.
    say:     called on each rank with what is being done.

    Raises PlanError for a device that the table does not have.
    """
    kind = world.device.type
    with together(control, "cpu"):
        base = find_device(device_name(world.device))
    dtypes = dtypes or (("bfloat16",) if kind == "cuda" else ("float32",))
    device = _computed(world, control, base, shapes, dtypes=dtypes, seconds=seconds, say=say)
    say("copies")
    copies = _slowest(copy_speed(world.device), control)
    to_host = _slowest(host_copy_speed(world.device), control) if kind == "cuda" else 0.0
    steps = []
    for place, reference in enumerate(OF[kind]):
        say(f"steps, model {place + 1} of {len(OF[kind])}")
        share = seconds * _STEPS / len(OF[kind]) / 3
        sizes = of_models([reference.shape])
        # again at the time of its steps, since what is left of them is a small difference
        device = _with_rates(device, *_rates(world, control, sizes, dtypes[:1], share, say))
        took = step_seconds(reference, dtypes[0], world.device, share)
        steps.append((reference, median(gather_json(took, control, "cpu"))))
    device = passes_of(device, dtypes[0], copies, steps)
    links: tuple[LinkTime, ...] = ()
    if control is not None:
        hosts = nodes.of or [0] * world.size
        wires = Wires(world.rank, hosts, world.device, control, world.collectives, say)
        links = tuple(wires.times())
    assert device.rates is not None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    name = device_name(world.device)
    source = f"{name}, {now}, torch {torch.__version__}"
    return Profile(
        replace(device, rates=replace(device.rates, source=source)),
        links,
        ranks=max(world.ranks_here, 1),
        host_copy=to_host,
        measured_on=name,
        date=now,
        torch=torch.__version__,
    )


def _computed(
    world: World,
    control: dist.ProcessGroup | None,
    base: Device,
    shapes: Sequence[ModelShape],
    dtypes: Sequence[str],
    seconds: float,
    say: Callable[[str], object],
) -> Device:
    """Return the device with the rates of products and attention, which all ranks measure at once."""
    say("products")
    rate = _slowest(product_rate(world.device), control)
    budget = seconds * _RATES / 2 / len(dtypes)
    kind = world.device.type
    sides, heads = of_models(shapes)
    if not shapes:
        sides = product_grid(rate, _PRODUCTS * budget, _CALLS)
        heads = attention_grid(rate / 4, _ATTENTION * budget, _CALLS, _TOKENS[kind])
    products, attention = _rates(world, control, (sides, heads), dtypes, seconds * _RATES / 2, say)
    rates = Rates(products, attention)
    peak = {
        dtype: max(row.forward for row in rates.products if row.dtype == dtype) for dtype in dtypes
    }
    best = max(peak[dtype] / base.flops(dtype) for dtype in dtypes)
    # the table's CPU is another one
    faster: dict[str, Any] = {
        "float32_flops" if dtype == "float32" else "bfloat16_flops": value
        for dtype, value in peak.items()
        if best > 1
    }
    practice = base.practice
    if practice is not None:  # passes are measured as training has them; nothing was compared
        practice = replace(practice, passes=1.0, low=0.0, high=0.0)
    return replace(base, matmul_efficiency=min(best, 1.0), rates=rates, practice=practice, **faster)


def _with_rates(
    device: Device, products: Sequence[ProductRate], attention: Sequence[AttentionRate]
) -> Device:
    assert device.rates is not None
    products = (*device.rates.products, *products)
    attention = (*device.rates.attention, *attention)
    return replace(device, rates=Rates(products, attention))


def _rates(
    world: World,
    control: dist.ProcessGroup | None,
    sizes: tuple[Sequence[Sides], Sequence[Heads]],
    dtypes: Sequence[str],
    seconds: float,
    say: Callable[[str], object],
) -> tuple[tuple[ProductRate, ...], tuple[AttentionRate, ...]]:
    """Return the rates of products and of attention of these sizes, of the first ones where the time
    is over before the others.

    seconds: that all of them take together, about.
    """
    products: list[ProductRate] = []
    attention: list[AttentionRate] = []
    sides, heads = sizes
    for dtype in dtypes:
        budget = seconds / len(dtypes)
        each = _PRODUCTS * budget / 3 / len(sides)
        measured: list[ProductRate] = []
        for side in _in_time(sides, _PRODUCTS * budget, f"products ({dtype})", say):
            measured.append(products_of(side, dtype, world.device, each))
        products += _usual(measured, control)
        each = _ATTENTION * budget / 2 / len(heads)
        attended: list[AttentionRate] = []
        for size in _in_time(heads, _ATTENTION * budget, f"attention ({dtype})", say):
            attended.append(attention_rate(size, dtype, world.device, each))
        attention += _usual(attended, control)
    return tuple(products), tuple(attention)


def _in_time(
    sizes: Sequence[_Size], seconds: float, what: str, say: Callable[[str], object]
) -> Iterator[_Size]:
    """Yield the sizes to measure, until it has taken twice as long as planned."""
    end = time.monotonic() + _PATIENCE * seconds
    for place, size in enumerate(sizes):
        if place >= _FIRST and time.monotonic() > end:
            return
        say(f"{what}, {place + 1} of {len(sizes)}")
        yield size


def _usual(rows: Sequence[_Row], control: dist.ProcessGroup | None) -> list[_Row]:
    """Return the median rates of all ranks, of what all have measured."""
    everywhere = gather_json([vars(row) for row in rows], control, "cpu")
    found = []
    for row, *others in zip(rows, *everywhere, strict=False):
        rates = {
            name: median(other[name] for other in others)
            for name in ("forward", "backward", "input_gradient", "weight_gradient")
            if hasattr(row, name)
        }
        found.append(replace(row, **rates))
    return found


def _slowest(rate: float, control: dist.ProcessGroup | None) -> float:
    return min(gather_json(rate, control, "cpu"))


def device_name(device: torch.device) -> str:
    """Return what the driver calls a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def copy_speed(device: torch.device) -> float:
    """Return bytes per second, read and written, of the copy of a tensor that no cache holds."""
    source = torch.ones(_LARGE[device.type], dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * source.numel() / median(timings(lambda: into.copy_(source), device, _COPIES))


def host_copy_speed(device: torch.device) -> float:
    """Return bytes per second of a copy from a GPU into pinned memory of its host."""
    source = torch.ones(_LARGE["cpu"], dtype=torch.uint8, device=device)
    into = torch.empty(_LARGE["cpu"], dtype=torch.uint8, pin_memory=True)
    call = lambda: into.copy_(source, non_blocking=True)  # noqa: E731
    return source.numel() / median(timings(call, device, _COPIES))

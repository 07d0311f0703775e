"""A profile as text."""

from collections.abc import Sequence

from ..cluster import Profile
from ..cluster.link_times import BETWEEN, INSIDE, LinkTime
from ..counting import counted
from ..planner.tables import align
from ..preflight.units import rate_text, size_text, time_text


def table(found: Profile) -> str:
    """Return rates by size, and links as plans price them beside what was measured."""
    device = found.device
    assert device.rates is not None
    together = f", {counted(found.ranks, 'rank')} at once" if found.ranks > 1 else ""
    parts = [f"{device.rates.source}{together}"]
    rows: list[Sequence[str]] = [("m x n x k", "dtype", "output", "gradient of input", "of weight")]
    for product in sorted(device.rates.products, key=lambda row: (row.dtype, row.m, row.n, row.k)):
        rates = (product.forward, product.input_gradient, product.weight_gradient)
        sides = f"{product.m} x {product.n} x {product.k}"
        rows.append((sides, product.dtype, *map(flops_text, rates)))
    parts.append("\n".join(align(rows)))
    rows = [("attention", "dtype", "forward", "backward")]
    for row in sorted(
        device.rates.attention, key=lambda row: (row.dtype, row.length, row.features)
    ):
        size = f"length {row.length}, heads of {row.features}"
        rows.append((size, row.dtype, flops_text(row.forward), flops_text(row.backward)))
    parts.append("\n".join(align(rows)))
    passes = f"memory-bound passes: {rate_text(device.memory_bandwidth)} of what plans count"
    started = f", {time_text(device.dispatch)} to start an operation" if device.dispatch else ""
    copied = f"; copies to the host: {rate_text(found.host_copy)}" if found.host_copy else ""
    parts.append(f"{passes}{started}{copied}")
    for where in (INSIDE, BETWEEN):
        times = [time for time in found.links if time.where == where]
        parts += [_links(found, where, times)] if times else []
    return "\n\n".join(parts)


def _links(found: Profile, where: str, times: Sequence[LinkTime]) -> str:
    link = found.link(where)
    assert link is not None
    kind = "within a host" if where == INSIDE else "between hosts"
    rows: list[Sequence[str]] = [(kind, "size", "time", "by the link")]
    for time in times:
        steps, moved = time.parts
        priced = steps * link.latency + moved / link.bandwidth
        what = f"{time.what} over {counted(time.ranks, 'rank')}" if time.ranks > 2 else time.what
        size = size_text(int(time.size))
        rows.append((what, size, time_text(time.seconds), time_text(priced)))
    told = f"link {kind}: {time_text(link.latency)}, {rate_text(link.bandwidth)}"
    return "\n".join([*align(rows), told])


def flops_text(rate: float) -> str:
    """Return FLOP per second as "12.3 TFLOP/s" or "45.6 GFLOP/s"."""
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"

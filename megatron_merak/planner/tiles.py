"""The time of a matrix product by its shape: tiles of the result, computed in waves over the
device's multiprocessors.
"""

import math

from megatron_merak.cluster import Device

# Sides of the tiles that libraries choose from, and the rate of each beside the first: a smaller
# one loads more operands per FLOP.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.93),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
# A tile costs as much time before and after its contraction (filling the pipeline of loads, and
# writing the result) as this many columns of it.
ENDS = 64
SPLITS = (1, 2, 4, 8)  # parts of a contraction that are computed as tiles of their own


def product_seconds(
    sides: tuple[int, int, int], dtype: str, value_bytes: int, device: Device
) -> float:
    """Return the seconds of one product on a device with ``practice``.

    sides: m, n, k of [m, k] by [k, n].

    It is the longer of arithmetic, with the best tile, and of moving operands and result once. A
    last wave that fills only some multiprocessors takes as long as a full one.
    """
    assert device.practice is not None
    m, n, k = sides
    moved = value_bytes * (m * n + m * k + n * k) / device.memory_bandwidth
    rate = device.flops(dtype) * device.practice.product
    if not device.multiprocessors:
        return max(2 * m * n * k / rate, moved)
    each = rate / device.multiprocessors
    best = math.inf
    for rows, columns, share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        for parts in SPLITS:
            waves = math.ceil(tiles * parts / device.multiprocessors)
            best = min(best, waves * 2 * rows * columns * (k / parts + ENDS) / (each * share))
    return max(best, moved)

"""Products by their shape: waves of tiles, parts of a contraction, and traffic, by hand."""

from dataclasses import replace

import pytest

from megatron_merak.cluster import DEVICES
from megatron_merak.planner.tiles import ENDS, product_seconds

H100 = DEVICES["H100"]
# of ten multiprocessors, 100 tera-FLOP per second together, and memory that is never the bound
TEN = replace(
    H100,
    bfloat16_flops=100e12,
    memory_bandwidth=1e20,
    multiprocessors=10,
    practice=replace(H100.practice, product=1.0),
)


def seconds(m, n, k, device=TEN):
    return product_seconds((m, n, k), "bfloat16", 2, device)


def test_full_tiles_take_what_they_compute_and_their_ends():
    tile = 2 * 256 * 128 * (4096 + ENDS) / 10e12
    assert seconds(2560, 128, 4096) == pytest.approx(tile)
    assert seconds(2560, 1280, 4096) == pytest.approx(10 * tile)
    half = replace(TEN, practice=replace(TEN.practice, product=0.5))
    assert seconds(2560, 128, 4096, half) == pytest.approx(2 * tile)


def test_a_last_wave_that_is_not_full_takes_as_long_as_one_that_is():
    full = seconds(2560 * 4, 1280, 8192)
    assert seconds(2560 * 4 + 256, 1280, 8192) > 1.01 * full
    assert seconds(2560 * 4 - 32, 1280, 8192) == full


def test_a_small_result_of_a_long_contraction_is_computed_in_parts():
    alone = 2 * 256 * 128 * (65536 + ENDS) / 10e12
    assert seconds(256, 128, 65536) < alone / 4


def test_what_is_narrow_is_slower_for_its_work():
    work = [2 * 4096 * n * 4096 / seconds(4096, n, 4096) for n in (48, 64, 4096)]
    assert work == sorted(work) and work[0] < 0.7 * work[-1]


def test_traffic_is_the_bound_of_a_short_contraction():
    slow = replace(TEN, memory_bandwidth=1e9)
    moved = 2 * (4096 * 4096 + 2 * 4096 * 8)
    assert seconds(4096, 4096, 8, slow) == pytest.approx(moved / 1e9)


def test_without_multiprocessors_the_peak_counts():
    plain = replace(TEN, multiprocessors=0)
    assert seconds(100, 100, 100, plain) == pytest.approx(2e6 / 100e12)

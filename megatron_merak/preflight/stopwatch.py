"""How long one call takes on a device: many calls, one after the other, each timed."""

import time
from collections.abc import Callable

import torch

WARM_UPS = 2
FEWEST = 5  # calls
MOST = 300


def timings(
    call: Callable[[], object], device: torch.device, seconds: float, wall: bool = False
) -> list[float]:
    """Return the seconds of each of some calls, after those that warm up.

    seconds: that all of them may take together; `FEWEST` are made however long they take.
    wall:    by the clock on the wall. Else a GPU is timed by its own events, without what the host
             does meanwhile, and a CPU that computes in one thread by the processor's time: what
             else runs on its cores takes no part in it.
    """
    for _ in range(WARM_UPS):
        began = time.perf_counter()
        call()
        _wait(device)
        each = time.perf_counter() - began
    calls = min(max(int(seconds / max(each, 1e-7)), FEWEST), MOST)
    if device.type == "cuda" and not wall:
        return _by_events(call, device, calls)
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone and not wall else time.perf_counter
    taken = []
    for _ in range(calls):
        began = clock()
        call()
        _wait(device)
        taken.append(clock() - began)
    return taken


def _by_events(call: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(calls)
    ]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) / 1e3 for start, stop in events]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

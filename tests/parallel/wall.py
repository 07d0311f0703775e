"""The same few programs on either clock: as a script, ``wall.py RANK STORE RESULT REPEATS``, one of
two hosts of benchmarks/overlap/shaped.py on the machine's own, with kernels that sleep.
"""

import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from megatron_merak.cluster import DEVICES, LINKS, Cluster
from megatron_merak.parallel.clock import LogicalClock, WallClock
from megatron_merak.parallel.emulated import register
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.pipeline_parallel.builders import build_schedule
from megatron_merak.pipeline_parallel.passes import add_communication
from tests.parallel.walk import Line, mesh_of, walk

CLUSTER = Cluster(DEVICES["cpu"], 1, LINKS["loopback"], LINKS["ethernet-1g"], "two hosts")
MIB = 2**18  # fp32 values of a MiB, which the link carries in 9 ms
REDUCED = 32  # MiB: an all-reduce of 282 ms


def reduce_behind(kernel: float):
    """An all-reduce in flight while a kernel runs."""

    def run(mesh: Mesh) -> None:
        work = dist.all_reduce(torch.ones(REDUCED * MIB), group=mesh.pp, async_op=True)
        mesh.clock.kernel(kernel)
        work.wait()

    return run


def two_reduces(mesh: Mesh) -> None:
    """Two all-reduces in flight, waited for in reverse."""
    works = [
        dist.all_reduce(torch.ones(size * MIB), group=mesh.pp, async_op=True) for size in (16, 32)
    ]
    works[1].wait()
    works[0].wait()


def pipeline(name: str, microbatches: int, mebibytes: int):
    schedule = add_communication(build_schedule(name, 2, microbatches))
    forward = 0.1 * 2 / schedule.stages
    times = [(seconds,) * schedule.stages for seconds in (forward, 2 * forward, forward, forward)]
    line = Line(*times, (mebibytes * MIB,) * (schedule.stages - 1))
    return lambda mesh: walk(schedule, line, mesh)


PROGRAMS = {
    "all-reduce": reduce_behind(0.0),
    "all-reduce half hidden": reduce_behind(0.14),
    "all-reduce hidden": reduce_behind(0.6),
    "two all-reduces": two_reduces,
    "1f1b": pipeline("1f1b", 4, 4),
    "1f1b, slow link": pipeline("1f1b", 4, 16),
    "gpipe, slow link": pipeline("gpipe", 4, 16),
    "interleaved": pipeline("interleaved", 4, 1),
    "zb-v": pipeline("zb-v", 4, 4),
}


def predict(rank: int, world_size: int) -> dict[str, float]:
    """Modelled seconds of each program, until this rank is through."""
    clock = LogicalClock(CLUSTER)
    register(clock)
    mesh = mesh_of(rank, world_size, dist.new_group([0, 1], backend="emu"), clock)
    found = {}
    for name, program in PROGRAMS.items():
        dist.barrier(group=mesh.pp)
        start = clock.now()
        program(mesh)
        found[name] = clock.now() - start
    return found


def measure(rank: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of each repeat by the monotonic clock, which the hosts share; the first one
    warms up.
    """
    mesh = mesh_of(rank, 2, dist.group.WORLD, WallClock())
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    for repeat in range(repeats + 1):
        for name, program in PROGRAMS.items():
            dist.barrier()
            time.sleep(0.02)  # the token bucket fills, the peer leaves the barrier
            start = mesh.clock.now()
            program(mesh)
            if repeat:
                found[name].append((start, mesh.clock.now()))
    return found


def main(rank: int, store: str, result: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    Path(f"{result}.{rank}").write_text(json.dumps(measure(rank, repeats)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))

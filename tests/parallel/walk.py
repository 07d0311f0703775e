"""A pipeline of nothing but waiting: real messages of given sizes and kernels of given times, on
any clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_merak.cluster import Cluster
from megatron_merak.parallel.clock import Clock
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.parallel.p2p import Pipes
from megatron_merak.pipeline_parallel.ops import RECEIVES, SENDS, Kind, Op, Schedule, ops_of
from megatron_merak.pipeline_parallel.simulate import StageCosts
from megatron_merak.plan import Grid


@dataclass(frozen=True)
class Line:
    """Seconds of each stage's ``forward``, ``backward`` with its ``weight``, and ``recompute``;
    fp32 ``values`` that cross each border.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    recompute: tuple[float, ...]
    values: tuple[int, ...]

    def costs(self, schedule: Schedule, cluster: Cluster) -> StageCosts:
        """What the simulator is told: pipeline rank r is rank r of the cluster."""
        links = [
            cluster.link([schedule.rank_of(b), schedule.rank_of(b + 1)])
            for b in range(len(self.values))
        ]
        transfer = tuple(
            4 * count / link.bandwidth for count, link in zip(self.values, links, strict=True)
        )
        latency = tuple(link.latency for link in links)
        return StageCosts(
            self.forward, self.backward, self.weight, self.recompute, transfer, latency
        )

    def seconds(self, op: Op, separate: Mapping[Op, bool]) -> float:
        stage = op.stage
        if op.kind is not Kind.B:
            return {Kind.F: self.forward, Kind.W: self.weight, Kind.R: self.recompute}[op.kind][
                stage
            ]
        seconds = self.backward[stage]
        if Op(stage, Kind.W, op.microbatch) in separate:
            seconds -= self.weight[stage]
        if Op(stage, Kind.R, op.microbatch) not in separate:
            seconds += self.recompute[stage]
        return seconds


def mesh_of(rank: int, world_size: int, group: dist.ProcessGroup, clock: Clock) -> Mesh:
    return Mesh(
        Grid(pp=world_size),
        rank,
        torch.device("cpu"),
        pp=group,
        control=dist.group.WORLD,
        clock=clock,
    )


def walk(schedule: Schedule, line: Line, mesh: Mesh) -> float:
    """Run this rank's program of a schedule with communication, once; returns its end by the mesh's
    clock.
    """
    pipes, clock = Pipes(mesh, schedule), mesh.clock
    mine = [op for entry in schedule.ranks[mesh.pp_rank] for op in ops_of(entry)]
    separate = {op: True for op in mine if op.kind in (Kind.W, Kind.R)}
    awaited: dict[Op, dist.Work] = {}
    for op in mine:
        if op.kind in RECEIVES:
            border = op.stage - 1 if op.kind is Kind.RECV_F else op.stage
            consumer = Op(op.stage, Kind.F if op.kind is Kind.RECV_F else Kind.B, op.microbatch)
            awaited[consumer] = pipes.receive(op, (line.values[border],), torch.float32)[1]
        elif op.kind in SENDS:
            border = op.stage if op.kind is Kind.SEND_F else op.stage - 1
            pipes.send(op, torch.ones(line.values[border]))
        else:
            if op in awaited:
                awaited.pop(op).wait()
            clock.kernel(line.seconds(op, separate))
    end = clock.now()
    pipes.finish()
    return end

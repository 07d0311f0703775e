"""Ranks of a job that serve: who they are, where they write, and those that do nothing else."""

import sys
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ..config import SNAPSHOT_INTERVAL, RunConfig
from ..config.servers import snapshot_directory
from ..counting import counted
from ..parallel.interruption import Interrupted, Interruption
from ..parallel.launch import World, end_interrupted, job_secret
from ..training.console import put
from ..training.outputs import check_directory
from .roles import Role
from .server import Server, Settings
from .stopping import StopRequest

_LOOK = 0.5  # seconds between two checks of a server for signals


def check_snapshots(config: RunConfig) -> None:
    """Check where the servers of a job write. Raises ConfigError."""
    save = config.checkpoint.save
    if save is not None:
        directory = snapshot_directory(save)
        check_directory(
            "--save", save, directory, f"{directory}, for the snapshots of parameter servers,"
        )


def server_settings(config: RunConfig) -> Settings:
    """Return the settings of ranks that serve."""
    parallel = config.parallel
    save = config.checkpoint.save
    directory = None if save is None else snapshot_directory(save)
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    return Settings(directory, parallel.ps_snapshot_interval or SNAPSHOT_INTERVAL, timeout)


def serve(config: RunConfig, world: World, role: Role) -> None:
    """Run a rank that only serves, until all workers have left or died.

    Raises the server's error, and Interrupted if this rank got a signal, for which the workers have
    stopped.
    """
    check_snapshots(config)
    role, store = joined(world, role)
    own = store.clone()  # type: ignore[attr-defined]  # which torch's stubs leave out
    stop = StopRequest(own)
    with Interruption(
        None, end_interrupted, active=config.checkpoint.save is not None
    ) as interruption:
        server = Server(role, store, server_settings(config))
        if world.rank == 0:
            servers = counted(role.servers, "parameter server")
            workers = counted(role.workers, "worker")
            put(f"megatron_merak: {servers} for {workers}", sys.stdout)
        while not server.wait(_LOOK):
            if interruption.received:
                stop.make(interruption.received)
        put(server.summary(), sys.stdout)
        interruption.agreed = interruption.received
    if interruption.agreed:
        raise Interrupted(interruption.agreed)


def joined(world: World, role: Role) -> tuple[Role, dist.Store]:
    """Return the role of a rank that has joined its job, whose secret it knows, and the job's
    store.
    """
    assert world.store is not None, "a job with parameter servers has a store"
    return replace(role, secret=job_secret(world.store)), world.store

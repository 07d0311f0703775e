"""Whole jobs with parameter servers inside the processes of ``run_ranks``: launched, trained,
saved.
"""

import contextlib
import io
import os
import socket

import torch
import torch.distributed as dist

from megatron_merak import arguments
from megatron_merak.config import Config, RunConfig
from megatron_merak.parallel.launch import launch
from megatron_merak.parameter_server.roles import role_of
from megatron_merak.parameter_server.serving import serve
from megatron_merak.parameter_server.worker import Worker
from megatron_merak.training.pretrain import pretrain
from megatron_merak.training.pretrain_hf import pretrain_hf
from megatron_merak.training.strategy import ALONE
from tests.training.jobs import RUN, SHAPE


def job(rank: int, size: int, flags: str, config: type[RunConfig] = Config) -> str:
    """Run a job as the entry scripts do, with parameter servers or without, and return what this
    rank printed.
    """
    port = torch.zeros((), dtype=torch.int64)
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port.fill_(free.getsockname()[1])
    dist.broadcast(port, 0)
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(int(port)),
    }
    argv = [
        *(SHAPE.split() if config is Config else ()),
        *RUN.split(),
        "--mock-data",
        *flags.split(),
    ]
    settings, _ = arguments.read(arguments.build_parser(config=config), argv, config)
    settings.validate(size)
    role = role_of(settings.parallel, rank, size)
    world = launch("gloo", 1, team=None if role is None else role.team)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        if role is not None and role.only_serves:
            serve(settings, world, role)
        else:
            strategy = ALONE if role is None else Worker(settings, world, role)
            (pretrain if config is Config else pretrain_hf)(settings, world, strategy=strategy)
    return told.getvalue()

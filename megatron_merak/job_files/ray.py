"""A program for Ray: a worker of Ray Train for each rank, which runs the rank as a process of its own,
so that signals and the end of the process are the rank's.
"""

import json
import shlex

from .job import ClusterJob, preflight, wrapped

_TEXT = '''"""Submit it with: python FILE, or ray job submit -- python FILE

It was written by

    {written}
"""

import os
import shlex
import signal
import socket
import subprocess
import sys

import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

RANKS = {ranks}
COMMANDS = [
{commands}]
SECONDS = {seconds}  # after which ranks save and end; None: no limit
ENVIRONMENT = {{
{environment}}}


def rank() -> None:
    """Run one rank: Ray has set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR."""
    for words in map(shlex.split, COMMANDS):
        # At MASTER_PORT Ray has its own group, by which rank 0 says another port.
        ports = [0]
        if dist.get_rank() == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                ports = [free.getsockname()[1]]
        dist.broadcast_object_list(ports)
        environment = os.environ | ENVIRONMENT | {{"MASTER_PORT": str(ports[0])}}
        with subprocess.Popen([sys.executable, *words], env=environment) as process:
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)
                status = process.wait()
        if status == 128 + signal.SIGUSR1:
            return  # it was saved; the next start goes on from there
        if status:
            raise RuntimeError(f"rank {{dist.get_rank()}} ended with status {{status}}")


if __name__ == "__main__":
    trainer = TorchTrainer(
        rank,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=RANKS, use_gpu={gpus}),
        run_config=RunConfig(
{run}        ),
    )
    trainer.fit()
'''


def ray(job: ClusterJob) -> str:
    """Return the program."""
    script = job.words[0].endswith(".py")
    words = [*job.words] if script else ["-m", "megatron_merak", *job.words]
    commands = [["-m", "megatron_merak", *preflight(job)], words] if job.preflight else [words]
    variables = {"OMP_NUM_THREADS": "1"}
    if job.interface:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), job.interface)
    settings = [f"name={_text(job.name)}"]
    settings.append(f"failure_config=FailureConfig(max_failures={job.restarts})")
    if job.shared:
        settings.append(f"storage_path={_text(job.shared)}")
    return _TEXT.format(
        written=_inside(job.written, " " * 4),
        ranks=job.nodes * job.ranks,
        commands="".join(f'    """{_command(each)}""",\n' for each in commands),
        seconds=job.seconds - job.notice if job.seconds else None,
        environment="".join(
            f"    {_text(name)}: {_text(value)},\n" for name, value in variables.items()
        ),
        gpus=job.gpus,
        run="".join(f"            {setting},\n" for setting in settings),
    )


def _command(words: list[str]) -> str:
    """Return a command on several lines, inside triple quotes."""
    return _inside(wrapped([*map(shlex.quote, words)], "").replace(" \\\n", "\n"), " " * 4)


def _inside(text: str, indent: str) -> str:
    """Return a text inside triple quotes, its further lines indented."""
    plain = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return plain.replace("\n", f"\n{indent}")


def _text(value: str) -> str:
    """Return a text as Python has it, in double quotes."""
    return json.dumps(value)

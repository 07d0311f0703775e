"""Submit it with: python FILE, or ray job submit -- python FILE

It was written by

    merak-launch --emit ray --nodes 4 --gpus-per-node 8 --shared-dir /shared -- pretrain-hf \\
        --model /shared/model --data-path /shared/corpus_text_document --seq-length 4096 \\
        --micro-batch-size 1 --global-batch-size 256 --train-iters 20000 --lr 3e-4 --bf16 \\
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --save /shared/run \\
        --load /shared/run --save-interval 500
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

RANKS = 32
COMMANDS = [
    """-m megatron_merak pretrain-hf --model /shared/model --data-path /shared/corpus_text_document
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --train-iters 20000 --lr 3e-4
    --bf16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --save /shared/run
    --load /shared/run --save-interval 500""",
]
SECONDS = None  # after which ranks save and end; None: no limit
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
}


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
        environment = os.environ | ENVIRONMENT | {"MASTER_PORT": str(ports[0])}
        with subprocess.Popen([sys.executable, *words], env=environment) as process:
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)
                status = process.wait()
        if status == 128 + signal.SIGUSR1:
            return  # it was saved; the next start goes on from there
        if status:
            raise RuntimeError(f"rank {dist.get_rank()} ended with status {status}")


if __name__ == "__main__":
    trainer = TorchTrainer(
        rank,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=RANKS, use_gpu=True),
        run_config=RunConfig(
            name="merak-pretrain-hf",
            failure_config=FailureConfig(max_failures=3),
            storage_path="/shared",
        ),
    )
    trainer.fit()

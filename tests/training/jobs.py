"""Whole pretraining jobs inside the processes of ``run_ranks``: no start of an interpreter, no
import of torch.
"""

import contextlib
import io

import torch

from megatron_merak import arguments
from megatron_merak.config import Config, RunConfig
from megatron_merak.parallel.launch import World
from megatron_merak.training.pretrain import pretrain
from megatron_merak.training.pretrain_hf import pretrain_hf

SHAPE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 60 --hidden-dropout 0
    --attention-dropout 0"""
RUN = """--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --log-interval 1
    --eval-iters 0"""


def job(rank: int, world: int, flags: str, config: type[RunConfig] = Config) -> str:
    """Run a job and return what this rank printed; ``flags`` beside those above (SHAPE: of
    pretrain_gpt.py).
    """
    argv = [*(SHAPE.split() if config is Config else ()), *RUN.split(), *flags.split()]
    given = {"--data-path", "--data-args-path", "--stream-path"} & {*argv}
    argv += [] if given else ["--mock-data"]
    settings, _ = arguments.read(arguments.build_parser(config=config), argv, config)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        (pretrain if config is Config else pretrain_hf)(
            settings, World(rank, world, torch.device("cpu"))
        )
    return told.getvalue()

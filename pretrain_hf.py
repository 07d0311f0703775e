"""Pretrain or fine-tune any HuggingFace causal language model with data x tensor x pipeline parallelism.

from a config.json:  python pretrain_hf.py --model config.json --seq-length 128 --micro-batch-size 4 --train-iters 20 \\
                         --lr 1e-3 --mock-data --log-interval 1
from weights:        torchrun --nproc-per-node 8 pretrain_hf.py --model DIRECTORY --data-path PREFIX \\
                         --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --save-hf TRAINED ...
"""

import sys

from megatron_merak.arguments import parse
from megatron_merak.config import HFConfig
from megatron_merak.errors import MerakError
from megatron_merak.megatron_flags import without_effect
from megatron_merak.parallel.launch import abandon, launch, leave, position
from megatron_merak.training.plan_file import check_plan_ranks, decided
from megatron_merak.training.pretrain_hf import pretrain_hf
from megatron_merak.training.served import role_of


def main() -> None:
    config = parse(description=__doc__, config=HFConfig, defaults=decided)
    rank: int | str = "?"
    try:
        rank, size = position()
        check_plan_ranks(config, size)
        config.validate(size)
        parallel, train = config.parallel, config.train
        world = launch(
            parallel.distributed_backend,
            parallel.distributed_timeout_minutes,
            train.deterministic_mode,
            parallel.emulate,
            train.fp32_matmul_precision,
            served=role_of(parallel),
        )
        pretrain_hf(config, world, without_effect(sys.argv[1:])[1])
    except MerakError as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        abandon(1)
    leave(world)


if __name__ == "__main__":
    main()

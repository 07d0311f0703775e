"""Pretrain a GPT with data x tensor x pipeline parallelism, on CPUs or GPUs: the command
merak-pretrain, in a clone.

one process:      python pretrain_gpt.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 \\
                      --seq-length 128 --micro-batch-size 4 --train-iters 20 --lr 1e-3 --mock-data \\
                      --vocab-size 1000 --log-interval 1
eight processes:  torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 \\
                      --pipeline-model-parallel-size 2 --global-batch-size 32 ... (the same flags)
"""

from megatron_merak.cli.pretrain import gpt as main

if __name__ == "__main__":
    main()

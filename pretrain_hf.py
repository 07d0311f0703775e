"""Pretrain or fine-tune any HuggingFace causal language model with data x tensor x pipeline
parallelism: the command merak-pretrain-hf, in a clone.

from a config.json:  python pretrain_hf.py --model config.json --seq-length 128 \\
                         --micro-batch-size 4 --train-iters 20 --lr 1e-3 --mock-data --log-interval 1
from weights:        torchrun --nproc-per-node 8 pretrain_hf.py --model DIRECTORY \\
                         --data-path PREFIX --tensor-model-parallel-size 2 \\
                         --pipeline-model-parallel-size 2 --save-hf TRAINED ...
"""

from megatron_merak.cli.pretrain import hf as main

if __name__ == "__main__":
    main()

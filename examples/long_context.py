"""Context parallelism: the sequences of an unmodified model are divided over ranks.

    python examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py --context_parallel_size 2 \\
        --data_parallel_sharding_strategy optim_grads_params

A small Llama learns Python's standard library byte by byte, in sequences of 512 bytes. With the
second command two ranks share each sequence, and all four share weights, gradients and optimizer
state; the losses are those of two replicas. The last line is about

    eval_loss = 3.0
"""

import inspect
import textwrap
import typing

import torch
from mixture import DEFAULTS as COMMON
from mixture import collate, windows
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM

from megatron_merak import MerakArguments, MerakTrainer

DEFAULTS = {
    **COMMON,
    "output_dir": "runs/long_context",
    "per_device_train_batch_size": 2,
    "logging_steps": 10,
}
WINDOW = 512  # bytes of a sample


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = HfArgumentParser(MerakArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    trainer = MerakTrainer(
        llama(),
        args,
        collate,
        train_dataset=windows(inspect, typing, size=WINDOW),
        eval_dataset=windows(textwrap, size=WINDOW),
    )
    trainer.train()
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()

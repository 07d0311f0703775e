"""Expert parallelism: the experts of an unmodified mixture are divided over ranks.

    python examples/mixture.py
    torchrun --nproc-per-node 4 examples/mixture.py --expert_model_parallel_size 4 \\
        --per_device_train_batch_size 2
    torchrun --nproc-per-node 4 examples/mixture.py --tensor_model_parallel_size 2 \\
        --sequence_parallel true --expert_model_parallel_size 2 --pipeline_model_parallel_size 2

A small Qwen3-MoE of eight experts learns Python's standard library byte by byte. With the second
command each replica has two whole experts, with the third each rank of a layer four, and sends rows
of tokens to the rank of their experts; the losses are those of one process. The last line is about

    eval_loss = 3.0
"""

import inspect
import textwrap
import typing

import torch
from transformers import HfArgumentParser, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_merak import MerakArguments, MerakTrainer

DEFAULTS = {
    "output_dir": "runs/mixture",
    "max_steps": 40,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "logging_steps": 20,
    "save_strategy": "no",
    "use_cpu": not torch.cuda.is_available(),
}
WINDOW = 64  # bytes of a sample


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        output_router_logits=True,
    )
    return Qwen3MoeForCausalLM(config)


def windows(*modules: object, size: int = WINDOW) -> list[dict[str, list[int]]]:
    """Samples of so many bytes, one after the other."""
    text = "\n".join(inspect.getsource(module) for module in modules).encode()
    starts = range(0, len(text) - size, size)
    return [{"input_ids": list(text[at : at + size])} for at in starts]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = HfArgumentParser(MerakArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    trainer = MerakTrainer(
        mixture(),
        args,
        collate,
        train_dataset=windows(inspect, typing),
        eval_dataset=windows(textwrap),
    )
    trainer.train()
    trainer.save_model()
    trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()

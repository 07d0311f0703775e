"""Muon: hidden matrices by torch.optim.Muon, everything else by AdamW, under any layout.

    python examples/muon.py
    torchrun --nproc-per-node 4 examples/muon.py \\
        --tensor_model_parallel_size 2 --use_distributed_optimizer true

A small Llama learns Python's standard library byte by byte, once by AdamW and once by Muon, with
one learning rate for both. Muon orthogonalises whole matrices: those that ranks have parts of are
gathered for that. The last lines say what each came to, about

    ***** muon metrics *****
      adamw_torch = 2.7556
      muon        = 2.4234
"""

import torch
from from_trainer import collate, lines_of
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM

from megatron_merak import MerakArguments, MerakTrainer

DEFAULTS = {
    "output_dir": "runs/muon",
    "max_steps": 80,
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "weight_decay": 0.1,
    "logging_steps": 20,
    "save_strategy": "no",
    "use_cpu": not torch.cuda.is_available(),
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main() -> None:
    parser = HfArgumentParser(MerakArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    data = {
        "data_collator": collate,
        "train_dataset": lines_of(
            ["argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py"]
        ),
        "eval_dataset": lines_of(["textwrap.py"]),
    }
    losses = {}
    for args.optim in ("adamw_torch", "muon"):
        trainer = MerakTrainer(llama(), args, **data)
        trainer.train()
        losses[args.optim] = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.log_metrics("muon", losses)


if __name__ == "__main__":
    main()

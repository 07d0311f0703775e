"""Distillation: a trainer with a loss of its own, under any layout.

    python examples/distill.py
    torchrun --nproc-per-node 4 examples/distill.py \\
        --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2

A teacher learns Python's standard library byte by byte. A smaller pupil then learns the same lines
from the teacher's predictions. The teacher is a frozen part of the pupil: its layers are cut,
divided and placed as the pupil's are. The loss is computed where the last stage is; what it reads
of earlier ones travels there.
"""

import torch
from from_trainer import collate, lines_of
from torch.nn import functional as F
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM

from megatron_merak import MerakArguments, MerakTrainer, from_pretrained

DEFAULTS = {
    "output_dir": "runs/distill",
    "max_steps": 60,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "logging_steps": 10,
    "save_strategy": "no",
    "use_cpu": not torch.cuda.is_available(),
}
TEMPERATURE = 2.0


def llama(hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=258, hidden_size=hidden, intermediate_size=5 * hidden // 2, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip


class Distiller(MerakTrainer):
    """As for transformers.Trainer, ``compute_loss`` is all that changes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss
        if model.training:
            with torch.no_grad():
                wanted = model.teacher(
                    inputs["input_ids"], attention_mask=inputs["attention_mask"]
                ).logits
            pair = (
                F.log_softmax(logits.float() / TEMPERATURE, -1)
                for logits in (outputs.logits, wanted)
            )
            apart = F.kl_div(*pair, log_target=True, reduction="none").sum(-1)
            targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100) != -100
            loss = 0.5 * loss + 0.5 * TEMPERATURE**2 * (apart * targets).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    parser = HfArgumentParser(MerakArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    data = {
        "data_collator": collate,
        "train_dataset": lines_of(
            ["argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py"]
        ),
        "eval_dataset": lines_of(["textwrap.py"]),
    }
    teaching = MerakTrainer(LlamaForCausalLM(llama(96, 4)), args, **data)
    teaching.train()
    losses = {"teacher": teaching.evaluate()["eval_loss"]}
    teaching.save_model()
    pupil = LlamaForCausalLM(llama(32, 2))
    pupil.teacher = from_pretrained(args.output_dir).requires_grad_(False)
    learning = Distiller(pupil, args, **data)
    learning.train()
    losses["pupil"] = learning.evaluate()["eval_loss"]
    learning.save_model(f"{args.output_dir}/pupil")
    learning.log_metrics("distill", losses)


if __name__ == "__main__":
    main()

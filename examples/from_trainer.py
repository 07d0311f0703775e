"""From transformers.Trainer to MerakTrainer: two lines change.

    -from transformers import Trainer, TrainingArguments
    +from megatron_merak import MerakArguments as TrainingArguments, MerakTrainer as Trainer

and, among the arguments (here: the command line), the degrees of parallelism:

    python examples/from_trainer.py
    torchrun --nproc-per-node 4 examples/from_trainer.py \\
        --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2

Everything below the imports is the script that transformers.Trainer runs: lines of Python's
standard library as batches of uneven length, metrics, early stopping, the best model at the end.
"""

import sysconfig
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback, HfArgumentParser, LlamaConfig, LlamaForCausalLM

from megatron_merak import MerakArguments as TrainingArguments
from megatron_merak import MerakTrainer as Trainer

DEFAULTS = {
    "output_dir": "runs/from_trainer",
    "max_steps": 120,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-3,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "logging_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 30,
    "save_steps": 30,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "use_cpu": not torch.cuda.is_available(),
}


def lines_of(modules: list[str], longest: int = 64) -> list[dict[str, list[int]]]:
    """Each line of some modules as bytes: 0 pads, 1 ends a line."""
    library = Path(sysconfig.get_path("stdlib"))
    lines = [
        line
        for module in modules
        for line in (library / module).read_bytes().splitlines()
        if line.strip()
    ]
    return [{"input_ids": [*(byte + 2 for byte in line[:longest]), 1]} for line in lines]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """As long as the longest row."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    shown = padded != 0
    return {
        "input_ids": padded,
        "attention_mask": shown.long(),
        "labels": padded.masked_fill(~shown, -100),
    }


def accuracy(prediction) -> dict[str, float]:
    """How many next bytes are right; ``predictions`` are what ``most_likely`` made of logits."""
    found, wanted = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((found == wanted)[wanted != -100].mean())}


def most_likely(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        data_collator=collate,
        train_dataset=lines_of(
            ["argparse.py", "ast.py", "dataclasses.py", "inspect.py", "typing.py"]
        ),
        eval_dataset=lines_of(["textwrap.py"]),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=most_likely,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()

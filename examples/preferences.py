"""TRL under a plan: supervised fine-tuning, then preferences (DPO) with LoRA, from a model
directory.

    python examples/preferences.py
    torchrun --nproc-per-node 4 examples/preferences.py \\
        --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2

A tiny Llama, which the script writes into a directory as a hub would give it, learns to continue
words. Then it learns from pairs which of two continuations is the better one: the one in upper
case. Trainers, data preparation, losses and metrics are TRL's; ``parallelize`` is all that is not a
script for TRL.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_merak.extras import installed_by

try:
    import trl
    from datasets import Dataset
    from peft import LoraConfig
except ImportError as error:
    raise SystemExit(f"{error.name} is not installed: {installed_by('trl')}") from None

from megatron_merak.trl import parallelize

SFTTrainer, SFTConfig = parallelize(trl.SFTTrainer), parallelize(trl.SFTConfig)
DPOTrainer, DPOConfig = parallelize(trl.DPOTrainer), parallelize(trl.DPOConfig)

WORDS = "sun sea sky sand salt stone storm stream".split()
COMMON = {
    "per_device_train_batch_size": 8,
    "logging_steps": 5,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "bf16": torch.cuda.is_available(),
    "use_cpu": not torch.cuda.is_available(),
}


@dataclass
class Options:
    output_dir: str = field(
        default="runs/preferences", metadata={"help": "Where models are written."}
    )
    tensor_model_parallel_size: int = field(
        default=1, metadata={"help": "Ranks that share every layer."}
    )
    pipeline_model_parallel_size: int = field(
        default=1, metadata={"help": "Stages that the layers are cut into."}
    )
    steps: int = field(
        default=60, metadata={"help": "Steps of fine-tuning; DPO takes half as many."}
    )


def write_model(directory: Path) -> None:
    """A Llama with random weights, and a tokenizer with a token per letter."""
    letters = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ "]
    made = Tokenizer(
        models.WordLevel({each: place for place, each in enumerate(letters)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=56, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    degrees = {
        name: getattr(options, name)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    }
    root, draw = Path(options.output_dir), random.Random(0)
    pretrained, tuned, preferring = (
        str(root / name) for name in ("pretrained", "tuned", "preferring")
    )
    preferring_steps = max(1, options.steps // 2)
    # so that short runs log, too
    interval = min(COMMON["logging_steps"], preferring_steps)
    settings = COMMON | degrees | {"logging_steps": interval}

    args = SFTConfig(tuned, max_steps=options.steps, learning_rate=5e-3, **settings)
    with args.main_process_first():
        if args.process_index == 0:
            write_model(Path(pretrained))
    lines = [" ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 6))) for _ in range(256)]
    tuning = SFTTrainer(pretrained, args, train_dataset=Dataset.from_dict({"text": lines}))
    tuning.train()
    tuning.save_model()

    pairs = [{"prompt": f"{draw.choice(WORDS)} ", "word": draw.choice(WORDS)} for _ in range(256)]
    pairs = [
        {"prompt": p["prompt"], "chosen": p["word"].upper(), "rejected": p["word"]} for p in pairs
    ]
    args = DPOConfig(
        preferring, max_steps=preferring_steps, learning_rate=1e-3, beta=0.5, **settings
    )
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    learning = DPOTrainer(
        tuned, args=args, train_dataset=Dataset.from_list(pairs), peft_config=adapters
    )
    learning.train()
    learning.save_model()  # a directory of adapters, which peft opens

    logs = [
        [entry for entry in trainer.state.log_history if "loss" in entry]
        for trainer in (tuning, learning)
    ]
    found = {"fine-tuning loss": logs[0][-1]["loss"], "preference loss": logs[1][-1]["loss"]}
    learning.log_metrics("preferences", found | {"preferred": logs[1][-1]["rewards/accuracies"]})


if __name__ == "__main__":
    main()

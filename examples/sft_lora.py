"""Supervised fine-tuning with packing and LoRA, from a local model directory, by TRL's SFTTrainer
under a plan.

    python examples/sft_lora.py [--model DIRECTORY]
    torchrun --nproc-per-node 4 examples/sft_lora.py \\
        --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2

Documents of unequal lengths are packed into rows of 96 tokens, each attending to itself only, and
adapters of rank 8 are trained on every linear layer. The adapters are saved as peft saves them;
plain peft merges them into the model, and plain transformers scores the result on documents that
were not trained on. Without --model, a tiny Llama with random weights is written to a directory
first, as a hub would deliver it.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from megatron_merak.extras import installed_by

try:
    import trl
    from datasets import Dataset
    from peft import AutoPeftModelForCausalLM, LoraConfig
except ImportError as error:
    raise SystemExit(f"{error.name} is not installed: {installed_by('trl')}") from None

from preferences import COMMON, WORDS, write_model

from megatron_merak.trl import parallelize

SFTTrainer, SFTConfig = parallelize(trl.SFTTrainer), parallelize(trl.SFTConfig)


@dataclass
class Options:
    model: str = field(
        default="",
        metadata={"help": "Directory of a model and its tokenizer; a tiny one if empty."},
    )
    output_dir: str = field(
        default="runs/sft_lora", metadata={"help": "Where adapters and the model are written."}
    )
    tensor_model_parallel_size: int = field(default=1, metadata={"help": "Tensor-parallel degree."})
    pipeline_model_parallel_size: int = field(
        default=1, metadata={"help": "Number of pipeline stages."}
    )
    steps: int = field(default=60, metadata={"help": "Optimizer steps."})


def documents(count: int, seed: int) -> list[str]:
    """Sentences of 2 to 12 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 12))) for _ in range(count)]


@torch.no_grad()
def loss_of(model: torch.nn.Module, directory: str, texts: list[str]) -> float:
    """Mean loss per document under plain transformers."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = [torch.tensor([tokenizer(text).input_ids]) for text in texts]
    return sum(model(input_ids=row, labels=row).loss.item() for row in rows) / len(rows)


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()
    root = Path(options.output_dir)
    source = options.model or str(root / "pretrained")
    adapters = str(root / "adapters")
    merged = str(root / "merged")
    args = SFTConfig(
        adapters,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        max_steps=options.steps,
        learning_rate=1e-2,
        packing=True,
        max_length=96,
        **COMMON,
    )
    with args.main_process_first():
        if args.process_index == 0 and not options.model:
            write_model(Path(source))
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    data = Dataset.from_dict({"text": documents(3000, seed=0)})
    trainer = SFTTrainer(source, args, train_dataset=data, peft_config=lora)
    trainer.train()
    # adapter_model.safetensors and adapter_config.json, which plain peft opens
    trainer.save_model()

    if trainer.is_world_process_zero():
        unseen = documents(64, seed=1)
        before = loss_of(AutoModelForCausalLM.from_pretrained(source), source, unseen)
        model = AutoPeftModelForCausalLM.from_pretrained(adapters).merge_and_unload()
        model.save_pretrained(merged)
        after = loss_of(model, source, unseen)
        print(
            f"loss on unseen documents: {before:.2f} before, {after:.2f} with the adapters merged"
        )
        print(f"adapters: {adapters}")
        print(f"merged model: {merged}")


if __name__ == "__main__":
    main()

"""Tiny runs of TRL's trainers, as TRL has them or parallelized: SFT, DPO and reward models, with
LoRA and without.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = ["the cat", "a dog", "runs", "sleeps", "over", "hills", "and", "eats!"]
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
COMMON = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-4,
    "eval_strategy": "steps",
    "eval_steps": 2,  # before the last step, which has to train as if there had been none
    "per_device_eval_batch_size": 8,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per character."""
    letters = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz ,.!?"]
    made = Tokenizer(
        models.WordLevel({each: place for place, each in enumerate(letters)}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(kind: type = LlamaForCausalLM, **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind(LlamaConfig(**SHAPE | more))


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    shape = SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**shape, router_aux_loss_coef=0.1))


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 5))) for _ in range(count)]


def passages(count: int) -> Dataset:
    return Dataset.from_dict({"text": texts(count)})


def completions(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": texts(count), "completion": texts(count, 1)})


def pairs(count: int) -> Dataset:
    chosen, rejected = ([f" {text}" for text in texts(count, seed)] for seed in (1, 2))
    return Dataset.from_dict({"prompt": texts(count), "chosen": chosen, "rejected": rejected})


def lora() -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
    )


# name -> (trainer, config, model, data, other arguments of the trainer, of the config)
CASES: dict[str, tuple[type, type, Callable, Callable, Callable, dict]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, llama, passages, dict, {}),
    "sft-completions": (
        trl.SFTTrainer,
        trl.SFTConfig,
        llama,
        completions,
        dict,
        {"loss_type": "dft"},
    ),
    "sft-packed": (
        trl.SFTTrainer,
        trl.SFTConfig,
        llama,
        passages,
        dict,
        {"packing": True, "max_length": 64},
    ),
    "sft-flat": (
        trl.SFTTrainer,
        trl.SFTConfig,
        llama,
        passages,
        dict,
        {"padding_free": True, "max_length": None},
    ),
    "sft-smooth": (
        trl.SFTTrainer,
        trl.SFTConfig,
        llama,
        passages,
        dict,
        {"label_smoothing_factor": 0.1},
    ),
    "sft-moe": (trl.SFTTrainer, trl.SFTConfig, mixtral, passages, dict, {}),
    "sft-lora": (
        trl.SFTTrainer,
        trl.SFTConfig,
        llama,
        passages,
        lambda: {"peft_config": lora()},
        {},
    ),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, llama, pairs, lambda: {"ref_model": llama()}, {}),
    "dpo-ipo": (
        trl.DPOTrainer,
        trl.DPOConfig,
        llama,
        pairs,
        lambda: {"ref_model": llama()},
        {"loss_type": ["ipo"]},
    ),
    "dpo-mixed": (
        trl.DPOTrainer,
        trl.DPOConfig,
        llama,
        pairs,
        lambda: {"ref_model": llama()},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1.0]},
    ),
    "dpo-lora": (trl.DPOTrainer, trl.DPOConfig, llama, pairs, lambda: {"peft_config": lora()}, {}),
    "reward": (
        trl.RewardTrainer,
        trl.RewardConfig,
        lambda: llama(LlamaForSequenceClassification, num_labels=1),
        pairs,
        dict,
        {},
    ),
}


def train(
    name: str, directory: str, made: Callable[[type], type] = lambda kind: kind, **more: Any
) -> Any:
    """A trainer that has trained. made: of TRL's class and config what is used, them or
    ``parallelize`` of them.
    """
    trainer, config, model, data, others, settings = CASES[name]
    arguments = made(config)(directory, **COMMON | settings | more)
    made_trainer = made(trainer)(
        model(),
        args=arguments,
        train_dataset=data(24),
        eval_dataset=data(8),
        processing_class=tokenizer(),
        **others(),
    )
    made_trainer.train()
    return made_trainer


def history(trainer: Any) -> list[dict[str, float]]:
    """Its log without times and operations."""
    left_out = ("runtime", "per_second", "flos")
    return [
        {key: value for key, value in entry.items() if not any(each in key for each in left_out)}
        for entry in trainer.state.log_history
    ]

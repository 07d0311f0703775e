"""A training script for transformers' Trainer, or, with --merak, for MerakTrainer: the same but for
two names.
"""

import argparse
import os
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Told(TrainerCallback):
    """Prints the loss of every step in full."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.9f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=int, default=1800)
    parser.add_argument("--merak", action="store_true")
    options, more = parser.parse_known_args()
    trainer_class: Any = Trainer
    arguments_class: Any = TrainingArguments
    if options.merak:
        import megatron_merak

        trainer_class = megatron_merak.MerakTrainer
        arguments_class = megatron_merak.MerakArguments
    torch.manual_seed(1)
    shape = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=60,
    )
    arguments = arguments_class(
        options.directory,
        use_cpu=True,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        ddp_timeout=options.timeout,
        seed=3,
        **{name: int(value) for name, value in (word.split("=") for word in more)},
    )
    draw = torch.Generator().manual_seed(5)
    samples = []
    for _ in range(80):
        tokens = torch.randint(0, 60, (16,), generator=draw)
        samples.append({"input_ids": tokens, "labels": tokens})
    trainer = trainer_class(
        LlamaForCausalLM(shape), arguments, train_dataset=samples, callbacks=[Told()]
    )
    os.makedirs(options.directory, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.directory))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

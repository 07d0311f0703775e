"""A script with MerakTrainer that goes on from its newest checkpoint; a job of
``tests.restarts``.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import megatron_merak as mm


class Say(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.is_world_process_zero:
            print(f"step {state.global_step} ", flush=True)
        time.sleep(0.1)  # so that a kill can come in the middle


def main() -> None:
    directory, steps, backend = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    arguments = mm.MerakArguments(
        output_dir=str(directory),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=4,
        save_total_limit=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        pipeline_model_parallel_size=2,
        ddp_backend=backend,
    )
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    rows = torch.randint(0, 64, (256, 16), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = mm.MerakTrainer(
        LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[Say()]
    )
    found = sorted(directory.glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=bool(found))


if __name__ == "__main__":
    main()

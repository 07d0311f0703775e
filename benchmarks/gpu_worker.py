"""Training steps in this process by an entry script or a trainer as it is shipped, timed from outside.

    python benchmarks/gpu_worker.py "7b gpt 8" --into FILE                  # model, way, micro-batches
    python benchmarks/gpu_worker.py "7b gpt 8" --into FILE --device cpu     # the same code on tiny shapes

bf16 on sequences of 4096 tokens, one per micro-batch. FILE has tokens/s, model FLOP/s and MFU, peak memory and losses
as soon as the steps are over, and soon after the profile of one more. A model whose weights, gradients and optimizer do
not fit is replaced by a part of it (gpu_rows.STAND_INS).

A script is run as ``python SCRIPT`` runs it; its report, and a trainer's callbacks, tell when a step is over.

FLOPs are those of the matrix products of forward and backward, causal attention with the half of its scores that is
needed, nothing for recomputation. Megatron-LM counted all scores when it published its table: `tflops_all_scores` is
that (Llama-2-7B at 4096: 7.5 % more). MFU is of the dense bf16 peak, 989e12 FLOP/s for H100 and H200.
"""

import argparse
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from gpu_rows import (
    CAPTURED,
    GPT,
    SEQUENCE,
    SETTINGS,
    SHAPES,
    TRAINER,
    Row,
    Shape,
    row_of,
    that_fits,
    tiny,
)
from gpu_stopwatch import Stopwatch
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parent.parent
BEGAN = time.time()
MEASURED = 3  # steps
CPU_SEQUENCE = 64  # tokens where only the code is tried
CHUNK = 1024  # tokens whose logits exist at a time where a shape wants a chunked loss


def gpt_flags(shape: Shape, sequence: int) -> list[str]:
    """The shape in the flags of pretrain_gpt.py."""
    flags = [
        "--num-layers",
        shape.layers,
        "--hidden-size",
        shape.hidden,
        "--num-attention-heads",
        shape.heads,
    ]
    flags += ["--ffn-hidden-size", shape.ffn, "--max-position-embeddings", sequence]
    flags += [
        "--swiglu",
        "--normalization",
        "RMSNorm",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
    ]
    flags += ["--position-embedding-type", "rope", "--rotary-base", shape.rotary_base]
    flags += ["--vocab-size", shape.vocabulary - 1]  # the tokenizer of made-up data adds one
    if shape.groups < shape.heads:
        flags += ["--group-query-attention", "--num-query-groups", shape.groups]
    return [*map(str, flags), "--attention-dropout", "0", "--hidden-dropout", "0"]


def training_flags(shape: Shape, sequence: int, micro_batches: int, steps: int) -> list[str]:
    """What both entry scripts take."""
    flags = [
        "--seq-length",
        sequence,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        micro_batches,
    ]
    flags += [
        "--train-iters",
        steps,
        "--lr",
        "1e-4",
        "--bf16",
        "--mock-data",
        "--eval-iters",
        0,
        "--log-interval",
        1,
    ]
    if shape.recompute:
        flags += [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            1,
        ]
        flags += ["--cross-entropy-chunk-size", CHUNK]
    return [*map(str, flags)]


@contextmanager
def watched(stopwatch: Stopwatch) -> Iterator[None]:
    """The report of an entry script tells the stopwatch of every step."""
    from megatron_merak.training.report import Report

    reported = Report.step

    def step(self, *told):
        stopwatch.loss(told[-1].loss)
        stopwatch.step()
        reported(self, *told)

    with mock.patch.object(Report, "step", step):
        yield


def run_script(script: str, flags: list[str], stopwatch: Stopwatch) -> None:
    """Run an entry script in this process. Raises RuntimeError where it ends before its steps are
    over.
    """
    with watched(stopwatch), mock.patch.object(sys, "argv", [script, *flags]):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    if len(stopwatch.ends) != stopwatch.steps:
        raise RuntimeError(f"{script} took {len(stopwatch.ends)} steps of {stopwatch.steps}")


def hf_config(shape: Shape, sequence: int):
    """The shape as transformers has it: Llama, Qwen2, or Mixtral where there are experts."""
    from transformers import LlamaConfig, MixtralConfig, Qwen2Config

    given = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "intermediate_size": shape.ffn, "num_attention_heads": shape.heads, "num_key_value_heads": shape.groups,
        "max_position_embeddings": sequence, "rope_theta": float(shape.rotary_base), "use_cache": False,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": shape.qwen, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if shape.qwen:
        return Qwen2Config(**given)
    if shape.experts == 1:
        return LlamaConfig(**given)
    return MixtralConfig(**given, num_local_experts=shape.experts, num_experts_per_tok=shape.active)


def hf_model(shape: Shape, sequence: int, device: torch.device) -> torch.nn.Module:
    """With random weights drawn on the device, handed over on the CPU, as from_pretrained does:
    fp32, or a frozen bf16 base under adapters."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(1)
    config = hf_config(shape, sequence)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if shape.lora else torch.float32
        )
    model = model.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if not shape.lora:
        return model
    from peft import LoraConfig, get_peft_model

    told = {
        "lora_alpha": 2 * shape.lora,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
    }
    return get_peft_model(model, LoraConfig(r=shape.lora, task_type="CAUSAL_LM", **told))


def save_model(shape: Shape, sequence: int, device: torch.device, folder: str) -> None:
    """Save a model of random bf16 weights, drawn on the device: a CPU takes a minute for three
    billion.
    """
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(1)
    with device:
        model = AutoModelForCausalLM.from_config(hf_config(shape, sequence), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


class Tokens(Dataset):
    """Made-up sequences of tokens, the same for everybody."""

    def __init__(self, count: int, vocabulary: int, sequence: int):
        self.count = count
        self.vocabulary = vocabulary
        self.sequence = sequence

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocabulary, (self.sequence,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def run_trainer(row: Row, shape: Shape, stopwatch: Stopwatch, folder: str) -> None:
    """The same lines for transformers' Trainer and for MerakTrainer."""
    from transformers import TrainerCallback

    if row.contestant == TRAINER:
        from megatron_merak import MerakArguments as Arguments
        from megatron_merak import MerakTrainer as Trainer
    else:
        from transformers import Trainer
        from transformers import TrainingArguments as Arguments

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            stopwatch.step()

        def on_log(self, args, state, control, logs, **kwargs):
            if "loss" in logs:
                stopwatch.loss(float(logs["loss"]))

    steps, device = stopwatch.steps, stopwatch.device
    settings = {
        "output_dir": folder, "per_device_train_batch_size": 1, "gradient_accumulation_steps": row.micro_batches,
        "max_steps": steps, "learning_rate": 1e-4, "weight_decay": 0.1, "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": True,
        "use_cpu": device.type == "cpu",
    }  # fmt: skip
    arguments = Arguments(**settings, **SETTINGS[row.contestant])
    data = Tokens(steps * row.micro_batches, shape.vocabulary, stopwatch.sequence)
    model = hf_model(shape, stopwatch.sequence, device)
    Trainer(model, arguments, train_dataset=data, callbacks=[Watch]).train()


def run(row: Row, stopwatch: Stopwatch) -> None:
    """Train the row's model in the row's way for the stopwatch's steps."""
    on_cpu = stopwatch.device.type == "cpu"
    shape, sequence = tiny(SHAPES[row.model]) if on_cpu else SHAPES[row.model], stopwatch.sequence
    flags = training_flags(shape, sequence, row.micro_batches, stopwatch.steps)
    flags += ["--distributed-backend", "gloo"] if on_cpu else []
    with tempfile.TemporaryDirectory(prefix="gpu_step_") as folder:
        if row.contestant == GPT:
            run_script("pretrain_gpt.py", gpt_flags(shape, sequence) + flags, stopwatch)
        elif row.contestant == CAPTURED:
            save_model(shape, sequence, stopwatch.device, folder)
            run_script("pretrain_hf.py", ["--model", folder, *flags], stopwatch)
        else:
            run_trainer(row, shape, stopwatch, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", type=row_of, help="model, way and micro-batches")
    parser.add_argument(
        "--into", type=Path, required=True, metavar="FILE", help="where the result goes"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny shapes, to try the code",
    )
    parser.add_argument("--steps", type=int, default=MEASURED, metavar="N", help="measured steps")
    given = parser.parse_args()
    device = torch.device(given.device)
    on_cpu = device.type == "cpu"
    row = that_fits(
        given.row, None if on_cpu else torch.cuda.get_device_properties(device).total_memory
    )
    sequence = CPU_SEQUENCE if on_cpu else SEQUENCE
    stopwatch = Stopwatch(row, device, sequence, measured=given.steps, into=given.into, began=BEGAN)
    run(row, stopwatch)
    print(stopwatch.found["figure"])


if __name__ == "__main__":
    main()

"""One script for TRL's SFTTrainer, as TRL has it and parallelized: CPU seconds per step, whole model and LoRA.

    OMP_NUM_THREADS=1 python -m benchmarks trl_sft            # 3 runs in turns; 10 minutes
    OMP_NUM_THREADS=1 python -m benchmarks trl_sft --quick    # a tiny model, once: does it all still run?

A Llama with 58 million parameters, fp32, four sequences of 96 to 256 tokens a step, TRL's defaults otherwise. Seconds
are of the processor, so that a busy machine matters less; the first step, which captures the model, is left out. Losses
of the two must agree.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

WAYS, TUNED = ("TRL", "parallelized"), ("whole model", "LoRA")
FULL = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8}
QUICK = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def run(way: str, tuned: str, shape: dict[str, int], steps: int) -> dict[str, Any]:
    """In this process: the seconds of each step but the first, and the losses."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    from megatron_merak.trl import parallelize

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.times.append(time.process_time())

    made = parallelize if way == WAYS[1] else lambda kind: kind
    draw = random.Random(0)
    rows = [
        [draw.randrange(3, shape["vocab_size"]) for _ in range(draw.randint(96, 256))]
        for _ in range(4 * steps)
    ]
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape, num_attention_heads=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1
    )
    adapters = (
        LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
        if tuned == TUNED[1]
        else None
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = made(trl.SFTConfig)(
            folder, per_device_train_batch_size=4, max_steps=steps, logging_steps=1, learning_rate=1e-4, bf16=False,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        trainer = made(trl.SFTTrainer)(
            LlamaForCausalLM(config), args, train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer, peft_config=adapters, callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "seconds": seconds,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }


def apart(way: str, tuned: str, quick: bool) -> dict[str, Any]:
    """``run`` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "trl_sft",
        "--run",
        way,
        tuned,
        *(["--quick"] if quick else []),
    ]
    ended = subprocess.run(command, env=os.environ | {"CI": "1"}, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-2000:])
    return json.loads(ended.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 where losses disagree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns (3)")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, once: a smoke test, not a measurement"
    )
    parser.add_argument("--run", nargs=2, metavar=("WAY", "TUNED"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.run:
        print(json.dumps(run(*given.run, QUICK if given.quick else FULL, 4 if given.quick else 8)))
        return 0
    print("| | TRL, CPU s per step | parallelized | |\n|---|--:|--:|--:|")
    for tuned in TUNED:
        found: dict[str, list[dict]] = {way: [] for way in WAYS}
        for _ in range(1 if given.quick else given.repeats):
            for way in WAYS:
                found[way].append(apart(way, tuned, given.quick))
        losses = [runs[0]["losses"] for runs in found.values()]
        if max(abs(one - other) for one, other in zip(*losses, strict=True)) > 1e-3:
            print(f"Losses differ: {losses}", file=sys.stderr)
            return 1
        medians = [sorted(median(one["seconds"]) for one in runs) for runs in found.values()]
        texts = [f"{median(each):.2f} ({each[0]:.2f}-{each[-1]:.2f})" for each in medians]
        print(
            f"| {tuned} | {texts[0]} | {texts[1]} | {median(medians[0]) / median(medians[1]):.2f}x |",
            flush=True,
        )
    return 0

"""What the scripts of these benchmarks train on, and how they say how long their steps took."""

import json
import resource
import time

import torch
from torch.utils.data import Dataset
from transformers import TrainerCallback

MEASURED = "measured "


def settings_of(options):
    """Training arguments of transformers; "more" are further ones, or others in their place."""
    return {
        "output_dir": options["directory"],
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": options["micro_batches"] // options["replicas"],
        "max_steps": options["steps"],
        "learning_rate": 3e-4,
        "weight_decay": 0.1,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": options.get("bf16", False),
        "use_cpu": not torch.cuda.is_available(),
        **options["more"],
    }


class Tokens(Dataset):
    """Made-up rows.

    count:      of rows.
    sequence:   tokens of a row.
    vocabulary: of how many.
    """

    def __init__(self, count, sequence, vocabulary):
        self.count = count
        self.sequence = sequence
        self.vocabulary = vocabulary

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocabulary, (self.sequence,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Stopwatch(TrainerCallback):
    """Prints a line at the end of training: seconds of each step but the first, losses, and the
    largest resident set of the first rank in MiB.
    """

    def __init__(self):
        self.ends = []
        self.losses = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs, **kwargs):
        self.losses += [float(logs["loss"])] if "loss" in logs else []

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            seconds = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            found = {"seconds": seconds, "losses": self.losses, "peak_mib": peak}
            print(f"\n{MEASURED}{json.dumps(found)}", flush=True)

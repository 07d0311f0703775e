"""A script that knows only HuggingFace: it trains a mixture of experts on made-up tokens, and says how long its
steps took.

    torchrun --nproc-per-node 2 benchmarks/trainers/experts_script.py '{"model": "DIRECTORY"}'

``experts.py`` runs it as it is, with `DistributedConfig` of transformers, and with the two lines changed that end in
"# 1" and "# 2".
"""

import json
import resource
import sys
import time

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from transformers.distributed import DistributedConfig

from transformers import Trainer, TrainingArguments  # 1  # isort: skip

options = {
    "model": "mixture",
    "steps": 5,
    "sequence": 256,
    "micro_batches": 8,
    "replicas": 1,
    "directory": "experts",
    "distributed": {},
    "more": {},
}
options |= json.loads(sys.argv[1])


class Tokens(Dataset):
    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def __len__(self):
        return options["steps"] * options["micro_batches"]

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self.vocabulary, (options["sequence"],), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class Stopwatch(TrainerCallback):
    ends, losses = [], []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs, **kwargs):
        self.losses += [float(logs["loss"])] if "loss" in logs else []

    def on_train_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            seconds = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            found = {"seconds": seconds, "losses": self.losses, "peak_mib": peak}
            print("\nmeasured " + json.dumps(found), flush=True)


set_seed(1)
settings = {
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
    "use_cpu": not torch.cuda.is_available(),
    **options["more"],
}
arguments = TrainingArguments(**settings)  # 2
shared = (
    {"distributed_config": DistributedConfig(**options["distributed"])}
    if options["distributed"]
    else {}
)
model = AutoModelForCausalLM.from_pretrained(options["model"], **shared)
tokens = Tokens(model.config.vocab_size)
Trainer(model, arguments, train_dataset=tokens, callbacks=[Stopwatch]).train()

"""A script that knows only HuggingFace: it trains a mixture of experts on made-up tokens, and says how long its
steps took.

    torchrun --nproc-per-node 2 benchmarks/trainers/experts_script.py '{"model": "DIRECTORY"}'

``experts.py`` runs it as it is, with `DistributedConfig` of transformers, and with the two lines changed that end in
"# 1" and "# 2".
"""

import json
import sys
import time

from transformers import AutoModelForCausalLM, set_seed
from transformers.distributed import DistributedConfig

from measuring import Stopwatch, Tokens, settings_of  # isort: skip
from transformers import Trainer, TrainingArguments  # 1  # isort: skip

options = {
    "model": "mixture",
    "steps": 5,
    "sequence": 256,
    "micro_batches": 8,
    "replicas": 1,
    "directory": "experts",
    "distributed": {},
    "degrees": {},
    "more": {},
}
options |= json.loads(sys.argv[1])

set_seed(1)
arguments = TrainingArguments(**settings_of(options))  # 2
shared = (
    {"distributed_config": DistributedConfig(**options["distributed"])}
    if options["distributed"]
    else {}
)
model = AutoModelForCausalLM.from_pretrained(options["model"], **shared)
rows = options["steps"] * options["micro_batches"]
tokens = Tokens(rows, options["sequence"], model.config.vocab_size)
Trainer(model, arguments, train_dataset=tokens, callbacks=[Stopwatch]).train()
# A thread of gloo that still has tensors to release when Python ends would abort the process.
time.sleep(0.5)

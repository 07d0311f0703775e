"""A script that knows only HuggingFace: it trains a Llama on made-up tokens, and says how long its
steps took.

    python benchmarks/trainers/two_lines_script.py '{"steps": 5}'

``two_lines.py`` runs it as it is, and with the two lines changed that end in "# 1" and "# 2".
"""

import json
import sys

from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from measuring import Stopwatch, Tokens, settings_of  # isort: skip
from transformers import Trainer, TrainingArguments  # 1  # isort: skip

options = {
    "steps": 5,
    "sequence": 256,
    "micro_batches": 8,
    "replicas": 1,
    "bf16": False,
    "directory": "two_lines",
}
options |= {"vocabulary": 32000, "hidden": 512, "layers": 8, "mlp": 1376, "degrees": {}, "more": {}}
options |= json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}

set_seed(1)
config = LlamaConfig(
    vocab_size=options["vocabulary"], hidden_size=options["hidden"], num_hidden_layers=options["layers"],
    intermediate_size=options["mlp"], num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048,
)  # fmt: skip
arguments = TrainingArguments(**settings_of(options))  # 2
tokens = Tokens(options["steps"] * options["micro_batches"], options["sequence"], config.vocab_size)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=tokens, callbacks=[Stopwatch]).train()

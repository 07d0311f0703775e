"""A case of TRL's on the ranks that torchrun starts, under TRL alone: its log and its weights.

torchrun --nproc-per-node 2 -m tests.trl_trainers.on_ranks NAME DIRECTORY      writes DIRECTORY/history.json as well
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.trl_trainers.cases import history, train

if __name__ == "__main__":
    name, directory = sys.argv[1:]
    trainer = train(name, directory, per_device_train_batch_size=2)
    trainer.save_model()
    if dist.get_rank() == 0:
        Path(directory, "history.json").write_text(json.dumps(history(trainer)))
    dist.destroy_process_group()

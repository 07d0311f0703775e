"""A training script as PyTorch's pages write it: torchrun, DistributedDataParallel,
torch.distributed.checkpoint.

It saves after every second step and continues from its newest checkpoint: the last one whose step
is in `latest`.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(
        0, 60, (2, 17), generator=torch.Generator().manual_seed(1000 * step + rank)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=1800.0)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    rank = dist.get_rank()
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(60, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 60))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    first = 1
    latest = options.directory / "latest"
    if latest.exists():
        done = int(latest.read_text())
        weights, state = get_state_dict(replica, optimizer)
        whole = {"model": weights, "optimizer": state}
        dcp.load(whole, checkpoint_id=options.directory / f"step-{done}")
        set_state_dict(
            replica, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"]
        )
        first = done + 1
    for step in range(first, options.steps + 1):
        tokens = batch(step, rank)
        loss = nn.functional.cross_entropy(
            replica(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.9f}", flush=True)
        if step % 2 == 0:
            weights, state = get_state_dict(replica, optimizer)
            dcp.save(
                {"model": weights, "optimizer": state},
                checkpoint_id=options.directory / f"step-{step}",
            )
            if rank == 0:
                latest.write_text(str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

"""Training states to save in tests: a small fused, padded and transposed model under any
tensor-parallel size.
"""

import torch

from megatron_merak.checkpoint.store import Shard
from megatron_merak.plan import TensorSharding

VOCABULARY, HIDDEN = 45, 8


def shardings(tp: int) -> list[TensorSharding]:
    padded = -(-VOCABULARY // (16 * tp)) * 16 * tp
    return [
        TensorSharding("wte.weight", (VOCABULARY, HIDDEN), 0, padded=padded),
        TensorSharding("h.0.ln_1.weight", (HIDDEN,)),
        TensorSharding("h.0.attn.c_attn.weight", (HIDDEN, 3 * HIDDEN), 1, blocks=3),
        TensorSharding("h.0.mlp.c_proj.weight", (4 * HIDDEN, HIDDEN), 0),
        TensorSharding("h.0.scale", ()),
    ]


def full(name: str, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Values that depend on the name and the position alone; whole numbers, exact in bfloat16."""
    offset = sum(map(ord, name)) + salt
    return ((torch.arange(torch.Size(shape).numel()) * 7 + offset) % 251).to(dtype).reshape(shape)


def cut(tensor: torch.Tensor, dim: int | None, intervals: tuple) -> torch.Tensor:
    return (
        tensor
        if dim is None
        else torch.cat([tensor.narrow(dim, a, b - a) for a, b in intervals], dim)
    )


def state(
    tp_rank: int, tp: int, salt: int | None, kinds=("model", "exp_avg"), dtype=torch.float32
) -> dict:
    """One rank's shards; ``salt`` None gives tensors full of -1, to load into. Two-dimensional ones
    are transposed.
    """
    shards: dict[str, list[Shard]] = {}
    for kind in kinds:
        shards[kind] = []
        for sharding in shardings(tp):
            intervals = sharding.intervals(tp_rank, tp)
            if salt is None:
                tensor = torch.full(sharding.local_shape(tp_rank, tp), -1, dtype=dtype)
            else:
                values = full(kind + sharding.name, sharding.shape, dtype, salt)
                tensor = cut(values, sharding.dim, intervals)
            if tensor.dim() == 2:
                tensor = tensor.t().contiguous().t()
            owner = sharding.dim is not None or tp_rank == 0
            shards[kind].append(
                Shard(sharding.name, sharding.shape, sharding.dim, intervals, tensor, owner)
            )
    return shards


def same(shards: dict, others: dict) -> bool:
    assert list(shards) == list(others)
    pairs = [pair for kind in shards for pair in zip(shards[kind], others[kind], strict=True)]
    return all(torch.equal(one.tensor, other.tensor) for one, other in pairs)

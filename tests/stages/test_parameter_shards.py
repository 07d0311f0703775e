"""What ranks store of tensors: their shards tile every tensor exactly once, and padding is behind
them.
"""

from dataclasses import replace
from math import prod

import pytest
import torch

from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid, TensorSharding
from megatron_merak.stages.parameter_shards import StoredParameter
from tests.models.families import FAMILIES, blueprint_of
from tests.parity.rig import part_of


def shard_of(tensor, storage, rank, tp):
    """A rank's shard of a tensor, as a view of its storage."""
    mesh = Mesh(Grid(tp=tp), rank, torch.device("cpu"))
    return StoredParameter(tensor, storage, rank == 0, storage).shard(mesh, storage)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_shards_tile_every_tensor(name, tp):
    shape = replace(FAMILIES[name], num_query_groups=4) if name != "gpt2" else FAMILIES[name]
    padded = 0
    for tensor in blueprint_of(shape, tp).plan.shardings:
        held = torch.zeros(tensor.shape)
        for rank in range(tp):
            storage = torch.zeros(tensor.stored_shape(tp))
            shard = shard_of(tensor, storage, rank, tp)
            assert tuple(shard.tensor.shape) == tensor.local_shape(rank, tp)
            assert shard.tensor.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
            for start, stop in shard.intervals or [(0, tensor.shape[0])]:
                held.narrow(tensor.dim or 0, start, stop - start).add_(1)
            shard.tensor.add_(1)
            own = prod(shard.tensor.shape)
            assert (storage.flatten()[:own] == 1).all(), "padding is not at the end"
            assert storage.flatten()[own:].count_nonzero() == 0
            assert tensor.padded or own == storage.numel()
            padded += storage.numel() - own
        copies = tp if tensor.dim is None else 1
        assert (held == copies).all(), tensor.name
    tables = 1 + shape.untie_embeddings_and_output_weights
    assert padded == tables * shape.hidden_size * (shape.padded_vocab_size(tp) - shape.vocab_size)


def test_fused_blocks():
    """q, k and v of GPT-2 lie in one tensor, [in, 3 out]: by hand, rank 1 of 2."""
    fused = TensorSharding("c_attn", (2, 12), 1, blocks=3)
    full = torch.arange(24).view(2, 12)
    storage = torch.zeros(2, 6, dtype=full.dtype)
    shard = shard_of(fused, storage, 1, 2)
    shard.tensor.copy_(part_of(full, shard))
    columns = [2, 3, 6, 7, 10, 11]
    assert storage.tolist() == [columns, [12 + column for column in columns]]


def test_padding_rows_are_in_no_shard():
    """A vocabulary of 5 padded to 8 over 4 ranks: 2, 2, 1 and 0 real rows."""
    table = TensorSharding("wte", (5, 3), 0, padded=8)
    assert table.stored_shape(4) == (2, 3)
    shards = [shard_of(table, torch.zeros(2, 3), rank, 4) for rank in range(4)]
    assert [tuple(shard.tensor.shape) for shard in shards] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert [shard.intervals for shard in shards] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]

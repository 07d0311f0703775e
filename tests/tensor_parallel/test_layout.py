"""Layouts: the pieces of all ranks tile every parameter and every HuggingFace tensor
exactly once.
"""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest
import torch

from megatron_merak.models.gpt import build_unit
from megatron_merak.models.layers import Placement
from megatron_merak.plan import TensorSharding
from megatron_merak.stages.init_native import take
from megatron_merak.tensor_parallel.layout import Init, ParameterLayout, Piece
from tests.models.families import FAMILIES

ZEROS = Init("zeros")


class Rank:
    """Stands for a process group where only size and place are asked for."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def units_of(config, rank, tp):
    place = Placement(Rank(rank, tp) if tp > 1 else None, "edge")
    return [build_unit(index, config, place) for index in range(config.num_layers + 2)]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_tile_parameters_and_tensors(name, tp):
    config = replace(FAMILIES[name], num_query_groups=4) if name != "gpt2" else FAMILIES[name]
    held: dict[str, torch.Tensor] = {}
    for rank in range(tp):
        for unit in units_of(config, rank, tp):
            for local, parameter in unit.named_parameters():
                touched, views = torch.zeros_like(parameter), unit.layouts[local].views
                for (piece, view), (_, mark) in zip(
                    views(parameter.detach(), rank, tp), views(touched, rank, tp), strict=True
                ):
                    mark += 1
                    sharding = piece.sharding
                    assert tuple(view.shape) == sharding.local_shape(rank, tp)
                    assert (
                        view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
                    )
                    count = held.setdefault(sharding.name, torch.zeros(sharding.shape))
                    for start, stop in sharding.intervals(rank, tp) or [(0, sharding.shape[0])]:
                        count.narrow(sharding.dim or 0, start, stop - start).add_(1)
                held_here = sum(
                    prod(piece.sharding.local_shape(rank, tp))
                    for piece in unit.layouts[local].pieces
                )
                assert (touched.flatten()[:held_here] == 1).all()
                assert touched.flatten()[held_here:].count_nonzero() == 0, (
                    "padding is not at the end"
                )
    pieces = [
        p
        for unit in units_of(config, 0, tp)
        for layout in unit.layouts.values()
        for p in layout.pieces
    ]
    uses = Counter(piece.sharding.name for piece in pieces)
    for piece in pieces:
        copies = (tp if piece.sharding.dim is None else 1) * uses[piece.sharding.name]
        assert (held[piece.sharding.name] == copies).all(), piece.sharding.name


def test_fused_blocks_and_rows_of_two_tensors():
    """q, k, v of GPT-2 lie in one tensor, [in, 3 out]; gate and up of Llama are two tensors: by
    hand, rank 1 of 2.
    """
    fused = Piece(TensorSharding("c_attn", (2, 12), 1, blocks=3), ZEROS, transposed=True)
    full = torch.arange(24).view(2, 12)
    parameter = torch.zeros(6, 2, dtype=full.dtype)
    ((_, view),) = ParameterLayout((fused,)).views(parameter, 1, 2)
    view.copy_(take(full, fused, 1, 2))
    assert parameter.tolist() == [[c, 12 + c] for c in (2, 3, 6, 7, 10, 11)]
    gate, up = (Piece(TensorSharding(name, (4, 3), 0), ZEROS) for name in ("gate", "up"))
    parameter = torch.zeros(4, 3)
    for (piece, view), value in zip(
        ParameterLayout((gate, up)).views(parameter, 1, 2), (1.0, 2.0), strict=True
    ):
        assert piece.sharding.intervals(1, 2) == ((2, 4),)
        view.fill_(value)
    assert parameter[:, 0].tolist() == [1, 1, 2, 2]


def test_padding_rows_are_in_no_piece():
    """A vocabulary of 5 padded to 8 over 4 ranks: 2, 2, 1 and 0 real rows."""
    piece = Piece(TensorSharding("wte", (5, 3), 0, padded=8), ZEROS)
    views = [
        next(ParameterLayout((piece,)).views(torch.zeros(2, 3), rank, 4))[1] for rank in range(4)
    ]
    assert [tuple(view.shape) for view in views] == [(2, 3), (2, 3), (1, 3), (0, 3)]

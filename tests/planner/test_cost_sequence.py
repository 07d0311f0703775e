"""What units of a model keep and send whose tensor-parallel ranks divide the sequence, against what
they really do.
"""

from dataclasses import replace

import pytest
import torch

from megatron_merak.cluster import find_cluster
from megatron_merak.models.gpt import GPTPrelude, build_unit
from megatron_merak.models.layers import Placement
from megatron_merak.plan import Grid
from megatron_merak.planner.cost import gpt_units, unit_costs
from megatron_merak.segment import Collective
from tests.models.families import FAMILIES, LENGTH, batch

SAMPLES = 2


class Rank:
    """Stands for a process group of which this is the second rank; nothing is sent."""

    def __init__(self, size):
        self._size = size

    def rank(self):
        return 1

    def size(self):
        return self._size


def collective(kind, tensor, size):
    """What a collective leaves on a rank if all ranks have the same: a tensor of the right shape
    and of its own.
    """
    if kind is Collective.ALL_GATHER:
        return torch.cat([tensor] * size, 1)
    if kind is Collective.STACK:
        return torch.stack([tensor] * size)
    return tensor.chunk(size, 1)[1].clone() if kind is Collective.REDUCE_SCATTER else tensor.clone()


def kept(unit, size):
    """Bytes of the storages that the unit's forward saves, besides its input, its parameters and
    the batch, with a part for what is gathered again; the bytes of its output, and of what it
    sends, both ways, as the ring sends it."""
    common = GPTPrelude(unit.config, torch.device("cpu"))(batch(SAMPLES))
    border = unit.border_shape(SAMPLES, LENGTH)
    values = {unit.source: torch.randn(border, requires_grad=True)}
    known = [values[unit.source], *unit.parameters(), *common.values()]
    outside, saved = {tensor.untyped_storage().data_ptr() for tensor in known}, {}
    hidden = SAMPLES * LENGTH * unit.config.hidden_size * 4
    # of an all-reduce of the hidden state
    shares = dict(zip(Collective, (0, 1, 0.5, 0.5), strict=False))
    sent, parts, again = [0.0, 0.0], {}, 0

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for segment in unit.segments():
            results = segment.fn(common, *[values[source.value] for source in segment.ins])
            sent[1] += sum(shares[source.collective] * hidden for source in segment.ins)
            for source in (source for source in segment.ins if source.regather):
                outside.add(values[source.value].untyped_storage().data_ptr())
                again += parts[source.value].untyped_storage().nbytes()
                sent[1] += shares[Collective.ALL_GATHER] * hidden
            for out, result in zip(segment.outs, results, strict=True):
                if result.dim() == 3 and result.shape[-1] == unit.config.hidden_size:
                    sent[0] += shares[out.collective] * hidden
                parts[out.value] = result = result.detach()
                values[out.value] = (
                    collective(out.collective, result, size).requires_grad_()
                    if out.collective
                    else result
                )
                values[out.value].requires_grad_()
    total = sum(storage.nbytes() for address, storage in saved.items() if address not in outside)
    return total + again, values.get(unit.target), tuple(sent)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "dropout"), [("gpt2", 0.1), ("gpt2", 0.0), ("llama", 0.0), ("qwen3", 0.0)]
)
def test_units_keep_and_send_what_is_planned(name, dropout, size, divided):
    model = replace(
        FAMILIES[name], hidden_dropout=dropout, attention_dropout=0.0, num_query_groups=4
    )
    model = replace(model, num_query_groups=1) if name == "gpt2" else model
    planned = gpt_units(model, SAMPLES, 4, size, fused_dropout=False, sequence_parallel=divided)
    for index in (0, 1, model.num_layers + 1):
        unit = build_unit(
            index, model, Placement(Rank(size), "edge", sequence_parallel=divided)
        ).train()
        saved, output, sent = kept(unit, size)
        assert planned[index].saved_bytes == saved, unit.name
        assert planned[index].reduced_bytes == sent, unit.name
        if output is not None:
            assert planned[index].output_bytes == output.numel() * 4


@pytest.mark.parametrize("size", [1, 2])
def test_a_head_that_computes_in_chunks_keeps_no_logits(size):
    model = replace(FAMILIES["llama"], cross_entropy_chunk_size=5)
    planned = gpt_units(model, SAMPLES, 4, size, fused_dropout=False)[-1]
    place = Placement(Rank(size), "edge") if size > 1 else Placement()
    saved, _, _ = kept(build_unit(model.num_layers + 1, model, place).train(), size)
    assert planned.saved_bytes == saved and planned.weight_bytes == 0


def test_dividing_the_sequence_costs_the_links_an_all_reduce_more_in_a_layer():
    """Two all-gathers of the backward."""
    model, cluster = FAMILIES["llama"], find_cluster("A100")
    plain, divided = (
        unit_costs(
            gpt_units(model, 1, 4, 2, sequence_parallel=parts), cluster, "float32", Grid(tp=2)
        )
        for parts in (False, True)
    )
    for more, less in zip(divided[1:-1], plain[1:-1], strict=True):
        assert more.reduces == pytest.approx((less.reduces[0], 1.5 * less.reduces[1]))

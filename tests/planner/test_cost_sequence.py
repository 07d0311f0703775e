"""What units of a model keep and send whose tensor-parallel ranks divide weights, or the sequence
too, against what they really do.
"""

from dataclasses import replace

import pytest

from megatron_merak.cluster import find_cluster
from megatron_merak.plan import Grid
from megatron_merak.planner.cost import gpt_units, unit_costs
from tests.models.families import FAMILIES
from tests.planner.kept import SAMPLES, gpt, kept_by


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "dropout"),
    [("gpt2", 0.1), ("gpt2", 0.0), ("llama", 0.0), ("llama", 0.1), ("qwen3", 0.0)],
)
def test_units_keep_and_send_what_is_planned(name, dropout, size, divided):
    model = replace(FAMILIES[name], hidden_dropout=dropout, attention_dropout=0.0)
    if model.group_query_attention:
        model = replace(model, num_query_groups=4)
    planned = gpt_units(model, SAMPLES, 4, size, fused_dropout=False, sequence_parallel=divided)
    found = kept_by(gpt(model, size, sequence_parallel=divided))
    for ours, theirs in zip(planned, found, strict=True):
        assert ours.saved_bytes == theirs.saved, ours.name
        assert ours.reduced_bytes == tuple(theirs.sent), ours.name
        assert ours.output_bytes == theirs.leaves, ours.name


@pytest.mark.parametrize(("size", "divided"), [(1, False), (2, False), (2, True)])
def test_a_head_that_computes_in_chunks_keeps_no_logits(size, divided):
    model = replace(FAMILIES["llama"], cross_entropy_chunk_size=5)
    planned = gpt_units(model, SAMPLES, 4, size, fused_dropout=False, sequence_parallel=divided)[-1]
    found = kept_by(gpt(model, size, sequence_parallel=divided))[-1]
    assert planned.saved_bytes == found.saved and planned.weight_bytes == 0
    assert planned.reduced_bytes == tuple(found.sent)


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

"""Tracing at half the cost gives the same graph."""

from unittest import mock

import pytest
import torch
from torch.fx import symbolic_trace
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from megatron_merak.graph.capture import capture as capturing
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.capture.fast_trace import fast_tracing

SIZES = {
    "llama": {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    "t5": {"num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 4, "decoder_start_token_id": 0},
}


def tiny(kind: str) -> torch.nn.Module:
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    sizes = (
        {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
        if kind != "t5"
        else {"vocab_size": 128}
    )
    with init_empty_weights():
        return auto.from_config(AutoConfig.for_model(kind, **sizes, **SIZES[kind]))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_the_graph_is_the_same(kind):
    model, ids = tiny(kind), torch.zeros(2, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    quick = capturing.capture(model, batch)
    with mock.patch.object(capturing, "fast_tracing", mock.MagicMock()):
        slow = capturing.capture(model, batch)
    assert quick.module.graph.python_code("self").src == slow.module.graph.python_code("self").src
    for one, other in zip(quick.module.graph.nodes, slow.module.graph.nodes, strict=True):
        assert ("stack_trace" in one.meta) == ("stack_trace" in other.meta)
        assert one.meta.get("nn_module_stack") == other.meta.get("nn_module_stack")


def test_a_node_names_the_line_of_the_model_and_not_of_torch():
    ids = torch.zeros(2, 8, dtype=torch.long)
    graph = capturing.capture(tiny("llama"), {"input_ids": ids, "labels": ids}).module.graph
    (lookup,) = graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert (
        lookup.meta["stack_trace"].splitlines()[-1].strip().endswith("self.embed_tokens(input_ids)")
    )
    products = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert "query_states = self.q_proj(hidden_states)" in products[0].meta["stack_trace"]


def test_a_module_made_meanwhile_runs():
    with fast_tracing():
        double = symbolic_trace(lambda x: x + x)
        assert double(2) == 4
        late = symbolic_trace(lambda x: x * 3)
    assert late(2) == 6 and "mul" in late.code
    assert "add" in symbolic_trace(lambda x: x + 1).code

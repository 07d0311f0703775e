"""Chains of units: natural, stable, and exactly the model that was captured."""

from functools import cache
from itertools import pairwise
from time import process_time

import pytest
import torch
from torch import nn
from torch.fx import map_arg

from megatron_merak.errors import PlanError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.ir.aliases import aliased, mutation_deps, storages
from megatron_merak.graph.ir.nodes import is_op, op_name
from megatron_merak.graph.partition.cut import ALGORITHMS, align, cut
from megatron_merak.graph.partition.loads import unit_loads
from megatron_merak.planner.partition import partition
from tests.graph.tiny import gradients, randomise, tiny

FAMILIES = "llama gpt2 bloom gemma2 t5 bert vit whisper mixtral bart gpt_oss clip phi3".split()
DTYPES = {"bloom": torch.float64}  # its own gelu takes its gradient by another formula: rounding must not matter


@cache
def captured_family(name, training=True, **sizes):
    _, empty, batch = tiny(name, **sizes)
    return capture(empty(), batch, training=training, dtype=DTYPES.get(name))


def run_stages(captured, chain, bounds, parameters, batch):
    """The outputs, computed stage by stage: each sees the values that cross into it and what the batch gives."""
    graph, kinds, after = captured.module.graph, chain.kinds, mutation_deps(captured.module.graph)
    values = {}
    for first, last in pairwise(bounds):
        mine = {node for unit in chain.units[first:last] for node in unit}
        needed, waiting = set(mine), list(mine)
        while waiting:
            for above in [*(node := waiting.pop()).all_input_nodes, *after.get(node, ())]:
                if above not in needed and kinds[above] not in ("main", "side"):
                    needed.add(above)
                    waiting.append(above)
        values = {node: values[node] for node in (chain.crossing[first - 1] if first else ())}
        for node in graph.nodes:
            if node in needed:
                values[node] = evaluate(node, captured, parameters, batch, values)
    return map_arg(graph.output_node().args[0], values.__getitem__)


def evaluate(node, captured, parameters, batch, values):
    if node.op == "placeholder":
        return batch[node.target]
    if node.op == "get_attr":
        return parameters[node.target] if node.target in captured.shapes else attribute(captured.module, node.target)
    return node.target(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))


def attribute(module, name):
    for part in name.split("."):
        module = getattr(module, part)
    return module


def stages(chain, count):
    return partition([3 * load.flops + 1 for load in unit_loads(chain)], min(count, len(chain.units)))


def check_chain(captured, chain):
    """What is promised of every chain."""
    graph, kinds = captured.module.graph, chain.kinds
    line = [node for node in graph.nodes if kinds[node] in ("main", "side")]
    assert [node for unit in chain.units for node in unit] == line and all(chain.units)
    assert len(set(chain.names)) == len(chain.names) == len(chain.units) == len(chain.parameters)
    where = {node: k for k, unit in enumerate(chain.units) for node in unit}
    outputs = graph.output_node().all_input_nodes
    for k, crossing in enumerate(chain.crossing):
        read_later = {
            node for node in line if where[node] <= k and any(where.get(user, len(where)) > k for user in node.users)
        }
        assert list(crossing) == [node for node in line if node in read_later]
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in crossing)
    assert all(node in chain.units[-1] or node in chain.crossing[-1] for node in outputs if node in where)
    root = storages(graph)
    for writer in line:
        for node in line if aliased(writer)[1] else ():
            if root[node] is root[writer] and line.index(node) < line.index(writer):
                assert where[node] == where[writer]


@pytest.mark.parametrize("name", FAMILIES)
def test_chained_units_are_the_model(name):
    real, _, batch = tiny(name)
    captured = captured_family(name)
    model = randomise(real()).to(DTYPES.get(name))
    loss, grads = gradients(model, batch)
    parameters = dict(model.named_parameters())
    for algorithm in ALGORITHMS:
        chain = cut(captured, algorithm)
        check_chain(captured, chain)
        for count in (2, 3, len(chain.units)):
            model.zero_grad(set_to_none=True)
            (found,) = run_stages(captured, chain, stages(chain, count), parameters, batch)
            found.backward()
            assert torch.equal(found, loss)
            for key, grad in grads.items():
                error = (parameters[key].grad - grad).abs().max()
                assert error <= (1e-11 * grad.abs().max() if name == "bloom" else 0), (algorithm, count, key)


def crossings(chain):
    """How many main values each cut sends."""
    return [sum(chain.kinds[node] == "main" for node in crossing) for crossing in chain.crossing]


def test_two_units_per_decoder_layer():
    captured = captured_family("llama")
    chain = cut(captured)
    layers = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp")]
    assert chain.names == ("model.embed_tokens", *layers, "lm_head")
    assert crossings(chain) == [1] * 5
    assert chain.parameters[0] == ("model.embed_tokens.weight",)
    assert chain.parameters[2] == (
        "model.layers.0.post_attention_layernorm.weight",
        *(f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    )
    assert chain.parameters[-1] == ("model.norm.weight", "lm_head.weight")


NAMES = {
    "gpt2": "transformer.wte+wpe transformer.h.0.attn transformer.h.0.mlp transformer.h.1.attn transformer.h.1.mlp "
    "lm_head",
    "gptj": "transformer.wte transformer.h.0 transformer.h.1 lm_head",
    "gpt_neox": "gpt_neox.embed_in gpt_neox.layers.0 gpt_neox.layers.1 lm_head",
    "mixtral": "model.embed_tokens model.layers.0.self_attn model.layers.0.mlp model.layers.1.self_attn "
    "model.layers.1.mlp lm_head",
    "vit": "vit.embeddings.patch_embeddings.projection vit.layers.0.attention vit.layers.0.mlp vit.layers.1.attention "
    "vit.layers.1.mlp classifier",
    "bert": "bert.embeddings bert.encoder.layer.0.attention bert.encoder.layer.0.intermediate+output "
    "bert.encoder.layer.1.attention bert.encoder.layer.1.intermediate+output cls.predictions.transform.dense "
    "cls.predictions.decoder",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_one_value_crosses_between_layers(name):
    captured = captured_family(name)
    chain = cut(captured)
    assert chain.names == tuple(NAMES[name].split())
    assert crossings(chain) == [1] * (len(chain.units) - 1)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_decoders_of_encoders_send_two_values(name):
    """Each decoder layer sends the encoder's output beside its own, until the last that reads it; what T5's position
    biases share is computed once and crosses too."""
    captured = captured_family(name)
    chain = cut(captured)
    begin = len(chain.units) - 7
    assert crossings(chain) == [1] * begin + [2, 2, 2, 2, 1, 1]
    sides = [sum(chain.kinds[node] == "side" for node in crossing) for crossing in chain.crossing]
    assert sides == ([0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0] if name == "t5" else [0] * len(sides))


def imbalance(chain, count):
    """The costliest of ``count`` stages over their mean."""
    flops, bounds = [3 * load.flops + 1 for load in unit_loads(chain)], stages(chain, count)
    return max(sum(flops[a:b]) for a, b in pairwise(bounds)) * count / sum(flops)


@pytest.mark.parametrize(("name", "cuts"), [("llama", (5, 4)), ("mixtral", (5, 2)), ("t5", (11, 4))])
def test_both_algorithms(name, cuts):
    """The paper's never cuts more often; with fewer cuts the balance is no better."""
    chains = [cut(captured_family(name), algorithm) for algorithm in ALGORITHMS]
    assert tuple(len(chain.crossing) for chain in chains) == cuts
    assert all(imbalance(chains[0], count) <= imbalance(chains[1], count) for count in (2, 3))


def test_farthest_dependency_merges_what_reaches_back():
    """Pieces of llama end behind the first node after which nothing else is read: the residual sums."""
    chain = cut(captured_family("llama"), "farthest-dependency")
    assert [op_name(crossing[0]) for crossing in chain.crossing] == ["add"] * 4
    assert crossings(chain) == [1] * 4 and chain.names[-1] == "lm_head"


def test_values_with_many_users_are_handed_on():
    """Of an encoder's output that two decoder layers read the paper's rule makes one piece; four layers make it
    common, so that it crosses from piece to piece."""
    captures = captured_family("bart"), captured_family("bart", decoder_layers=4)
    few, many = (cut(captured, "farthest-dependency") for captured in captures)
    assert max(crossings(few)) == 1 and max(crossings(many)) == 2
    assert len(many.units) - len(few.units) > 2


def test_the_limit_of_crossing_values():
    captured = captured_family("t5")
    assert max(crossings(cut(captured, max_crossing=1))) == 1
    assert cut(captured, max_crossing=0).units == (sum(cut(captured).units, ()),)


@pytest.mark.parametrize("name", ["llama", "t5", "clip"])
def test_chains_of_one_model_correspond(name):
    """Captures of other batches, and of evaluation, have the same units, cut the same way by themselves or aligned."""
    captured = captured_family(name)
    references = [cut(captured, algorithm) for algorithm in ALGORITHMS]
    others = [captured_family(name, batch=3, length=24), captured_family(name, training=False)]
    for other in others:
        chain = cut(other)
        assert chain.names == references[0].names and chain.parameters == references[0].parameters
        for reference in references:
            aligned = align(chain, reference)
            check_chain(other, aligned)
            assert aligned.names == reference.names and aligned.parameters == reference.parameters


def test_dropout_moves_no_border():
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    training, evaluation = (cut(captured_family("bert", mode, **dropout)) for mode in (True, False))
    assert align(evaluation, training).parameters == training.parameters == evaluation.parameters


def test_a_loop_over_the_batch_moves_no_border():
    class Model(Loss):
        def body(self, x):
            x = self.parts[0](x).relu()
            x = torch.cat([self.parts[2](self.parts[1](row).relu()) for row in x.split(1)]).relu()
            return self.parts[3](x)

    model = Model(*(nn.Linear(8, 8) for _ in range(4)))
    one, other = (capture(model, {"x": torch.randn(n, 8), "y": torch.randn(n, 8)}) for n in (6, 4))
    chain, aligned = cut(one), align(cut(other), cut(one))
    check_chain(other, aligned)
    assert len(chain.units) == 3 and chain.names == aligned.names and chain.parameters == aligned.parameters


def test_evaluation_hands_out_logits():
    _, empty, batch = tiny("t5")
    captured = capture(empty(), batch, training=False, outputs=("loss", "logits"))
    for algorithm in ALGORITHMS:
        aligned = align(cut(captured), cut(captured_family("t5"), algorithm))
        check_chain(captured, aligned)
        assert all(node in aligned.units[-1] for node in captured.module.graph.output_node().all_input_nodes)


def test_repeated_layers_are_told_apart_by_their_order():
    class Model(Loss):
        def body(self, x):
            for _ in range(4):
                x = self.parts[0](x).relu()
            return self.parts[1](x)

    model = Model(nn.Linear(8, 8), nn.Linear(8, 8))
    one, other = (cut(capture(model, {"x": torch.randn(n, 8), "y": torch.randn(n, 8)})) for n in (6, 4))
    assert align(other, one).names == ("parts.0#1", "parts.0#2", "parts.0#3", "parts.0#4", "parts.1")
    assert [op_name(unit[0]) for unit in align(other, one).units] == ["linear"] * 5


def test_evaluation_may_do_without_a_parameter_but_not_add_one():
    class Model(Loss):
        def body(self, x):
            x = self.parts[1](self.parts[0](x).relu())
            return self.parts[2](x + self.parts[3].bias if self.training else x)

    model, batch = Model(*(nn.Linear(8, 8) for _ in range(4))), {"x": torch.randn(6, 8), "y": torch.randn(6, 8)}
    training, evaluation = (cut(capture(model, batch, training=mode)) for mode in (True, False))
    assert align(evaluation, training).names == training.names == ("parts.0", "parts.1", "parts.2")
    with pytest.raises(PlanError, match="parts.3.bias"):
        align(training, evaluation)


def test_a_capture_may_do_without_units_but_not_have_others():
    """As one of evaluation without a teacher that only training asks."""
    two, three = (cut(captured_family("gpt2", num_hidden_layers=count)) for count in (2, 3))
    aligned = align(two, three)
    empty = [name for name, unit in zip(aligned.names, aligned.units, strict=True) if not unit]
    assert aligned.names == three.names and empty == [name for name in three.names if ".2." in name]
    with pytest.raises(PlanError, match="does not fit it"):
        align(three, two)


def test_unknown_algorithm():
    with pytest.raises(PlanError, match="graph sharding farthest: the algorithms are cut and farthest-dependency"):
        cut(captured_family("gpt2"), "farthest")


def test_loads():
    captured = captured_family("gpt2")
    loads = unit_loads(cut(captured))
    tokens, hidden, vocabulary, heads = 2 * 16, 32, 96, 1
    attention = 2 * tokens * hidden * 4 * hidden + 2 * tokens * 16 * hidden * heads  # causal: half of the scores
    mlp = 2 * tokens * hidden * 2 * 4 * hidden
    assert [load.flops for load in loads] == [0, attention, mlp, attention, mlp, 2 * tokens * hidden * vocabulary]
    assert [load.output_bytes for load in loads] == [4 * tokens * hidden] * 5 + [4]
    assert loads[0].parameters == ("transformer.wte.weight", "transformer.wpe.weight")
    assert loads[-1].shared == ("transformer.wte.weight",)
    names = [name for load in loads for name in load.parameters]
    assert sorted(names) == sorted(captured.shapes)


class Loss(nn.Module):
    """``body`` and a mean squared error."""

    def __init__(self, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x, y):
        return ((self.body(x) - y) ** 2).mean()


def check_plain(model, algorithm="cut", max_crossing=2, take=capture):
    """The chain of a small module of one's own, checked and run against the module."""
    torch.manual_seed(3)
    batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 8)}
    captured = take(model, batch)
    chain = cut(captured, algorithm, max_crossing)
    check_chain(captured, chain)
    (found,) = run_stages(captured, chain, range(len(chain.units) + 1), dict(model.named_parameters()), batch)
    assert torch.equal(found, model(**batch))
    return chain


def with_writes(model, batch):
    """A capture as the exporter leaves it: whatever works in place still does."""
    module = torch.export.export(model, (), batch, strict=False).module(check_guards=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Captured(module, ("loss",), shapes, {}, frozenset(shapes), {}, (), "")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_storage_stays_with_those_that_write_to_it(algorithm):
    class Model(Loss):
        def body(self, x):
            buffer = torch.zeros(6, 8)
            buffer[:3] = self.parts[0](x)[:3]
            x = self.parts[1](x)
            buffer[3:] = x[3:]
            return self.parts[4](self.parts[3](self.parts[2](buffer) + x) + x)

    chain = check_plain(Model(*(nn.Linear(8, 8) for _ in range(5))), algorithm, take=with_writes)
    assert {"parts.0.weight", "parts.1.weight"} <= set(chain.parameters[0]) and len(chain.units) > 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_mask_that_changes_after_its_use(algorithm):
    """It cannot be computed by every stage for itself: it is written to in place between two of its readers."""

    class Model(Loss):
        def body(self, x):
            mask = torch.zeros(6, 8)
            mask[0] = 1
            x = self.parts[0](x) * mask
            mask[:, 1] = 2
            return self.parts[3](self.parts[2](self.parts[1](x * mask) * mask)) * mask

    chain = check_plain(Model(*(nn.Linear(8, 8) for _ in range(4))), algorithm, take=with_writes)
    assert "main" in [chain.kinds[node] for node in chain.kinds if is_op(node, "zeros")] and len(chain.units) > 1


def test_pieces_of_one_result_are_not_parted():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.rand(n, n)) for n in (8, 4, 4))

        def forward(self, x, y):
            left, right = torch.split(nn.functional.linear(x, self.a), 4, dim=1)
            made = [nn.functional.linear(left, self.b), nn.functional.linear(right, self.c)]
            return ((torch.cat(made, dim=1) - y) ** 2).mean()

    chain = check_plain(Model())
    assert [[op_name(node) for node in crossing] for crossing in chain.crossing] == [["linear"]]


def test_a_chain_of_layers_is_cut_at_each():
    class Model(Loss):
        def body(self, x):
            for part in self.parts:
                x = part(x).relu()
            return x

    chain = check_plain(Model(*(nn.Linear(8, 8) for _ in range(5))))
    assert chain.names == tuple(f"parts.{i}" for i in range(5))


def test_siamese_towers_share_parameters():
    class Model(Loss):
        def tower(self, x):
            for part in self.parts:
                x = part(x).relu()
            return x

        def body(self, x):
            return self.tower(x) * self.tower(-x)

    chain = check_plain(Model(*(nn.Linear(8, 8) for _ in range(3))))
    assert chain.names == ("parts.0", "parts.1", "parts.2#1", "parts.0+1", "parts.2#2")
    assert crossings(chain) == [1, 1, 1, 2]
    names = [(f"parts.{i}.weight", f"parts.{i}.bias") for i in range(3)]
    assert [load.parameters for load in unit_loads(chain)] == [*names, (), ()]
    assert [load.shared for load in unit_loads(chain)] == [(), (), (), names[0] + names[1], names[2]]
    assert align(chain, chain).units == chain.units


def test_a_model_without_a_narrow_place_is_one_unit():
    class Model(Loss):
        def body(self, x):
            made = [x]
            for part in self.parts:
                made.append(part(sum(made)))
            return torch.stack(made).prod(0)

    model = Model(*(nn.Linear(8, 8) for _ in range(5)))
    assert len(check_plain(model).units) <= 2
    assert len(check_plain(model, max_crossing=0).units) == 1
    assert check_plain(Constant()).names == ("loss",)


class Constant(nn.Module):
    """No product, no module: only a parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x, y):
        return (x * self.w - y).mean()


def test_small_values_do_not_count():
    """Router logits are kept from every layer for the auxiliary loss at the end."""
    captured = captured_family("mixtral", output_router_logits=True, num_hidden_layers=6)
    chain = cut(captured)
    assert len(chain.units) == 2 + 2 * 6
    assert crossings(chain)[-1] == 1 + 6


def test_random_numbers_are_drawn_once():
    class Model(Loss):
        def body(self, x):
            noise = torch.rand(6, 8)
            for part in self.parts:
                x = part(x * noise)
            return x * noise

    captured = capture(Model(*(nn.Linear(8, 8) for _ in range(3))), {"x": torch.randn(6, 8), "y": torch.randn(6, 8)})
    chain = cut(captured)
    check_chain(captured, chain)
    assert crossings(chain) == [2, 2] and is_op(chain.units[0][0], "rand")


@pytest.mark.slow
def test_405_billion_parameters_are_cut_in_a_second():
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256}
    config = LlamaConfig(**sizes, num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=4096)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(1, 4096, dtype=torch.long)
    captured = capture(model, {"input_ids": ids, "labels": ids})
    for algorithm, cuts in zip(ALGORITHMS, (2 * 126 + 1, 127), strict=True):
        begin = process_time()
        chain = cut(captured, algorithm)
        assert process_time() - begin < 1
        assert len(chain.crossing) == cuts and crossings(chain) == [1] * cuts
    assert imbalance(cut(captured), 16) < 1.02

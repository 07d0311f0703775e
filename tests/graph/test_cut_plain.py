"""Chains of plain modules: writes in place, shared parameters, narrow places and random numbers."""

from time import process_time

import pytest
import torch
from torch import nn

from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.captured import Captured
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.ir.nodes import is_op, op_name
from megatron_merak.graph.partition.cut import ALGORITHMS, align, cut
from megatron_merak.graph.partition.loads import unit_loads
from tests.graph.chains import Loss, captured_family, check_chain, crossings, imbalance, run_stages


def check_plain(model, algorithm="cut", max_crossing=2, take=capture):
    """The chain of a small module of one's own, checked and run against the module."""
    torch.manual_seed(3)
    batch = {"x": torch.randn(6, 8), "y": torch.randn(6, 8)}
    captured = take(model, batch)
    chain = cut(captured, algorithm, max_crossing)
    check_chain(captured, chain)
    (found,) = run_stages(
        captured, chain, range(len(chain.units) + 1), dict(model.named_parameters()), batch
    )
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
    """It cannot be computed by every stage for itself: it is written to in place between two of its
    readers.
    """

    class Model(Loss):
        def body(self, x):
            mask = torch.zeros(6, 8)
            mask[0] = 1
            x = self.parts[0](x) * mask
            mask[:, 1] = 2
            return self.parts[3](self.parts[2](self.parts[1](x * mask) * mask)) * mask

    chain = check_plain(Model(*(nn.Linear(8, 8) for _ in range(4))), algorithm, take=with_writes)
    assert (
        "main" in [chain.kinds[node] for node in chain.kinds if is_op(node, "zeros")]
        and len(chain.units) > 1
    )


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
    assert [load.shared for load in unit_loads(chain)] == [
        (),
        (),
        (),
        names[0] + names[1],
        names[2],
    ]
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

    captured = capture(
        Model(*(nn.Linear(8, 8) for _ in range(3))),
        {"x": torch.randn(6, 8), "y": torch.randn(6, 8)},
    )
    chain = cut(captured)
    check_chain(captured, chain)
    assert crossings(chain) == [2, 2] and is_op(chain.units[0][0], "rand")


@pytest.mark.slow
def test_405_billion_parameters_are_cut_in_a_second():
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "vocab_size": 128256,
    }
    config = LlamaConfig(
        **sizes, num_attention_heads=128, num_key_value_heads=8, max_position_embeddings=4096
    )
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

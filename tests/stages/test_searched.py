"""What a unit of a captured model needs for many samples follows from what it needs for one and for
two.
"""

from dataclasses import fields

import pytest

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import ParallelConfig
from megatron_merak.plan import Unit
from megatron_merak.planner.request import Request
from megatron_merak.planner.search.choice import Layer
from megatron_merak.stages.blueprint import measured
from megatron_merak.stages.searched import CapturedChain
from megatron_merak.stages.traced import Traced
from tests.graph.tiny import example, tiny

REQUEST = Request(graph_sharding="cut")
SAMPLES = 5
# the larger one of several values, or one that a single sample does not need: never too little
LARGEST = ("transient_bytes", "weight_bytes", "running_bytes")


def chain(family: str) -> tuple[CapturedChain, list[int]]:
    """A family's chain, and the numbers of samples with which it is captured."""
    _, empty, _ = tiny(family)
    model = empty()
    captured = []

    def trace(samples: int) -> Traced:
        captured.append(samples)
        return Traced(model, example(family, batch=samples))

    return CapturedChain(trace, REQUEST, CLUSTERS["cpu"]), captured


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize(
    "tp, along, selective", [(1, False, False), (2, True, False), (2, False, True)]
)
def test_units_grow_with_the_samples_as_they_are_measured(family, tp, along, selective):
    one, captured = chain(family)
    grown = one.units(Layer(tp), SAMPLES, along, selective)
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=along,
        recompute_granularity="selective" if selective else None,
    )
    request = Request(parallel=parallel, graph_sharding="cut")
    exact = measured(one._trace(SAMPLES), request, CLUSTERS["cpu"])[2]
    assert captured == [1, 2, SAMPLES]
    for made, true in zip(grown, exact, strict=True):
        for name in (field.name for field in fields(Unit)):
            if name in LARGEST:
                assert getattr(made, name) >= getattr(true, name), (true.name, name)
            else:
                assert getattr(made, name) == getattr(true, name), (true.name, name)


def test_a_model_is_captured_twice_whatever_is_asked():
    one, captured = chain("llama")
    for tp in (1, 2, 4):
        for samples in (1, 2, 4, 8):
            one.units(Layer(tp), samples, False, False)
    assert captured == [1, 2]
    assert one.frozen_bytes == 0

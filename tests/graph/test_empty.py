"""Models without memory: shapes and dtypes as always, buffers with values, everything restored
afterwards.
"""

import resource

import pytest
import torch
from torch import nn

from megatron_merak.graph.capture.empty import init_empty_weights, is_fake
from tests.graph.tiny import FAMILIES, tiny


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba", "t5", "swin", "whisper"])
def test_parameters_have_shapes_and_buffers_have_values(name):
    real, empty, _ = tiny(name)
    full, hollow = real(), empty()
    assert [(k, p.shape, p.dtype) for k, p in full.named_parameters(remove_duplicate=False)] == [
        (k, p.shape, p.dtype) for k, p in hollow.named_parameters(remove_duplicate=False)
    ]
    assert all(is_fake(p) and isinstance(p, nn.Parameter) for p in hollow.parameters())
    buffers = dict(hollow.named_buffers())
    assert buffers.keys() == dict(full.named_buffers()).keys()
    assert all(torch.equal(b, buffers[k]) for k, b in full.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_buffers(name):
    test_parameters_have_shapes_and_buffers_have_values(name)


def test_ties_stay():
    _, empty, _ = tiny("gpt2")
    model = empty()
    assert model.lm_head.weight is model.transformer.wte.weight


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.none = nn.Parameter(torch.ones(1))
        self.none = None
        self.register_buffer("table", torch.arange(5.0))


def test_nested_and_restored_after_an_error():
    register = nn.Module.register_parameter
    with init_empty_weights(), pytest.raises(ZeroDivisionError):
        with init_empty_weights():
            model = Plain()
            raise ZeroDivisionError
    assert nn.Module.register_parameter is register
    assert all(is_fake(p) for p in model.parameters()) and model.none is None
    assert not model.frozen.requires_grad and model.layer.weight.requires_grad
    assert torch.equal(model.table, torch.arange(5.0))
    assert not any(is_fake(p) for p in Plain().parameters())


def test_nothing_is_allocated():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(4)))
    assert sum(p.numel() * p.element_size() for p in model.parameters()) > 4 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # kilobytes


def test_initialisation_leaves_no_mark():
    """Drawing the weights later must find them untouched."""
    _, empty, _ = tiny("llama")
    assert not any(hasattr(p, "_is_hf_initialized") for p in empty().parameters())


def test_a_tensor_that_no_host_could_hold_is_a_parameter():
    """All experts of a layer in one tensor; their memory is not even asked for, so that nothing
    refuses it.
    """

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.empty(4096, 1 << 15, 1 << 15))
            self.down = nn.Parameter(torch.zeros((4096, 1 << 15, 1 << 15), dtype=torch.bfloat16))
            self.register_buffer("table", torch.ones(3))

    with init_empty_weights():
        experts = Experts()
    assert is_fake(experts.up) and experts.down.dtype == torch.bfloat16 and experts.up.requires_grad
    assert experts.up.shape == experts.down.shape == (4096, 1 << 15, 1 << 15)
    assert torch.equal(experts.table, torch.ones(3))


def test_modules_are_converted():
    """As models of transformers do in their constructors; tied weights stay tied."""
    with init_empty_weights():
        one, two = nn.Linear(3, 3), nn.Linear(3, 3)
        two.weight = one.weight
        one.bias.requires_grad_(False)
        model = nn.Sequential(one, two, nn.BatchNorm1d(3)).to(torch.bfloat16)
    assert model[0].weight is model[1].weight and not model[0].bias.requires_grad
    assert all(is_fake(p) and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model[2].running_mean.dtype == torch.bfloat16 and not is_fake(model[2].running_mean)

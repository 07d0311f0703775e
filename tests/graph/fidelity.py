"""Loss and gradients of a captured graph beside those of the model."""

import torch

from megatron_merak.graph.capture.capture import capture
from tests.graph.tiny import gradients, randomise, run, tiny


def captured_gradients(captured, model, batch):
    parameters = {
        k: p.detach().clone().requires_grad_(p.requires_grad) for k, p in model.named_parameters()
    }
    loss, *_ = run(captured, parameters, batch)
    loss.backward()
    return loss.detach(), {k: p.grad for k, p in parameters.items() if p.grad is not None}


def check_fidelity(name, exact=True, **overrides):
    real, empty, batch = tiny(name, **overrides)
    model = randomise(real())
    captured = capture(empty(), batch)
    torch.manual_seed(3)
    loss, expected = gradients(model, batch)
    torch.manual_seed(3)
    found_loss, found = captured_gradients(captured, model, batch)
    assert torch.equal(loss, found_loss)
    assert found.keys() == expected.keys() == captured.trainable
    for key, grad in expected.items():
        tolerance = 0.0 if exact else 1e-6 * grad.abs().max()
        assert (found[key] - grad).abs().max() <= tolerance, key
    return captured

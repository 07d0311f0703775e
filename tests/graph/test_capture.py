"""A captured graph gives the loss and the gradients of the model as it is, or the model is refused
by name.
"""

import copy
import importlib
import random

import numpy
import pytest
import torch
from torch import nn

from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.capture import accepts_num_items, capture
from megatron_merak.graph.capture.empty import init_empty_weights
from tests.graph.fidelity import captured_gradients, check_fidelity
from tests.graph.tiny import FAMILIES, gradients, randomise, run, tiny

QUICK = ("llama", "gpt2", "bloom", "mixtral", "gpt_oss", "t5", "deberta-v2", "vit")


@pytest.mark.parametrize("name", QUICK)
def test_loss_and_gradients_are_the_models(name):
    check_fidelity(name, exact=name not in ("bloom", "deberta-v2"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUICK])
def test_loss_and_gradients_of_every_family(name):
    check_fidelity(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bloom", "deberta-v2"])
def test_where_order_differs_fp64_is_exact(name):
    real, empty, batch = tiny(name)
    model = randomise(real().double())
    loss, expected = gradients(model, batch)
    found_loss, found = captured_gradients(capture(model, batch), model, batch)
    assert (loss - found_loss).abs() < 1e-12
    assert all((found[k] - g).abs().max() <= 1e-8 * g.abs().max() for k, g in expected.items())


class Counts(nn.Module):
    """Counts what it is given, as older mixture-of-experts losses count the tokens of each
    expert.
    """

    def __init__(self, as_method=False):
        super().__init__()
        self.weight, self.as_method = nn.Parameter(torch.randn(4)), as_method

    def forward(self, x):
        counts = (
            x.reshape(-1).bincount(minlength=4)
            if self.as_method
            else torch.bincount(x.reshape(-1), None, 4)
        )
        return {"loss": (self.weight * counts.float()).square().mean()}


@pytest.mark.parametrize("as_method", [False, True])
def test_counts_of_a_minimal_length_have_it(as_method):
    model, batch = Counts(as_method), {"x": torch.tensor([[0, 2, 2], [1, 0, 0]])}
    loss, expected = gradients(model, batch)
    found_loss, found = captured_gradients(capture(model, batch), model, batch)
    assert torch.equal(loss, found_loss) and torch.equal(found["weight"], expected["weight"])
    with pytest.raises(RuntimeError, match="out of bounds"):
        captured_gradients(
            capture(model, batch), model, {"x": torch.tensor([[0, 2, 2], [1, 0, 4]])}
        )


def test_dropout_draws_the_models_numbers():
    captured = check_fidelity("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    assert any("dropout" in str(node.target) for node in captured.module.graph.nodes)


def test_a_real_model_gives_the_same_graph_and_is_not_changed():
    real, empty, batch = tiny("llama", use_cache=True)
    model = real().eval()
    parameters, config = dict(model.named_parameters()), copy.deepcopy(model.config.to_dict())
    before = set(vars(model))
    captured = capture(model, batch)
    assert str(captured.module.graph) == str(capture(empty(), batch).module.graph)
    assert not model.training and model.config.to_dict() == config and set(vars(model)) == before
    assert all(p is parameters[k] for k, p in model.named_parameters())


def test_names_ties_and_dtypes():
    _, empty, batch = tiny("gpt2")
    model = empty()
    model.transformer.wpe.weight.requires_grad_(False)
    captured = capture(model, batch, dtype=torch.bfloat16)
    assert captured.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert captured.shapes == {k: tuple(p.shape) for k, p in model.named_parameters()}
    assert set(captured.dtypes.values()) == {torch.bfloat16}
    assert captured.trainable == captured.shapes.keys() - {"transformer.wpe.weight"}
    assert {n.target for n in captured.module.graph.find_nodes(op="placeholder")} == {
        "input_ids",
        "labels",
    }


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_a_lower_precision_is_that_of_from_config(name):
    """Parameters are cast, tables such as the rotary frequencies are not: as in
    ``from_pretrained(dtype=...)``.
    """
    import transformers

    real, empty, batch = tiny(name)
    model = real()
    auto = getattr(transformers, FAMILIES[name][0])
    lower = randomise(auto.from_config(model.config, dtype=torch.bfloat16).train())
    loss, expected = gradients(lower, batch)
    captured = capture(empty(), batch, dtype=torch.bfloat16)
    assert captured.dtypes == {k: p.dtype for k, p in lower.named_parameters()}
    found_loss, found = captured_gradients(captured, lower, batch)
    assert torch.equal(loss, found_loss)
    assert all(torch.equal(found[k], g) for k, g in expected.items())


def test_an_evaluation_capture_has_no_dropout_and_gives_logits():
    real, empty, batch = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    captured = capture(empty(), batch, training=False, outputs=("loss", "logits"))
    assert captured.outputs == ("loss", "logits")
    model = randomise(real()).eval()
    expected = model(**batch)
    loss, logits = run(captured, dict(model.named_parameters()), batch)
    assert torch.equal(loss, expected.loss) and torch.equal(logits, expected.logits)


def test_items_in_the_batch_divide_the_loss():
    real, empty, batch = tiny("llama")
    assert accepts_num_items(empty()) and not accepts_num_items(nn.Linear(1, 1))
    batch["num_items_in_batch"] = torch.tensor(7.0)
    captured = capture(empty(), batch)
    model = randomise(real())
    batch["num_items_in_batch"] = torch.tensor(11.0)
    (loss,) = run(captured, dict(model.named_parameters()), batch)
    assert torch.equal(loss, model(**batch).loss)


@pytest.mark.parametrize("key", ["position_ids", "attention_mask"])
def test_packed_sequences_and_padding_keep_their_masks(key):
    real, empty, batch = tiny("llama")
    steps = torch.arange(16).expand(2, 16)
    value = steps % 5 if key == "position_ids" else (steps < torch.tensor([[11], [16]])).long()
    plain = {**batch, key: steps if key == "position_ids" else torch.ones_like(steps)}
    model = randomise(real())
    captured = capture(empty(), plain)
    assert "is_causal" not in captured.how
    parameters = dict(model.named_parameters())
    for given in ({**batch, key: value}, plain):
        (loss,) = run(captured, parameters, given)
        assert (loss - model(**given).loss).abs() < 1e-6
    assert (
        run(captured, parameters, plain)[0] - run(captured, parameters, {**batch, key: value})[0]
    ).abs() > 1e-5


class Positions(nn.Module):
    """A causal model that takes its positions from where the padding is."""

    def __init__(self, config):
        super().__init__()
        from transformers import LlamaModel

        self.config, self.model, self.head = config, LlamaModel(config), nn.Linear(32, 96)

    written = False

    def forward(self, input_ids):
        positions = (input_ids != 0).long().cumsum(-1)
        if self.written:
            given = positions
            positions = torch.zeros_like(given)
            positions[:, 1:] = given[:, 1:]
        hidden = self.model(input_ids, position_ids=positions).last_hidden_state
        return self.head(hidden).logsumexp(-1).mean()


@pytest.mark.parametrize("written", [False, True])
def test_positions_that_depend_on_the_batch_may_be_packed(written):
    real, _, batch = tiny("llama")
    model = randomise(Positions(real().config))
    model.written = written
    captured = capture(model, {"input_ids": batch["input_ids"]})
    assert "is_causal" not in captured.how
    ids = batch["input_ids"].clone()
    ids[:, 6:8] = 0
    assert (
        run(captured, dict(model.named_parameters()), {"input_ids": ids})[0] - model(ids)
    ).abs() < 1e-6


def test_checkpointing_is_left_to_the_runtime():
    _, empty, batch = tiny("llama")
    model = empty()
    name = next(
        each
        for each in ("activation_checkpointing", "gradient_checkpointing")
        if hasattr(model, f"is_{each}")
    )
    getattr(model, f"{name}_enable")()
    assert str(capture(model, batch).module.graph) == str(capture(empty(), batch).module.graph)
    assert getattr(model, f"is_{name}")


class Net(nn.Module):
    """A small module whose forward is the function given."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x, scale=1.0):
        return self.function(self, self.layer(x) * scale)


@pytest.mark.parametrize(
    "function",
    [lambda m, y: y.sum(), lambda m, y: (y.sum(), y), lambda m, y: {"loss": y.sum()[None]}],
)
def test_plain_modules_return_a_tensor_a_tuple_or_a_dict(function):
    model, x = Net(function), torch.randn(3, 4)
    captured = capture(model, {"x": x, "scale": 2.0})
    loss, grads = captured_gradients(captured, model, {"x": x})
    assert torch.equal(loss, (model.layer(x) * 2).sum()) and grads.keys() == {
        "layer.weight",
        "layer.bias",
    }
    with init_empty_weights():
        assert str(capture(Net(function), {"x": x, "scale": 2.0}).module.graph) == str(
            captured.module.graph
        )


def test_batches_that_do_not_fit_are_named():
    _, empty, batch = tiny("bert")
    with pytest.raises(TraceError, match="lables.*Did you mean labels"):
        capture(tiny("gptj")[1](), {**batch, "lables": batch["labels"]})
    with pytest.raises(TraceError, match="batch entry y: the forward of Net does not take it"):
        capture(Net(lambda m, y: y.sum()), {"x": torch.randn(2, 4), "y": torch.randn(2)})
    with pytest.raises(TraceError, match="batch entry x: the forward of Net needs it"):
        capture(Net(lambda m, y: y.sum()), {})
    with pytest.raises(TraceError, match="several tensors"):
        capture(Net(lambda m, y: y.sum()), {"x": [torch.randn(2, 4)]})
    with pytest.raises(TraceError, match="returns no loss, only logits.*labels"):
        capture(empty(), {"input_ids": batch["input_ids"]})
    with pytest.raises(TraceError, match=r"loss has the shape \(3, 4\)"):
        capture(Net(lambda m, y: y), {"x": torch.randn(3, 4)})


def test_a_swallowed_batch_entry_is_refused():
    """A forward that takes any keyword says nothing about a misspelt one."""
    _, empty, batch = tiny("llama")
    with pytest.raises(TraceError, match="attnetion_mask.*Did you mean attention_mask"):
        capture(empty(), {**batch, "attnetion_mask": torch.ones(2, 16)})


def test_values_that_decide_are_named_by_their_line(capfd):
    def branch(module, y):
        return y.sum() if (y > 0).any() else y.mean()  # the line

    with pytest.raises(
        TraceError,
        match=r"model Net: .*test_capture.py:\d+ in branch: return y.sum\(\) if .* # the l",
    ):
        capture(Net(branch), {"x": torch.randn(3, 4)})
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_a_failing_forward_is_told_with_its_line():
    with pytest.raises(
        TraceError, match=r"test_capture.py:\d+ in <lambda>: .* raises RuntimeError: .*shape"
    ):
        capture(Net(lambda m, y: y.reshape(5).sum()), {"x": torch.randn(3, 4)})


def test_layer_drop_never_fires_and_other_scalar_randomness_is_refused():
    def skipping(module, y):
        dropout_probability = torch.rand([])
        return (y * 0 if dropout_probability < 0.3 else y).sum()

    def choosing(module, y):
        return (y if torch.rand([]) < 0.5 else 2 * y).sum()

    model, x = Net(skipping), torch.randn(3, 4)
    captured = capture(model, {"x": x})
    assert "no layer drop" in captured.how
    assert torch.equal(
        run(captured, dict(model.named_parameters()), {"x": x})[0], model.layer(x).sum()
    )
    with pytest.raises(TraceError, match="choosing"):
        capture(Net(choosing), {"x": x})


def test_layer_drop_in_the_config_is_noted():
    _, empty, batch = tiny("bart", encoder_layerdrop=0.1)
    (note,) = capture(empty(), batch).notes
    assert "encoder_layerdrop 0.1" in note


imported = random.random


@pytest.mark.parametrize(
    ("draw", "place"),
    [
        (lambda: float(numpy.random.choice([0.0, 1.0])), "in <lambda>"),
        (lambda: numpy.random.beta(1.0, 1.0), "in <lambda>"),
        (lambda: random.choices([0.0, 1.0])[0], "in <lambda>"),
        (lambda: numpy.random.default_rng().random(), "in <lambda>"),
        (lambda: imported(), "its forward"),
    ],
)
def test_random_numbers_of_the_host_are_refused(draw, place):
    state = random.getstate(), numpy.random.get_state()[1].copy()
    with pytest.raises(TraceError, match=f"{place}.* draws random numbers on the host"):
        capture(Net(lambda m, y: (y * draw()).sum()), {"x": torch.randn(3, 4)})
    assert (numpy.random.get_state()[1] == state[1]).all() and random.getstate() == state[0]


def test_a_forward_that_sets_the_seed_is_refused_and_sets_none():
    def noisy(module, y):
        torch.manual_seed(3)
        return (y * torch.rand(4)).sum()

    torch.manual_seed(11)
    with pytest.raises(TraceError, match="in noisy: .* sets the seed of torch"):
        capture(Net(noisy), {"x": torch.ones(3, 4)})
    assert torch.initial_seed() == 11


def test_gradient_hooks_are_refused():
    def hooked(module, y):
        y.register_hook(lambda g: 2 * g)
        return y.sum()

    with pytest.raises(TraceError, match="in hooked: .* puts a gradient hook on a tensor"):
        capture(Net(hooked), {"x": torch.randn(3, 4)})
    model = Net(lambda m, y: y.sum())
    model.layer.register_full_backward_hook(lambda *_: None)
    with pytest.raises(TraceError, match="layer: it has a gradient hook"):
        capture(model, {"x": torch.randn(3, 4)})
    model = Net(lambda m, y: y.sum())
    model.layer.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(TraceError, match="layer.bias: it has a gradient hook"):
        capture(model, {"x": torch.randn(3, 4)})


def test_gradients_stop_where_the_model_stops_them():
    def inferring(module, y):
        with torch.inference_mode():
            table = module.layer.weight * 3
        return (y + table[:3].clone()).sum()

    def differentiating(create):
        def forward(module, y):
            (slope,) = torch.autograd.grad((y**3).sum(), y, create_graph=create, retain_graph=True)
            return (y * slope).sum()

        return forward

    for function in (inferring, differentiating(True), differentiating(False)):
        model, x = Net(function), torch.randn(3, 4)
        loss, grads = captured_gradients(capture(model, {"x": x}), model, {"x": x})
        expected = model(x)
        expected.backward()
        assert torch.equal(loss, expected.detach())
        assert all(torch.allclose(grads[name], p.grad) for name, p in model.named_parameters())


def test_shapes_that_depend_on_values_are_refused():
    with pytest.raises(TraceError, match=r"test_capture.py.* shape depends on values"):
        capture(Net(lambda m, y: y[y > 0].sum()), {"x": torch.randn(3, 4)})
    with pytest.raises(TraceError, match=r"test_capture.py.* torch.vmap"):
        capture(
            Net(lambda m, y: torch.vmap(lambda row: row.exp().sum())(y).sum()),
            {"x": torch.randn(3, 4)},
        )


def test_values_of_parameters_apart_from_their_gradient_are_refused():
    def clipping(module, y):
        module.layer.weight.data.clamp_(-1, 1)
        return y.sum()

    with pytest.raises(
        TraceError,
        match=r"test_capture.py.* uses the values of a parameter apart from its gradient",
    ):
        capture(Net(clipping), {"x": torch.randn(3, 4)})


def test_constants_without_values_are_refused():
    model = Net(lambda m, y: m.norm(y).sum())
    with torch.device("meta"):
        model.norm = nn.BatchNorm1d(4)
    with pytest.raises(TraceError, match="buffer norm.running_mean: it has no values"):
        capture(model, {"x": torch.randn(3, 4)})


def test_a_buffer_that_was_made_from_a_parameter_may_be_there_if_nothing_reads_it():
    def made(read):
        with init_empty_weights():
            model = Net(lambda m, y: (y * m.integer if read else y).sum())
            model.register_buffer("integer", torch.zeros_like(model.layer.bias))
        return model

    assert "integer" not in str(capture(made(False), {"x": torch.randn(3, 4)}).module.graph)
    with pytest.raises(TraceError, match="buffer integer: it has no values"):
        capture(made(True), {"x": torch.randn(3, 4)})


def test_outputs_have_their_names_in_every_way_to_trace(monkeypatch):
    """Strict tracing runs the bytecode of a forward, and loses what that leaves anywhere but in its
    result.
    """
    real, empty, batch = tiny("llama")
    expected = capture(empty(), batch, outputs=("loss", "*")).outputs
    module = importlib.import_module(capture.__module__)
    monkeypatch.setattr(
        module, "_attempts", lambda model, batch: iter([module.Attempt("", strict=True)])
    )
    captured = capture(empty(), batch, outputs=("loss", "*"))
    assert captured.how == "as it is, strict" and captured.outputs == expected == ("loss", "logits")

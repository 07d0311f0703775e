"""Initial weights drawn one by one against transformers' own: equal constants, equal distributions,
any order.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megatron_merak.errors import ConfigError
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.plan import Grid
from megatron_merak.stages import init_captured as initialise
from megatron_merak.stages.blueprint import blueprint_from_plan
from megatron_merak.stages.init_captured import Initialiser, draw_parameter
from megatron_merak.stages.traced import Traced
from tests.engines import blueprint_of

DRAWS = 4
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "pad_token_id": 5,
}
CONFIGS = {
    "llama": ("LlamaForCausalLM", {**SIZES, "initializer_range": 0.3}),  # padding row
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 8, "n_head": 4, "vocab_size": 96},
    ),  # scaled by a parent, ties
    # a bias that is shared, not tied in the module that would draw it
    "bert": ("BertForMaskedLM", SIZES),
    "fnet": ("FNetForMaskedLM", SIZES),
    # by sizes
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_ff": 64, "num_layers": 2, "vocab_size": 96},
    ),
    # A_log, dt bias
    "mamba": ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 96}),
    # truncated normal
    "vit": ("ViTForImageClassification", {**SIZES, "image_size": 32, "patch_size": 8}),
    "apertus": ("ApertusForCausalLM", SIZES),  # values that only a constructor gives
    "wav2vec2": (  # weight norm: a parametrised convolution
        "Wav2Vec2ForCTC",
        {
            **SIZES,
            "conv_dim": (32, 32),
            "conv_stride": (2, 2),
            "conv_kernel": (3, 3),
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**SIZES, "global_attn_every_n_layers": 2},
    ),  # a tie that would be drawn twice
    "imagegpt": (
        "ImageGPTForCausalImageModeling",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**SIZES, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 8},
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers

    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)._from_config(
        transformers.CONFIG_MAPPING[name](**sizes), dtype=dtype
    )


def empty(name: str) -> nn.Module:
    with init_empty_weights():
        return build(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_own_distributions(name):
    compare(lambda: build(name))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_the_own_distributions_of_every_type(number):
    """Every type that can be made from a tiny configuration; those of one number take about half a
    minute.
    """
    from ..zoo.configs import tiny_config
    from ..zoo.heads import heads
    from ..zoo.specimen import Specimen

    compared = 0
    for model_type in sorted(heads())[number::24]:
        try:
            specimen = Specimen(heads()[model_type], tiny_config(model_type), "")
            with init_empty_weights():
                size = sum(
                    p.numel()
                    for p in specimen.model_class._from_config(specimen.config).parameters()
                )
        # a configuration that the heuristics do not suit: the parity table lists these
        except Exception:
            continue
        if size < 6_000_000:
            compare(lambda made=specimen: made.model_class._from_config(made.config))
            compared += 1
    assert compared > 4


def compare(make: Callable[[], nn.Module]) -> None:
    """Every parameter as drawn against what ``make`` gives: equal constants in equal places, equal
    distributions.
    """
    theirs = []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        theirs.append(dict(make().named_parameters()))
    with init_empty_weights():
        ours = Initialiser(make())
    for parameter in theirs[0]:
        want = torch.stack([values[parameter].detach().double() for values in theirs])
        got = torch.stack([ours.draw(parameter, seed).double() for seed in range(DRAWS)])
        constant = (want == want[0]).all(0)
        assert torch.equal((got == got[0]).all(0), constant), parameter
        assert torch.equal(got[0][constant], want[0][constant]), parameter
        check_alike(parameter, want[:, ~constant].flatten(), got[:, ~constant].flatten())


def check_alike(name: str, want: torch.Tensor, got: torch.Tensor) -> None:
    """Mean, standard deviation and tail (the 99th percentile of what they are in size; extremes are
    too random) within what samples of this size may differ by."""
    count = want.numel()
    if count < 8:
        return
    spread = float(want.std())
    assert abs(float(got.std()) - spread) <= 8 * spread / count**0.5, (
        f"{name}: {float(got.std())} for {spread}"
    )
    assert abs(float(got.mean() - want.mean())) <= 8 * spread / count**0.5, name
    if count > 2000:
        tails = [float(values.abs().kthvalue(int(0.99 * count)).values) for values in (want, got)]
        assert abs(tails[1] - tails[0]) <= 16 * tails[0] / count**0.5, f"{name}: {tails}"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.complex64], ids=str
)
def test_what_is_set_is_told_from_what_is_not(dtype):
    """By a sum, where that tells: infinities may cancel, and fp16 may overflow."""
    values = torch.full((70000,), 2, dtype=dtype)
    assert initialise._is_set(values) and initialise._is_set(values[:0])
    if dtype.is_floating_point:
        values[:2] = torch.tensor([torch.inf, -torch.inf])
        assert initialise._is_set(values)
    if dtype != torch.int64:
        values[69999] = torch.nan
        assert not initialise._is_set(values)


def test_a_function_of_seed_and_name_only():
    model, state = empty("gpt2"), torch.get_rng_state()
    names = [name for name, _ in model.named_parameters()]
    ours = Initialiser(model)
    first = {name: ours.draw(name, 3) for name in names}
    for name in names[::-3]:
        assert torch.equal(draw_parameter(model, name, 3), first[name]), name
    one, two = "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"
    assert not torch.equal(first[one], first[two]) and not torch.equal(
        ours.draw(one, 4), first[one]
    )
    assert torch.equal(ours.draw("lm_head.weight", 3), first["transformer.wte.weight"])
    assert torch.equal(torch.get_rng_state(), state)


def test_in_the_dtype_of_the_model():
    with init_empty_weights():
        model = build("llama", dtype=torch.bfloat16)
    drawn = draw_parameter(model, "model.layers.0.mlp.up_proj.weight", 0)
    assert drawn.dtype == torch.bfloat16 and abs(float(drawn.float().std()) - 0.3) < 0.03


def test_a_model_with_values_keeps_them():
    model = build("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = draw_parameter(model, "bert.encoder.layer.0.output.dense.weight", 0)
    assert torch.equal(
        drawn, draw_parameter(empty("bert"), "bert.encoder.layer.0.output.dense.weight", 0)
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(
        hasattr(held, "_is_hf_initialized") for held in (*model.parameters(), *model.buffers())
    )


@pytest.mark.parametrize("small", [0, 1 << 16])
def test_values_that_only_a_constructor_gives(small, monkeypatch):
    monkeypatch.setattr(initialise, "_SMALL", small)
    name = "model.layers.1.mlp.act_fn.alpha_p"
    assert torch.equal(
        draw_parameter(empty("apertus"), name, 0), build("apertus").get_parameter(name).detach()
    )
    ours, names = (
        Initialiser(empty("imagegpt")),
        [f"transformer.h.{layer}.attn.c_attn.weight" for layer in (0, 1)],
    )
    one, two = (ours.draw(name, 1) for name in names)
    assert torch.equal(draw_parameter(empty("imagegpt"), names[1], 1), two) and not torch.equal(
        one, two
    )
    assert abs(float(one.std()) - 0.02) < 0.002 and not torch.equal(one, ours.draw(names[0], 2))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((3,), 2.0))


def test_plain_modules_reset_themselves_or_are_refused():
    with init_empty_weights():
        model = nn.Sequential(Scale(), nn.Conv2d(3, 8, 3))
    ours = Initialiser(model)
    for name in ("0.linear.weight", "0.linear.bias"):
        assert 0.5 * 8**-0.5 < float(ours.draw(name, 0).abs().max()) <= 8**-0.5
    assert ours.draw("1.weight", 0).shape == (8, 3, 3, 3) and bool(ours.draw("1.bias", 0).std() > 0)
    with pytest.raises(
        ConfigError, match=r"0.scale: neither Scale nor .*outside init_empty_weights"
    ):
        ours.draw("0.scale", 0)


class Painter(nn.Module):
    """A model of a user, whose attributes have names that the GPT of flags has, too."""

    fp32_residual = True
    unit_names = ("canvas",)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def draw(self, width):
        raise AssertionError("of the user's own")

    def forward(self, x):
        return {"loss": self.inner(x).square().mean()}


def test_names_of_a_users_model_mean_nothing():
    model = Painter()
    drawn = draw_parameter(model, "inner.weight", 3)
    assert 0 < drawn.abs().max() <= 8**-0.5
    blueprint = blueprint_of(Traced(model, {"x": torch.zeros(2, 8)}), Grid(), graph_sharding="cut")
    assert blueprint_from_plan(blueprint.traced, blueprint.plan).plan.fp32_residual is False

"""Which differences of two configurations make another model."""

import pytest
from transformers import CLIPConfig, LlamaConfig

from megatron_merak.stages.model_config import config_of, differences
from tests.engine.runs import tiny_llama

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(config, **changes):
    return config.to_dict() | {"transformers_version": "5"} | changes


def names(found):
    return [[each.name for each in kind] for kind in found]


@pytest.mark.parametrize("causal", [True, False])
def test_choices_are_told_from_other_models(causal):
    one = saved(LlamaConfig(**SMALL))
    other = one | {
        "rms_norm_eps": 1e-3,
        "attention_dropout": 0.5,
        "pad_token_id": 5,
        "eos_token_id": 7,
        "architectures": ["Other"],
        "_name_or_path": "elsewhere",
        "use_cache": False,
        "initializer_range": 0.3,
    }
    makes_another = ["pad_token_id", "rms_norm_eps"]
    is_choice = ["attention_dropout"]
    (is_choice if causal else makes_another).append("eos_token_id")
    assert names(differences(other, one, causal)) == [sorted(makes_another), sorted(is_choice)]


def test_parts_are_compared_entry_by_entry():
    one = saved(CLIPConfig())
    other = saved(CLIPConfig(text_config={"attention_dropout": 0.5, "hidden_size": 256}))
    others, choices = differences(other, one, causal=False)
    assert [(each.name, each.now, each.saved) for each in others] == [
        ("text_config.hidden_size", 256, 512)
    ]
    assert [(each.name, each.now) for each in choices] == [("text_config.attention_dropout", 0.5)]


def test_entries_of_one_configuration_alone():
    one = {"transformers_version": "5", "size": 1}
    more = one | {"scale": {"factor": 2}}
    assert names(differences(more, one, causal=True)) == [["scale.factor"], []]
    newer = more | {"transformers_version": "6"}
    assert names(differences(newer, one, causal=True)) == [[], ["scale.factor"]]
    assert names(differences(more, one, causal=True, whole=False)) == [[], []]
    assert names(differences(one, None, causal=True)) == [[], []]


def test_a_model_of_transformers_has_a_whole_configuration():
    config = config_of(tiny_llama())
    assert config is not None and {"rms_norm_eps", "transformers_version"} <= config.keys()

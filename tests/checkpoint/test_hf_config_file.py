"""A model from a config file alone."""

import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.checkpoint.hf import from_pretrained
from megatron_merak.errors import CheckpointError
from megatron_merak.graph.empty import is_fake

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 90}


def test_a_config_file_of_any_name_is_a_model_without_weights(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(LlamaConfig(**SIZES).to_dict()))
    model = from_pretrained(tmp_path / "small.json")
    assert isinstance(model, LlamaForCausalLM) and model.merak_source is None
    assert all(is_fake(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llamma"}', "{}"])
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    (tmp_path / "small.json").write_text(text)
    with pytest.raises(CheckpointError):
        from_pretrained(tmp_path / "small.json")


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        from_pretrained(tmp_path / "nowhere.json")

"""A model from a config file alone."""

import json
import os
import time

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_merak.checkpoint.hf import from_pretrained
from megatron_merak.checkpoint.store import load, save
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.graph.capture.empty import is_fake
from megatron_merak.training.outputs import check_directory

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 90,
}


def test_a_config_file_of_any_name_is_a_model_without_weights(tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(LlamaConfig(**SIZES).to_dict()))
    model = from_pretrained(tmp_path / "small.json")
    assert isinstance(model, LlamaForCausalLM) and model.merak_source is None
    assert all(is_fake(parameter) for parameter in model.parameters())


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model_type": "llamma"}', '{"model_type": ["llama"]}', "{}"]
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    (tmp_path / "small.json").write_text(text)
    with pytest.raises(CheckpointError):
        from_pretrained(tmp_path / "small.json")


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        from_pretrained(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "change, told",
    [
        ({"architectures": 5}, "its architectures are '5'"),
        ({"architectures": "LlamaForCausalLM"}, "not a list of class names"),
        ({"architectures": [5]}, "its architectures are"),
        ({"num_hidden_layers": 10**9}, "its num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": -1}, "its num_hidden_layers is -1"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "its n_layer is 1000000000"),
        ({"rms_norm_eps": float("nan")}, "its rms_norm_eps is nan. Give a number"),
        (
            {"layer_norm_epsilon": float("inf")},
            "its layer_norm_epsilon is inf. Give a finite number at least 0",
        ),
        ({"rope_theta": 0}, "its rope_theta is 0. Give a finite number above 0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
            "its rope_theta is -1.0",
        ),
        (
            {"num_attention_heads": 0},
            "its num_attention_heads is 0. Give a finite number at least 1",
        ),
        ({"intermediate_size": -64}, "its intermediate_size is -64"),
        (
            {"attention_dropout": 1.5},
            "its attention_dropout is 1.5. Give a finite number from 0 to 1",
        ),
        ({"vision_config": {"any_factor": float("nan")}}, "its any_factor is nan"),
        ({"vision_config": {"depths": [2, 10**9]}}, "its depths is 1000000000"),
        ({"text_config": {"num_experts": 10**9}}, "its num_experts is 1000000000"),
    ],
)
def test_values_that_would_run_far_are_refused_at_once(tmp_path, change, told):
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig(**SIZES).to_dict() | change))
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=told):
        from_pretrained(tmp_path)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_fifo_is_refused_and_not_waited_for(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig(**SIZES).to_dict()))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        from_pretrained(tmp_path)


def test_a_path_with_a_nul_is_refused(tmp_path):
    for call in (
        from_pretrained,
        lambda path: save(path, 1, {}, {}, None, "cpu"),
        lambda path: load(path, {}, None, "cpu"),
    ):
        with pytest.raises(CheckpointError):
            call(f"{tmp_path}/a\0b")
    with pytest.raises(ConfigError, match="--save"):
        check_directory("--save", "a", tmp_path / "a\0b")

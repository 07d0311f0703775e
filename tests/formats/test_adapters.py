"""LoRA adapters are merged as peft merges them, into every format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_merak.cli import convert
from tests.formats.models import tiny

ATTENTION = ["q_proj", "v_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", dict(r=4, lora_alpha=7, target_modules=ATTENTION)),
    "all, rslora, patterns": (
        "qwen3",
        dict(
            r=4,
            lora_alpha=7,
            target_modules="all-linear",
            use_rslora=True,
            rank_pattern={"down_proj": 2},
            alpha_pattern={"layers.1.mlp.up_proj": 3, "q_proj": 5},
        ),
    ),
    "biases, head": (
        "qwen2",
        dict(r=2, target_modules=ATTENTION, bias="all", modules_to_save=["lm_head"]),
    ),
    "embedding": ("llama", dict(r=2, target_modules=["embed_tokens", "o_proj"])),
    "transposed": ("gpt2", dict(r=2, target_modules=["c_attn", "c_proj", "c_fc"])),
}


def _save(root: Path, family: str, settings: dict, dtype: torch.dtype = torch.float32) -> Any:
    """Save a model and a random adapter of it; return the model with the adapter merged by peft."""
    model = tiny(family).to(dtype)
    model.save_pretrained(root / "base")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(root / "lora")
    base = AutoModelForCausalLM.from_pretrained(root / "base")
    return PeftModel.from_pretrained(base, root / "lora").merge_and_unload()


def _convert(*words: object) -> int:
    return convert.main([str(word) for word in words])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_peft(case, dtype, tmp_path):
    wanted = _save(tmp_path, *CASES[case], dtype).state_dict()
    assert _convert(tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "lora") == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name
    assert any(not torch.equal(found[name], before[name]) for name in found)


@pytest.mark.parametrize("to", ["merak", "megatron", "dcp"])
def test_an_adapter_goes_into_every_format(to, tmp_path):
    wanted = _save(tmp_path, *CASES["all, rslora, patterns"]).state_dict()
    base = tmp_path / "base"
    out = tmp_path / to
    assert _convert(base, out, "--to", to, "--adapter", tmp_path / "lora") == 0
    config = [] if to == "merak" else ["--config", base, "--allow-pickle"]
    assert _convert(out, tmp_path / "hf", "--to", "hf", *config) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def _edited(directory: Path, change: Any) -> None:
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _first(tensors: dict, end: str) -> str:
    return next(name for name in tensors if name.endswith(end))


BAD: dict[str, tuple[Any, str]] = {
    "nan": (lambda t: t[_first(t, "lora_B.weight")].fill_(float("nan")), "NaN"),
    "no second": (lambda t: t.pop(_first(t, "lora_B.weight")), "no two matrices"),
    "other rank": (
        lambda t: t.update({_first(t, "lora_B.weight"): torch.ones(32, 3)}),
        "no two matrices of one rank",
    ),
    "nothing": (lambda t: t.clear(), "it changes nothing"),
    "unknown": (lambda t: t.update({"base_model.model.x": torch.ones(2)}), "base_model.model.x"),
    "shape": (
        lambda t: t.update({_first(t, "lora_B.weight"): torch.ones(5, 4)}),
        "has shape (5, 32) in it",
    ),
    "other model": (
        lambda t: t.update(
            {name.replace("layers.1", "layers.7"): t.pop(name) for name in [*t] if "rs.1" in name}
        ),
        "the model does not have",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_adapters_that_do_not_fit_are_refused(case, tmp_path, capsys):
    _save(tmp_path, *CASES["plain"])
    capsys.readouterr()  # progress of what saves the model
    change, told = BAD[case]
    _edited(tmp_path / "lora", change)
    assert _convert(tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "lora") == 1
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes", [{"lora_alpha": "x"}, {"alpha_pattern": {"(": 1}}, {"alpha_pattern": 3}]
)
def test_settings_that_cannot_be_read_are_refused(changes, tmp_path, capsys):
    _save(tmp_path, *CASES["plain"])
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert _convert(tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "lora") == 1
    assert "no lora_alpha and alpha_pattern that can be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_no_lora_is_refused(tmp_path, capsys):
    _save(tmp_path, "llama", dict(target_modules=ATTENTION, use_dora=True))
    lora = tmp_path / "lora"
    assert _convert(tmp_path / "base", tmp_path / "out", "--adapter", lora) == 1
    assert "it has use_dora, which is not merged here" in capsys.readouterr().err
    assert _convert(lora, tmp_path / "out") == 1
    assert f"--adapter {lora}" in capsys.readouterr().err
    (lora / "adapter_config.json").write_text("{")
    assert _convert(tmp_path / "base", tmp_path / "out", "--adapter", lora) == 1
    assert "adapter_config.json" in capsys.readouterr().err
    assert _convert(tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "no") == 1
    capsys.readouterr()
    assert _convert(tmp_path / "base", tmp_path / "out", "--adapter", tmp_path / "base") == 1
    assert "adapter_config.json is not in it. Give a directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

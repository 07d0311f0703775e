"""merak-convert between the formats of other programs: rounds that end where they began."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from megatron_merak.checkpoint.begun import MARK
from megatron_merak.cli import convert
from megatron_merak.formats.merak import read_merak, write_merak
from tests.formats.models import BASE, FAMILIES, assert_equal, state_of, tiny


def _convert(*words: object) -> int:
    return convert.main([str(word) for word in words])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_state_goes_round_all_formats(family, tmp_path):
    """merak, Megatron-LM, torch.distributed.checkpoint and back, moments and masters included; and
    the weights once more by way of HuggingFace."""
    dtype = torch.bfloat16 if family in ("llama", "mixtral") else torch.float32
    state = state_of(tiny(family), steps=7, dtype=dtype)
    write_merak(state, tmp_path / "first", print)
    begun, _ = read_merak(tmp_path / "first", None, True, print)
    assert_equal(begun, state)
    assert _convert(tmp_path / "first", tmp_path / "megatron", "--to", "megatron") == 0
    allow = "--allow-pickle"
    assert _convert(tmp_path / "megatron", tmp_path / "dcp", "--to", "dcp", allow) == 0
    assert _convert(tmp_path / "dcp", tmp_path / "again", allow) == 0
    ended, path = read_merak(tmp_path / "again", None, True, print)
    if dtype == torch.float32:
        assert_equal(ended, state)
        assert path.name == "iter_0000007"
    else:  # a store has the masters in place of the weights that were rounded from them
        for kind, theirs in (("model", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq",) * 2):
            for name in state.kinds[theirs].names():
                one = ended.kinds[kind].read(name)
                assert torch.equal(one, state.kinds[theirs].read(name)), (kind, name)
    assert _convert(tmp_path / "megatron", tmp_path / "hf", "--to", "hf", allow) == 0
    assert _convert(tmp_path / "hf", tmp_path / "last") == 0
    last, _ = read_merak(tmp_path / "last", None, True, print)
    for name in state.kinds["model"].names():
        assert torch.equal(last.kinds["model"].read(name), state.kinds["model"].read(name)), name


def _run(words: str) -> subprocess.CompletedProcess:
    """merak-pretrain-hf on one rank."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "pretrain_hf.py"), *words.split()]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)


def _pretrain(words: str) -> str:
    """What it prints."""
    done = _run(words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_run_goes_on_from_what_came_back(tmp_path):
    """Two steps, and a third one before and after a round through Megatron's format."""
    tiny("qwen3").save_pretrained(tmp_path / "model")
    common = f"--model {tmp_path}/model --mock-data --lr 1e-3 --lr-decay-style constant "
    common += "--seq-length 16 --micro-batch-size 2 --global-batch-size 2 --eval-iters 0 "
    common += "--log-interval 1"
    _pretrain(f"{common} --train-iters 2 --save {tmp_path}/two")
    assert _convert(tmp_path / "two", tmp_path / "megatron", "--to", "megatron") == 0
    assert _convert(tmp_path / "megatron", tmp_path / "back", "--allow-pickle") == 0
    told = [
        _pretrain(f"{common} --train-iters 3 --load {tmp_path}/{each}") for each in ("two", "back")
    ]
    steps = [re.findall(r"iteration +3/ +3 .*?lm loss: (\S+) .*grad norm: (\S+)", t) for t in told]
    assert steps[0] and steps[0] == steps[1], told


@pytest.mark.long
def test_buffers_that_came_with_the_weights_go_along(tmp_path):
    """DeepSeek chooses experts by a bias that no gradient reaches; a new model has zeros there."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    small = dict(BASE, num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=4)
    small |= dict(num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)
    small |= dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8)
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**small, v_head_dim=8))
    model.get_buffer(name).copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "bare").mkdir()
    model.config.save_pretrained(tmp_path / "bare")
    common = "--mock-data --lr 1e-3 --seq-length 16 --micro-batch-size 2 --global-batch-size 2 "
    common += "--eval-iters 0"
    _pretrain(f"--model {tmp_path}/model {common} --train-iters 2 --save {tmp_path}/run")
    assert _convert(tmp_path / "run", tmp_path / "out") == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.get_buffer(name).tolist() == [4, 3, 2, 1]
    words = f"--model {tmp_path}/bare {common} --train-iters 3 --load {tmp_path}/run"
    done = _run(words)
    assert done.returncode != 0
    assert f"buffer {name} [0, 0, 0, 0]: the checkpoint's run had other values" in done.stderr


REFUSED = {
    "the same format": (["megatron", "out", "--to", "megatron"], "--to megatron: .*already"),
    "no permission": (["megatron", "out"], "--allow-pickle"),
    "no such loader": (["megatron", "out", "--loader", "llama"], "--loader llama: is not known"),
    "nothing": (["nowhere", "out"], "FROM nowhere: it is not a directory"),
    "no target": (["megatron"], "TO .missing.: is needed"),
    "a config": (["merak", "out", "--config", "x"], "--config x: FROM has its own"),
    "a shard size": (
        ["merak", "out", "--to", "dcp", "--max-shard-size", "1GB"],
        "--max-shard-size 1GB: only HuggingFace",
    ),
    "a divisor": (
        ["merak", "out", "--to", "megatron", "--make-vocab-size-divisible-by", "0"],
        "--make-vocab-size-divisible-by 0: is not positive",
    ),
    "the wrong config": (
        ["megatron", "out", "--allow-pickle", "--config", "other.json"],
        "num_layers of the config 5",
    ),
    "a type without counterpart": (
        ["stablelm", "out", "--to", "megatron"],
        "model type stablelm: its tensors' names in Megatron-LM are not known here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    case, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[case]
    if words[0] == "stablelm":
        from transformers import StableLmConfig, StableLmForCausalLM

        StableLmForCausalLM(StableLmConfig(**BASE)).save_pretrained("stablelm")
    elif words[0] != "nowhere":
        state = state_of(tiny("llama"), steps=2)
        write_merak(state, tmp_path / "merak", print)
        assert _convert("merak", "megatron", "--to", "megatron") == 0
        config = {**state.config, "num_hidden_layers": 5}
        (tmp_path / "other.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert _convert(*words) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert error.count("\n") == 1 or "Writing" in error
    assert not (tmp_path / "out").exists()


def test_a_conversion_is_replaced_by_one_of_another_step(tmp_path, capsys):
    """A run would load the newest."""
    for steps in (9, 5):
        state = dataclasses.replace(state_of(tiny("llama"), steps=steps), iteration=steps)
        write_merak(state, tmp_path / f"run{steps}", print)
        assert _convert(tmp_path / f"run{steps}", tmp_path / f"to{steps}", "--to", "dcp") == 0
    assert _convert(tmp_path / "to9", tmp_path / "out", "--allow-pickle") == 0
    again = (tmp_path / "to5", tmp_path / "out", "--allow-pickle")
    assert _convert(*again) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert _convert(*again, "--overwrite") == 0
    assert [each.name for each in (tmp_path / "out").glob("iter_*")] == ["iter_0000005"]
    # killed in its midst, and started again with the same command
    shutil.rmtree(tmp_path / "out" / "iter_0000005")
    (tmp_path / "out" / "iter_0000005.new").mkdir()
    (tmp_path / "out" / MARK).touch()
    assert _convert(*again) == 0
    assert [each.name for each in (tmp_path / "out").glob("iter_*")] == ["iter_0000005"]


def test_flags_of_megatrons_converter(tmp_path):
    write_merak(state_of(tiny("qwen2")), tmp_path / "a", print)
    words = f"--model-type GPT --loader merak --saver mcore --load-dir {tmp_path}/a --save-dir {tmp_path}/b"
    assert convert.main([*words.split(), "--target-tensor-parallel-size", "2"]) == 0
    assert (tmp_path / "b" / "release" / "metadata.json").is_file()

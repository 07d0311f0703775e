"""merak-convert between the formats of other programs: rounds that end where they began."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_merak.cli import convert
from megatron_merak.formats.merak import read_merak, write_merak
from tests.formats.models import FAMILIES, assert_equal, state_of, tiny


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


def _pretrain(words: str) -> str:
    """What merak-pretrain-hf prints on one rank."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "pretrain_hf.py"), *words.split()]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
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

        from tests.formats.models import BASE

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


def test_flags_of_megatrons_converter(tmp_path):
    write_merak(state_of(tiny("qwen2")), tmp_path / "a", print)
    words = f"--model-type GPT --loader merak --saver mcore --load-dir {tmp_path}/a --save-dir {tmp_path}/b"
    assert convert.main([*words.split(), "--target-tensor-parallel-size", "2"]) == 0
    assert (tmp_path / "b" / "release" / "metadata.json").is_file()

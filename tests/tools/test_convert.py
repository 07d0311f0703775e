"""tools/convert.py: checkpoints become HuggingFace directories that compute the same, and the other
way round.
"""

import dataclasses
import json
import logging
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    PreTrainedTokenizerFast,
)

from megatron_merak.arguments import build_parser, read
from megatron_merak.checkpoint import store
from megatron_merak.checkpoint.begun import MARK, held, is_begun, marked
from megatron_merak.checkpoint.directory import read_manifest
from megatron_merak.checkpoint.stored import StoredSource, chosen
from megatron_merak.cli import convert
from megatron_merak.errors import CheckpointError
from megatron_merak.models.hf_config import hf_config
from megatron_merak.stages.saved_run import SavedRun
from tests.checkpoint.kills import DISK, NAMES, fork, kill_before_call
from tests.checkpoint.states import cut
from tests.models.families import (
    CONVERTIBLE,
    LLAMA,
    batch,
    blueprint_of,
    gpt,
    huggingface,
    named,
    reference,
)
from tests.ranks import run_ranks

TOOL = "convert"


def _our_weights(path):
    source = StoredSource(chosen(path, None))
    return {name: source.read(name) for name in source.names()}


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_a_directory_becomes_a_checkpoint_and_that_the_directory(name, tmp_path, tool, capsys):
    theirs = huggingface(name)
    theirs.save_pretrained(tmp_path / "hf")
    assert tool.main([str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    config = CONVERTIBLE[name]
    weights = _our_weights(tmp_path / "ours")
    ours = gpt(name, weights)
    assert weights.keys() == {key for key, _ in ours.named_parameters()}
    wanted, _ = reference(theirs, batch())
    torch.testing.assert_close(ours(**ours.batch_of(batch())), wanted, rtol=2e-6, atol=2e-6)

    assert tool.main([str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again) is type(theirs)
    assert again.state_dict().keys() == theirs.state_dict().keys()
    assert all(
        torch.equal(again.state_dict()[key], value) for key, value in theirs.state_dict().items()
    )
    flags = capsys.readouterr().out.splitlines()[1].split()
    own, _ = read(
        build_parser(),
        [*flags[4:-1], "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1", "--mock-data"],
    )
    assert hf_config(own.model) == hf_config(
        dataclasses.replace(config, seq_length=config.max_positions)
    )


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_model_that_was_saved_without_its_head_is_taken(name, tmp_path, tool):
    whole = huggingface(name)
    whole.base_model.save_pretrained(tmp_path / "base")
    assert tool.main([str(tmp_path / "base"), str(tmp_path / "ours")]) == 0
    assert tool.main([str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[key], value) for key, value in whole.state_dict().items())


def test_rope_scaling_may_have_its_old_name_and_the_checkpoint_has_no_seed_to_compare(
    tmp_path, tool
):
    huggingface("llama31").save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["rope_parameters"]["type"] = "llama3"
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert tool.main([str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    saved = SavedRun.read(read_manifest(tmp_path / "ours" / "iter_0000000")[1].meta, "x")
    assert saved.data is None and "seed" not in saved.config["train"]


def test_parts_of_a_checkpoint_are_joined_and_the_tokenizer_is_saved(tmp_path, tool):
    model = huggingface("starcoder2").to(torch.bfloat16)
    theirs = {name: value.detach() for name, value in model.named_parameters()}
    tensors = named("starcoder2", theirs)
    config = CONVERTIBLE["starcoder2"]
    shardings = blueprint_of(config, 2).plan.shardings
    meta = {
        "consumed_samples": 0,
        "optimizer_steps": 3,
        "config": {"model": dataclasses.asdict(config)},
    }
    meta["config"] |= {"train": {}, "optimizer": {}, "data": {}}
    run_ranks(_save_parts, 2, tmp_path / "run", tensors, shardings, meta)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "</s>": 1})), eos_token="</s>"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = [
        str(tmp_path / "run" / "iter_0000003"),
        str(tmp_path / "hf"),
        "--max-shard-size",
        "20KB",
    ]
    assert tool.main([*arguments, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert (
        again.dtype == torch.bfloat16
        and (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    )
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items()
    )
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token_id
        == again.config.eos_token_id
        == 1
    )


def _save_parts(rank, world_size, root, tensors, shardings, meta):
    shards = []
    for tensor in shardings:
        spans = tensor.intervals(rank, world_size)
        part = cut(tensors[tensor.name], tensor.dim, spans)
        shards.append(
            store.Shard(
                tensor.name,
                tensor.shape,
                tensor.dim,
                spans,
                part,
                rank == 0 or tensor.dim is not None,
            )
        )
    store.save(root, 3, {"model": shards}, meta, torch.distributed.group.WORLD, "cpu")


@pytest.mark.parametrize(
    ("target", "told"), [("run", "one is inside the other"), ("full", "it holds checkpoints")]
)
def test_a_target_that_would_be_mistaken_is_refused(target, told, tmp_path, tool, capsys):
    _make("run", tmp_path / "run")
    _make("run", tmp_path / "full")
    assert tool.main([str(tmp_path / "run"), str(tmp_path / target)]) == 1
    assert told in capsys.readouterr().err


def _convert(*arguments: object) -> int:
    return convert.main([str(argument) for argument in arguments])


def _kill_conversions(rank, world, root, calls, stride):
    """Kill conversions in both directions before every ``stride``-th of these calls; then start
    each again, which is refused only where a conversion is complete.
    """
    if rank == 0:
        logging.disable()
    model = AutoModelForCausalLM.from_pretrained(root / "hf")
    assert _convert(root / "hf", root / "reference") == 0
    wanted = _our_weights(root / "reference")
    kills = []
    for source, target in ((root / "hf", root / "ours"), (root / "reference", root / "opened")):
        kills.append(0)
        done = False
        while not done:

            def work(report, number=kills[-1] * stride, source=source, target=target):
                flags = ["--max-shard-size", "20KB"] if target.name == "opened" else []
                flags += ["--overwrite"] if target.exists() else []
                kill_before_call(number, calls)
                assert _convert(source, target, *flags) == 0

            done, _ = fork(work)
            interrupted = is_begun(target) or not held(target)
            status = _convert(source, target)
            assert status == 0 if interrupted else status == 1, f"after {kills[-1] * stride} calls"
            assert not (done and interrupted) and not is_begun(target)
            assert not [*target.glob("*.new"), *target.glob("*.old"), *target.glob(".being*")]
            if target.name == "ours":
                weights = _our_weights(target)
                assert weights.keys() == wanted.keys()
                assert all(torch.equal(weights[name], value) for name, value in wanted.items())
            else:
                again = AutoModelForCausalLM.from_pretrained(target).state_dict()
                assert again.keys() == model.state_dict().keys()
                assert all(
                    torch.equal(again[name], value) for name, value in model.state_dict().items()
                )
            kills[-1] += not done
            if kills[-1] % 2:
                shutil.rmtree(target)
    return kills


@pytest.mark.parametrize(
    ("calls", "stride"),
    [
        (NAMES | {"link", "symlink", "flush"}, 20),
        pytest.param(DISK | {"link", "symlink"}, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1500)
def test_a_killed_conversion_can_be_started_again(calls, stride, tmp_path, record_property):
    huggingface("llama").save_pretrained(tmp_path / "hf")
    [kills] = run_ranks(_kill_conversions, 1, tmp_path, calls, stride, timeout=1200.0)
    record_property("kills", sum(kills))
    assert min(kills) >= 1 and sum(kills) >= (3 if stride > 1 else 200), kills


def _content(directory):
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def test_what_is_in_the_target_is_replaced_if_asked_for(tmp_path, tool, capsys):
    huggingface("llama").save_pretrained(tmp_path / "hf")
    ours = tmp_path / "ours"
    opened = tmp_path / "opened"
    remedy = "Name another directory, or replace what it holds with --overwrite.\n"
    for source, target, names in (
        (tmp_path / "hf", ours, "iter_0000000, latest_checkpointed_iteration.txt"),
        (ours, opened, "config.json, generation_config.json, model.safetensors and 1 more"),
    ):
        assert tool.main([str(source), str(target)]) == 0
        assert MARK not in os.listdir(target)
        if target == opened:
            (target / "notes.txt").write_text("mine")
        before = _content(target)
        capsys.readouterr()
        assert tool.main([str(source), str(target)]) == 1
        assert capsys.readouterr().err == (
            f"TO {target}: it is not empty: it holds {names}. {remedy}"
        )
        assert _content(target) == before
        for path in target.rglob("*.safetensors"):
            path.write_bytes(b"torn")
        assert tool.main([str(source), str(target), "--overwrite"]) == 0
        assert _content(target).keys() == before.keys()
    assert (opened / "notes.txt").read_text() == "mine"
    AutoModelForCausalLM.from_pretrained(opened)

    (tmp_path / "file").touch()
    assert tool.main([str(tmp_path / "hf"), str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.endswith("file: it is not a directory. Name another one.\n")


def test_a_failed_conversion_leaves_no_mark_where_an_earlier_one_is(tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "config.json").write_text("{}")
    for target, left in ((earlier, ["config.json"]), (tmp_path / "new" / "deep", None)):
        with pytest.raises(CheckpointError), marked(target):
            assert is_begun(target)
            raise CheckpointError("tensor", "x", "is odd", "Give another")
        assert left == (os.listdir(target) if target.exists() else None)
    assert not (tmp_path / "new").exists()
    torn = tmp_path / "torn"
    with pytest.raises(KeyboardInterrupt), marked(torn):
        (torn / "half").touch()
        raise KeyboardInterrupt
    assert is_begun(torn)
    with marked(torn):
        pass
    assert os.listdir(torn) == ["half"]


@pytest.mark.parametrize("kind", ["megatron", "megatron-legacy"])
def test_a_conversion_to_megatron_is_replaced_and_a_run_of_it_is_not(kind, tmp_path, tool, capsys):
    huggingface("llama").save_pretrained(tmp_path / "hf")
    target = tmp_path / "theirs"
    words = [str(tmp_path / "hf"), str(target), "--to", kind]
    assert tool.main(words) == 0
    (target / "release").rename(target / "iter_0000003")
    assert tool.main(words) == 1
    assert tool.main([*words, "--overwrite"]) == 0
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "release"
    (target / "iter_0000003" / "config.json").unlink()
    assert tool.main([*words, "--overwrite"]) == 1
    assert "it holds checkpoints" in capsys.readouterr().err


def test_a_checkpoint_of_a_run_is_not_replaced(tmp_path, tool, capsys):
    huggingface("llama").save_pretrained(tmp_path / "hf")
    assert tool.main([str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    (tmp_path / "ours" / "iter_0000003").mkdir()
    assert tool.main([str(tmp_path / "hf"), str(tmp_path / "ours"), "--overwrite"]) == 1
    assert (
        "ours: it holds checkpoints, of which a run would load the newest"
        in capsys.readouterr().err
    )
    store.save(
        tmp_path / "run", 0, {"model": []}, {"config": {"train": {"train_iters": 5}}}, None, "cpu"
    )
    assert tool.main([str(tmp_path / "hf"), str(tmp_path / "run"), "--overwrite"]) == 1
    assert "run: it holds checkpoints" in capsys.readouterr().err


REFUSED = {
    "a damaged file": (["run", "out"], "was changed after it was written"),
    "an iteration that is not there": (
        ["run", "out", "--ckpt-step", "7"],
        "--ckpt-step 7: .*run has 3. ",
    ),
    "nothing": (["empty", "out"], "empty: it has no complete checkpoint"),
    "a config without weights": (["bare", "out"], "bare: it has no weights"),
    "a tokenizer for a checkpoint": (
        ["relu", "out", "--tokenizer", "x"],
        "--tokenizer x: only HuggingFace directories have one",
    ),
    "a base model without an output layer": (
        ["headless", "out"],
        "1 tensors of LlamaForCausalLM are missing: lm_head",
    ),
    "a quantized weight": (
        ["int8", "out"],
        "tensor model.norm.weight: its dtype is int8, and weights of a checkpoint",
    ),
    "no size": (["run", "out", "--max-shard-size", "abc"], "--max-shard-size abc: is not a size"),
    "a size for a checkpoint": (
        ["relu", "out", "--max-shard-size", "1GB"],
        "--max-shard-size 1GB: .* Leave it out",
    ),
    "a shape without a model type": (
        ["odd", "out"],
        "--swiglu off: no model of transformers has this",
    ),
}


@pytest.mark.parametrize("kind", ["mixtral", "relu"])
def test_a_model_that_the_gpt_of_flags_is_not_goes_both_ways(kind, tmp_path, tool, capsys):
    """merak-pretrain-hf trains it."""
    _make(kind, tmp_path / "hf")
    assert tool.main([str(tmp_path / "hf"), str(tmp_path / "checkpoint")]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == (
        f"merak-pretrain-hf --model {tmp_path}/hf --load {tmp_path}/checkpoint --finetune ..."
    )
    saved = read_manifest(tmp_path / "checkpoint" / "iter_0000000")[1].meta
    assert SavedRun.read(saved, "x").model["model_type"] in ("mixtral", "llama")
    assert tool.main([str(tmp_path / "checkpoint"), str(tmp_path / "again")]) == 0
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    two = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    case, tmp_path, tool, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    arguments, told = REFUSED[case]
    _make(arguments[0], tmp_path / arguments[0])
    assert tool.main(arguments) == 1
    error = capsys.readouterr().err
    assert re.search(told, error), error
    assert not (tmp_path / "out").exists()


def _make(kind, path):
    path.mkdir()
    if kind == "headless":
        huggingface("llama").base_model.save_pretrained(path)
    elif kind == "int8":
        huggingface("llama").save_pretrained(path)
        weights = load_file(path / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    elif kind in ("mixtral", "bare", "relu"):
        config = (
            MixtralConfig(num_local_experts=2, sliding_window=4)
            if kind == "mixtral"
            else AutoConfig.for_model(**hf_config(LLAMA))
        )
        if kind == "relu":
            config.hidden_act = "relu"
        small = {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 9,
        }
        config = type(config).from_dict(
            config.to_dict() | small | {"num_key_value_heads": 2, "head_dim": 4}
        )
        if kind == "bare":
            path.joinpath("config.json").write_text(json.dumps(config.to_dict()))
        else:
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
    elif kind in ("run", "odd"):
        model = dataclasses.asdict(LLAMA) | {"swiglu": kind == "run"}
        config = {"model": model, "train": {}, "optimizer": {}, "data": {}}
        meta = {"consumed_samples": 0, "optimizer_steps": 0, "config": config}
        weights = [store.Shard("model.norm.weight", (32,), None, (), torch.ones(32))]
        file = next(store.save(path, 3, {"model": weights}, meta, None, "cpu").glob("model-*"))
        if kind == "run":
            file.write_bytes(file.read_bytes()[:-1] + b"!")

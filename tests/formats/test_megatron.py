"""Distributed checkpoints of Megatron-LM, beside megatron-core itself."""

import argparse
import json
import os
import pickle

import pytest
import torch

from megatron_merak.checkpoint.foreign import FORMAT, METADATA
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.formats.dcp_files import DcpFiles, DcpTensor, StoredChunk, write_dcp
from megatron_merak.formats.megatron import COMMON, read_megatron, write_megatron
from megatron_merak.formats.megatron_directory import TRACKER

from .megatron_core import logits, their_model
from .models import FAMILIES, assert_equal, state_of, tiny

DIVISOR = 16  # 90 rows of the vocabulary become 96


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_megatron_core_loads_what_is_written_and_computes_the_same(family, tmp_path, core):
    from megatron.core import dist_checkpointing

    ours = tiny(family)
    path = write_megatron(state_of(ours), tmp_path / "out", DIVISOR)
    assert path.name == "release"
    theirs = their_model(ours.config)
    loaded = dist_checkpointing.load({"model": theirs.sharded_state_dict()}, str(path))
    theirs.load_state_dict(loaded["model"])
    tokens = torch.arange(24).view(2, 12) * 3 % 90
    with torch.no_grad():
        want = ours(tokens).logits
        got = logits(theirs, tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert_equal(read_megatron(tmp_path / "out", None, True), state_of(ours))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3_moe"])
def test_what_megatron_core_saves_is_read(family, tmp_path, core):
    from megatron.core import dist_checkpointing

    ours = tiny(family)
    theirs = their_model(ours.config)
    path = tmp_path / "iter_0000003"
    path.mkdir()
    (tmp_path / TRACKER).write_text("3")
    common = {"iteration": 3, "args": argparse.Namespace(consumed_train_samples=12)}
    dist_checkpointing.save({"model": theirs.sharded_state_dict(), **common}, str(path))
    state = read_megatron(tmp_path, _config(tmp_path, ours), True)
    assert (state.iteration, state.consumed_samples, state.has_optimizer) == (3, 12, False)
    tokens = torch.arange(20).view(2, 10) % 90
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(state.kinds["model"].read(name))
        torch.testing.assert_close(
            ours(tokens).logits, logits(theirs, tokens), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("write", [False, True], ids=["theirs", "ours"])
def test_optimizer_state_is_that_of_their_optimizer(tmp_path, core, write):
    """A step of their model and AdamW, saved by them and read here; written here and loaded there."""
    from megatron.core import dist_checkpointing

    ours = tiny("llama")
    model, optimizer = _stepped(ours.config, steps=3)
    path = tmp_path / "iter_0000003"
    path.mkdir()
    (tmp_path / TRACKER).write_text("3")
    sharded = model.sharded_state_dict(metadata={})
    content = {
        "model": sharded,
        "optimizer": optimizer.sharded_state_dict(sharded),
        "iteration": 3,
    }
    dist_checkpointing.save(content, str(path))
    state = read_megatron(tmp_path, _config(tmp_path, ours), True)
    assert (state.optimizer_steps, sorted(state.kinds)) == (3, ["exp_avg", "exp_avg_sq", "model"])
    query = state.kinds["exp_avg"].read("model.layers.1.self_attn.q_proj.weight")
    fused = model.decoder.layers[1].self_attention.linear_qkv.weight
    groups = optimizer.optimizer.state[fused]["exp_avg"].view(2, 4, 8, 32)
    assert torch.equal(query, groups[:, :2].reshape(32, 32)) and query.any()
    if not write:
        return
    written = write_megatron(state, tmp_path / "again", DIVISOR)
    assert_equal(read_megatron(tmp_path / "again", None, True), state)
    other, fresh = _stepped(ours.config, steps=1)
    sharded = other.sharded_state_dict(metadata={})
    template = {"model": sharded, "optimizer": fresh.sharded_state_dict(sharded, is_loading=True)}
    loaded = dist_checkpointing.load(template, str(written))
    other.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optimizer"])
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        rows = 90 if "embedding" in name or "output" in name else None  # others are padding
        assert torch.equal(one[:rows], two[:rows]), name
        before = optimizer.optimizer.state[one]
        after = fresh.optimizer.state[two]
        assert int(before["step"]) == int(after["step"]) == 3
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(before[kind][:rows], after[kind][:rows]), (name, kind)


def _stepped(config, steps):
    """Their model after some steps of their optimizer in fp32."""
    from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    torch.manual_seed(11)
    model = their_model(config)
    groups = [
        dict(
            params=[p for p in model.parameters() if (p.dim() > 1) == decay],
            **_GROUP,
            wd_mult=float(decay),
        )
        for decay in (True, False)
    ]
    inner = torch.optim.AdamW(groups, lr=0.01)

    def init(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if not optimizer.state[p]:
                    optimizer.state[p] = {
                        name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")
                    }

    # what its constructor does beside is to put a scale on a GPU
    optimizer = FP32Optimizer.__new__(FP32Optimizer)
    settings = OptimizerConfig(optimizer="adam", lr=0.01)
    MegatronOptimizer.__init__(optimizer, inner, settings, init)
    tokens = torch.arange(24).view(2, 12) % 90
    for _ in range(steps):
        logits(model, tokens).square().mean().backward()
        inner.step()
        inner.zero_grad()
    return model, optimizer


_GROUP = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_state_with_moments_and_masters_comes_back(family, tmp_path):
    state = state_of(tiny(family), steps=7, dtype=torch.bfloat16)
    assert write_megatron(state, tmp_path).name == "iter_0000007"
    assert_equal(read_megatron(tmp_path, None, True), state)


def test_a_checkpoint_is_replaced_once_the_new_one_is_complete(tmp_path):
    first = state_of(tiny("llama"))
    write_megatron(first, tmp_path)
    second = state_of(tiny("llama", vocab_size=80))
    source = second.kinds["model"]
    read = source.read

    def fails(name, dim=None, intervals=()):
        if name == "model.norm.weight":
            raise OSError(5, "Input/output error")
        return read(name, dim, intervals)

    source.read = fails
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_megatron(second, tmp_path)
    assert_equal(read_megatron(tmp_path, None, True), first)
    source.read = read
    write_megatron(second, tmp_path)
    assert_equal(read_megatron(tmp_path, None, True), second)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([TRACKER, "release"])


BAD = {
    "no permission": (lambda path: None, False, "--allow-pickle"),
    "truncated file": (
        lambda path: os.truncate(path / "__0_0.distcp", 5000),
        True,
        "ends at 5044|has 5000 bytes",
    ),
    "missing file": (
        lambda path: (path / "__0_0.distcp").unlink(),
        True,
        "No such file or directory",
    ),
    "damaged metadata": (lambda path: os.truncate(path / METADATA, 300), True, "cannot be parsed"),
    "code in metadata": (
        lambda path: (path / METADATA).write_bytes(_CODE),
        True,
        "os.system|posix.system",
    ),
    "code in common": (
        lambda path: (path / COMMON).write_bytes(_CODE),
        True,
        "os.system|posix.system",
    ),
    "other format": (lambda path: (path / FORMAT).write_text("{}"), True, "says no format"),
    "other layers": (
        lambda path: _edit(path, num_hidden_layers=3),
        True,
        "num_layers 2",
    ),
    "other inner size": (
        lambda path: _without_arguments(path, intermediate_size=40),
        True,
        r"linear_fc1.weight has shape \(2, 96, 32\), and the model of the config \(2, 80, 32\)",
    ),
    "a model with biases": (
        lambda path: _extend(path, "decoder.layers.self_attention.linear_qkv.bias"),
        True,
        "it has decoder.layers.self_attention.linear_qkv.bias, which the config's model",
    ),
    "other heads": (
        lambda path: _edit(path, num_attention_heads=8, head_dim=4),
        True,
        "num_attention_heads 4",
    ),
    "other rotary base": (
        lambda path: _edit(path, rope_parameters={"rope_theta": 5.0, "rope_type": "default"}),
        True,
        "rotary_base 10000",
    ),
    "another type": (lambda path: _edit(path, model_type="gemma"), True, "not known here"),
}


class _Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


_CODE = pickle.dumps(_Runs())


def _edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def _extend(path, name):
    """Write the store once more with a tensor more."""
    known = DcpFiles(path, True)
    more = DcpTensor((2, 64), torch.float32, (StoredChunk((0, 0), (2, 64)),))
    tensors = {**known.tensors, name: more}

    def values(name, chunk):
        return torch.zeros(chunk.shape, dtype=tensors[name].dtype)

    write_dcp(path, tensors, values, {})


def _without_arguments(path, **changes):
    _edit(path, **changes)
    torch.save({"iteration": 7}, path / COMMON)


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_are_refused_by_name(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, allow, message = BAD[case]
    change(write_megatron(state_of(tiny("llama"), steps=7), tmp_path))
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        state = read_megatron(tmp_path, None, allow)
        for source in state.kinds.values():
            for name in source.names():
                source.read(name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_chained_optimizers_have_numbers_before_their_names(tmp_path):
    """Those of experts and of all else, as Megatron-LM saves them for mixtures by default."""
    state = state_of(tiny("qwen3_moe"), steps=3)
    path = write_megatron(state, tmp_path)
    files = DcpFiles(path, True)
    stored = {}
    for name in files.tensors:
        number = 1 if ".experts." in name else 0
        stored[f"chained_{number}.{name}" if name.startswith("optimizer.") else name] = name
    tensors = {name: files.tensors[each] for name, each in stored.items()}
    values = {name: files.read(each) for name, each in stored.items()}

    def chunk_of(name, chunk):
        bounds = zip(chunk.offsets, chunk.shape, strict=True)
        return values[name][tuple(slice(start, start + size) for start, size in bounds)]

    write_dcp(path, tensors, chunk_of, {})
    assert_equal(read_megatron(tmp_path, None, True), state)


def test_a_state_without_moments_of_a_frozen_weight_is_refused(tmp_path):
    state = state_of(tiny("llama"), steps=3)
    del state.kinds["exp_avg"]._tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="model.norm.weight: the state has no exp_avg of it"):
        write_megatron(state, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_optimizer_state_of_one_number_of_ranks_is_refused(tmp_path):
    state = state_of(tiny("llama"))
    path = write_megatron(state, tmp_path)
    tensors = {
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": DcpTensor(
            (4,), torch.float32, (StoredChunk((0,), (4,)),)
        )
    }
    weights = DcpFiles(path, True)
    write_dcp(
        path,
        {**weights.tensors, **tensors},
        lambda name, chunk: torch.zeros(
            chunk.shape, dtype={**weights.tensors, **tensors}[name].dtype
        ),
        {},
    )
    with pytest.raises(CheckpointError, match="--dist-ckpt-optim-fully-reshardable"):
        read_megatron(tmp_path, None, True)


def _config(directory, model):
    path = directory / "config.json"
    path.write_text(model.config.to_json_string(use_diff=False))
    return path

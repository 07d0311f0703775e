"""Stores of torch.distributed.checkpoint: those of FSDP2 and torchtitan are read, ours are loaded by FSDP2."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron_merak.errors import CheckpointError
from megatron_merak.formats.dcp import halves_first, read_dcp, write_dcp_state
from megatron_merak.formats.dcp_files import (
    METADATA,
    DcpFiles,
    DcpTensor,
    StoredChunk,
    not_tiled,
    write_dcp,
)
from tests.ranks import run_ranks

from .models import assert_equal, state_of, tiny

FILE = "__0_0.distcp"


def _config(directory, model):
    path = directory / "model.json"
    path.write_text(model.config.to_json_string(use_diff=False))
    return path


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_a_state_comes_back(family, tmp_path):
    state = state_of(tiny(family), steps=7)
    write_dcp_state(state, tmp_path)
    again = read_dcp(tmp_path, None, True)
    assert_equal(again, PortableWithoutSamples(state))


def PortableWithoutSamples(state):
    """A store does not say how many samples there were."""
    import dataclasses

    return dataclasses.replace(state, consumed_samples=0)


def _train(model, optimizer, steps):
    for step in range(steps):
        tokens = (torch.arange(24).view(2, 12) * (step + 3)) % 90
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _sharded(family, seed=0):
    from torch.distributed.fsdp import fully_shard

    model = tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _their_store(rank, world, root):
    model, optimizer = _sharded("llama")
    _train(model, optimizer, 2)
    content = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(content, checkpoint_id=root / "theirs")
    whole = {
        kind: {name: _full(values) for name, values in content["model"].items()}
        if kind == "model"
        else {name: _full(each[kind]) for name, each in content["optim"]["state"].items()}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    state = read_dcp(root / "theirs", root / "model.json", True)
    assert (state.iteration, state.optimizer_steps) == (2, 2)
    for kind, tensors in whole.items():
        for name, values in tensors.items():
            assert torch.equal(state.kinds[kind].read(name), values), (kind, name)
            part = ((1, values.shape[0] - 1),)
            assert torch.equal(state.kinds[kind].read(name, 0, part), values[1:-1]), (kind, name)
    if rank == 0:
        write_dcp_state(state, root / "ours")
    dist.barrier()
    # another model and optimizer, which have other values, take what was written and go on alike
    other, fresh = _sharded("llama", seed=1)
    _train(other, fresh, 1)
    content = {
        "model": get_model_state_dict(other),
        "optim": get_optimizer_state_dict(other, fresh),
    }
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(content, checkpoint_id=root / "ours", planner=planner)
    set_model_state_dict(other, content["model"])
    set_optimizer_state_dict(other, fresh, content["optim"])
    _train(model, optimizer, 1)
    _train(other, fresh, 1)
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(_full(one), _full(two)), name


def _full(values):
    return values.full_tensor() if hasattr(values, "full_tensor") else values


def test_fsdp_of_two_ranks_is_read_and_loads_what_is_written(tmp_path):
    _config(tmp_path, tiny("llama"))
    run_ranks(_their_store, 2, tmp_path)


def test_names_of_torchtitan_and_their_pairs_of_rows(tmp_path):
    """A query times its own rotation is the same in both orders of rows."""
    ours = tiny("llama")
    titan = {}
    for name, values in ours.named_parameters():
        for theirs, our in (
            ("tok_embeddings", "model.embed_tokens"),
            ("output", "lm_head"),
            ("attention_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("attention.wq", "self_attn.q_proj"),
            ("attention.wk", "self_attn.k_proj"),
            ("attention.wv", "self_attn.v_proj"),
            ("attention.wo", "self_attn.o_proj"),
            ("feed_forward.w1", "mlp.gate_proj"),
            ("feed_forward.w2", "mlp.down_proj"),
            ("feed_forward.w3", "mlp.up_proj"),
        ):
            name = name.replace(our, theirs)
        heads = 4 if "wq" in name else 2
        if "wq" in name or "wk" in name:
            values = values.detach().view(heads, 2, 4, 32).transpose(1, 2).reshape(values.shape)
        titan[name.removeprefix("model.")] = values.detach()
    moments = {
        f"optimizer.state.{name}.{kind}": values + number
        for number, kind in enumerate(("exp_avg", "exp_avg_sq"), 1)
        for name, values in titan.items()
    }
    steps = {f"optimizer.state.{name}.step": torch.tensor(5.0) for name in titan}
    beside = {"train_state": {"step": 5}, "optimizer.param_groups.output.weight.lr": 0.1}
    dcp.save({**titan, **moments, **steps, **beside}, checkpoint_id=tmp_path, no_dist=True)
    state = read_dcp(tmp_path, _config(tmp_path, ours), True)
    assert state.optimizer_steps == 5
    for number, kind in enumerate(("model", "exp_avg", "exp_avg_sq")):
        for name, values in ours.named_parameters():
            assert torch.equal(state.kinds[kind].read(name), values + number), (kind, name)
    _check_rotation(titan["layers.0.attention.wq.weight"], ours)


def _check_rotation(pairs, ours):
    """torchtitan turns neighbouring rows as complex numbers, transformers halves."""
    angle = torch.outer(torch.arange(6.0), 1e4 ** (-torch.arange(0, 8, 2) / 8))
    hidden = torch.randn(6, 32)
    query = (hidden @ pairs.T).view(6, 4, 4, 2)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    turned = torch.view_as_real(torch.view_as_complex(query) * turn).flatten(2)
    cos = torch.cat([angle, angle], 1).cos()[None, None]
    sin = torch.cat([angle, angle], 1).sin()[None, None]
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    own = ours.model.layers[0].self_attn.q_proj(hidden).view(1, 6, 4, 8).transpose(1, 2)
    theirs, _ = apply_rotary_pos_emb(own, own, cos[0], sin[0])
    rows = torch.stack([halves_first(each.reshape(32, 1), 4)[:, 0] for each in turned])
    torch.testing.assert_close(rows.view(6, 4, 8), theirs[0].transpose(0, 1))


@st.composite
def boxes(draw):
    """A tensor's shape, and boxes that tile it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=3)))
    parts = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(parts) - 1))
        offsets, size = parts[at]
        dims = [dim for dim, extent in enumerate(size) if extent > 1]
        if not dims:
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, size[dim] - 1))
        first = size[:dim] + (cut,) + size[dim + 1 :]
        second = size[:dim] + (size[dim] - cut,) + size[dim + 1 :]
        moved = offsets[:dim] + (offsets[dim] + cut,) + offsets[dim + 1 :]
        parts[at : at + 1] = [(offsets, first), (moved, second)]
    return shape, [StoredChunk(*part) for part in draw(st.permutations(parts))]


@settings(max_examples=40, deadline=None)
@given(boxes(), st.integers(0, 2**31), st.booleans())
def test_parts_of_any_boxes_are_those_of_the_whole(tmp_path_factory, drawn, seed, small):
    shape, chunks = drawn
    root = tmp_path_factory.mktemp("store")
    whole = torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(seed))
    tensor = DcpTensor(shape, torch.int64, tuple(chunks))

    def values(name, chunk):
        slices = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.shape, strict=True))
        return whole[slices]

    write_dcp(root, {"x": tensor}, values, {"y": {"z": 3}}, file_bytes=1 if small else 1 << 30)
    files = DcpFiles(root, True)
    assert torch.equal(files.read("x"), whole) and files.object("y") == {"z": 3}
    into = {"x": torch.zeros(shape, dtype=torch.int64)}
    if whole.numel():
        dcp.load(into, checkpoint_id=root, no_dist=True)
        assert torch.equal(into["x"], whole)
    for dim, extent in enumerate(shape):
        if extent:
            spans = ((extent // 2, extent), (0, extent // 2))
            want = torch.cat([whole.narrow(dim, a, b - a) for a, b in spans], dim)
            assert torch.equal(files.read("x", dim, spans), want)
    files.close()


def test_boxes_that_do_not_tile_are_known():
    def problem(*parts):
        return not_tiled(DcpTensor((4, 2), torch.float32, tuple(StoredChunk(*p) for p in parts)))

    assert not problem(((0, 0), (4, 1)), ((0, 1), (1, 1)), ((1, 1), (3, 1)))
    assert "have 6 of 8" in problem(((0, 0), (3, 2)))
    assert "overlap" in problem(((0, 0), (3, 2)), ((2, 0), (1, 2)))
    assert "not inside" in problem(((1, 0), (4, 2)))


class _Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def _rewrite(path, change):
    metadata = pickle.loads((path / METADATA).read_bytes())
    change(metadata)
    (path / METADATA).write_bytes(pickle.dumps(metadata))


def _move(metadata, place):
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index].relative_path = place


def _cast(path):
    def change(metadata):
        metadata.state_dict_metadata["model.lm_head.weight"].properties.dtype = torch.float16

    _rewrite(path, change)


BAD = {
    "no permission": (lambda path: None, False, "--allow-pickle"),
    "no store": (lambda path: (path / METADATA).unlink(), True, "it has no .metadata"),
    "truncated file": (lambda path: os.truncate(path / FILE, 900), True, "would end at byte"),
    "missing file": (lambda path: (path / FILE).unlink(), True, "it is missing"),
    "damaged metadata": (lambda path: os.truncate(path / METADATA, 99), True, "cannot be read"),
    "code": (lambda path: (path / METADATA).write_bytes(pickle.dumps(_Runs())), True, "system"),
    "code in a record": (lambda path: _plant(path), True, "system"),
    "outside": (lambda p: _rewrite(p, lambda m: _move(m, "../x")), True, "outside"),
    "wrong dtype": (_cast, True, "torch.float32 where .* torch.float16 were said"),
    "a weight less": (
        lambda p: _rewrite(p, lambda m: m.state_dict_metadata.pop("model.lm_head.weight")),
        True,
        "not all tensors of the config's model",
    ),
    "a moment less": (
        lambda p: _rewrite(
            p, lambda m: m.state_dict_metadata.pop("optim.state.model.norm.weight.exp_avg")
        ),
        True,
        "it has no exp_avg for each of 21",
    ),
    "another model": (lambda path: _edit(path, num_hidden_layers=1), True, "does not have"),
    "another width": (
        lambda path: _edit(path, intermediate_size=40),
        True,
        r"has shape \(48, 32\)",
    ),
}


def _plant(path):
    """A record of torch.save whose pickle runs something when it is read."""
    with open(path / "planted.distcp", "wb") as file:
        torch.save(_Runs(), file)
    size = (path / "planted.distcp").stat().st_size

    def change(metadata):
        for index, place in metadata.storage_data.items():
            if index.fqn == "model.lm_head.weight":
                place.relative_path = "planted.distcp"
                place.offset = 0
                place.length = size

    _rewrite(path, change)


def _edit(path, **changes):
    import json

    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("case", BAD)
def test_bad_stores_are_refused_by_name(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, allow, message = BAD[case]
    write_dcp_state(state_of(tiny("llama"), steps=3), tmp_path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        state = read_dcp(tmp_path, None, allow)
        for source in state.kinds.values():
            for name in source.names():
                source.read(name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()

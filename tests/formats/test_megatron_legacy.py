"""Megatron-LM's checkpoints of one file for each rank, beside megatron-core itself."""

import argparse
import json
import os
import re
import shutil

import numpy
import pytest
import torch

from megatron_merak.checkpoint.begun import MARK
from megatron_merak.checkpoint.foreign import RANK_FILE
from megatron_merak.cli import convert
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.formats.megatron_directory import TRACKER
from megatron_merak.formats.megatron_legacy import read_megatron_legacy
from megatron_merak.formats.megatron_legacy_writing import RankFormat, write_megatron_legacy
from megatron_merak.formats.megatron_ranks import RankGrid
from megatron_merak.formats.merak import read_merak, write_merak
from tests.ranks import run_ranks

from .megatron_core import logits, their_model, without_a_gpu
from .models import FAMILIES, assert_equal, state_of, tiny

DIVISOR = 16  # 90 rows of the vocabulary become 96
TOKENS = torch.arange(24).view(2, 12) * 3 % 90
GRIDS = {
    "gpt2": (2, 2, 1),
    "llama": (4, 1, 1),  # more ranks than groups of queries
    "mistral": (1, 2, 1),
    "qwen2": (2, 1, 1),
    "qwen3": (2, 2, 1),
    "mixtral": (2, 1, 2),
    "qwen3_moe": (2, 2, 2),
}


def _write(model, directory, grid=(1, 1, 1), fused=False, divisor=DIVISOR):
    ranks = RankFormat(RankGrid(*grid), divisor, fused)
    return write_megatron_legacy(state_of(model), directory, ranks)


def _read(directory, config=None):
    told = []
    return read_megatron_legacy(directory, config, True, told.append), told


def _load(path):
    return torch.load(path / RANK_FILE, weights_only=False)


def _edit(path, change):
    """Save a rank's file once more, changed."""
    saved = _load(path)
    change(saved)
    torch.save(saved, path / RANK_FILE)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_megatron_core_loads_what_is_written_and_computes_the_same(family, tmp_path, core):
    """And what it saves then is read as the weights that it was made from."""
    ours = tiny(family)
    path = _write(ours, tmp_path / "out")
    theirs = their_model(ours.config)
    theirs.load_state_dict(_load(path / "mp_rank_00")["model"])
    with torch.no_grad():
        want = ours(TOKENS).logits
        torch.testing.assert_close(logits(theirs, TOKENS), want, rtol=1e-4, atol=1e-4)
    other = tmp_path / "theirs" / "iter_0000003"
    (other / "mp_rank_00").mkdir(parents=True)
    saved = {"model": theirs.state_dict_for_save_checkpoint(), "checkpoint_version": 3.0}
    saved |= {"iteration": 3, "args": argparse.Namespace(consumed_train_samples=12)}
    torch.save(saved, other / "mp_rank_00" / RANK_FILE)
    (tmp_path / "theirs" / TRACKER).write_text("3")
    state, _ = _read(tmp_path / "theirs", path)
    assert (state.iteration, state.consumed_samples, state.has_optimizer) == (3, 12, False)
    source = state.kinds["model"]
    for name, parameter in ours.named_parameters():
        assert torch.equal(source.read(name), parameter), name


ON_RANKS = {"llama": (2, 1, 1), "gpt2": (1, 2, 1), "qwen3_moe": (1, 1, 2)}


def _load_part(rank, world_size, directory):
    """What one of two ranks of megatron-core computes, once it loaded its file under each axis."""
    from megatron.core import parallel_state

    computed = None
    with pytest.MonkeyPatch.context() as patched:
        without_a_gpu(patched)
        for family, grid in ON_RANKS.items():
            sizes = RankGrid(*grid)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes.tensor,
                pipeline_model_parallel_size=sizes.pipeline,
                expert_model_parallel_size=sizes.expert,
            )
            model = their_model(tiny(family).config, grid)
            name = sizes.directory([*sizes.ranks()][rank])
            saved = torch.load(
                f"{directory}/{family}/release/{name}/{RANK_FILE}", weights_only=False
            )
            model.load_state_dict(saved["model"])
            if sizes.tensor == world_size:
                with torch.no_grad():
                    computed = logits(model, TOKENS)
            parallel_state.destroy_model_parallel()
    return computed


def test_ranks_of_megatron_core_load_their_parts(tmp_path):
    for family, grid in ON_RANKS.items():
        _write(tiny(family), tmp_path / family, grid)
    parts = run_ranks(_load_part, 2, str(tmp_path))
    with torch.no_grad():
        want = tiny("llama")(TOKENS).logits
    torch.testing.assert_close(torch.cat(parts, -1)[..., :90], want, rtol=1e-4, atol=1e-4)


def _whole_name(name, layer, expert):
    """The name of a tensor where one rank has all, given its rank's first layer and expert."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            parts[at] = str(int(part) + (layer if parts[at - 1] == "layers" else expert))
    return ".".join(parts)


def _part(name, whole, rank, ranks, gated):
    """A rank's part of a tensor of megatron-core, by its name."""
    if re.search(r"layer_?norm|position_embeddings|router|(linear_proj|linear_fc2)\.bias", name):
        return whole
    if "linear_proj" in name or "linear_fc2" in name:
        size = whole.shape[1] // ranks
        return whole[:, rank * size : (rank + 1) * size]
    if "linear_fc1" in name and gated:
        inner = whole.shape[0] // 2
        size = inner // ranks
        gate = whole[rank * size : (rank + 1) * size]
        up = whole[inner + rank * size : inner + (rank + 1) * size]
        return torch.cat([gate, up])
    size = whole.shape[0] // ranks
    return whole[rank * size : (rank + 1) * size]


def _queries(model, layer, rank, ranks):
    """A rank's queries, keys and values, group by group."""
    module = model.model.layers[layer].self_attn
    size = module.head_dim
    groups = model.config.num_key_value_heads
    queries = model.config.num_attention_heads // groups * size
    rows = []
    for group in range(rank * groups // ranks, (rank + 1) * groups // ranks):
        rows.append(module.q_proj.weight[group * queries : (group + 1) * queries])
        rows.append(module.k_proj.weight[group * size : (group + 1) * size])
        rows.append(module.v_proj.weight[group * size : (group + 1) * size])
    return torch.cat(rows)


@pytest.mark.parametrize("fused", [False, True], ids=["local", "fused"])
@pytest.mark.parametrize("family", sorted(GRIDS))
def test_parts_of_ranks_are_those_of_the_rules(family, fused, tmp_path):
    """QKV by groups, each half of SwiGLU, rows of the vocabulary, columns of what is row-parallel;
    and read again they are the weights that they were made from, bit for bit."""
    tensor, pipeline, expert = grid = GRIDS[family]
    ours = tiny(family)
    # both are padded to 96 rows
    whole = _load(_write(ours, tmp_path / "whole", fused=fused) / "mp_rank_00")["model"]
    path = _write(ours, tmp_path / "parts", grid, fused, DIVISOR // tensor)
    seen = set()
    for rank in RankGrid(*grid).ranks():
        saved = _load(path / RankGrid(*grid).directory(rank))
        assert saved["checkpoint_version"] == 3.0 and saved["args"].ckpt_format == "torch"
        assert saved["args"].tensor_model_parallel_size == tensor
        assert saved["args"].padded_vocab_size == 96
        for name, value in saved["model"].items():
            if name.endswith("_extra_state"):
                assert value is None
                continue
            key = _whole_name(name, rank.pipeline, rank.expert * 4 // expert)
            if key == "output_layer.weight" and key not in whole:  # tied
                assert pipeline == 2 and rank.pipeline == 1
                key = "embedding.word_embeddings.weight"
            seen.add(key)
            part = _part(key, whole[key], rank.tensor, tensor, gated=family != "gpt2")
            assert torch.equal(value, part), (rank, name)
        if family not in ("gpt2", "llama"):
            rows = saved["model"]["decoder.layers.0.self_attention.linear_qkv.weight"]
            layer = rank.pipeline if pipeline > 1 else 0
            assert torch.equal(rows, _queries(ours, layer, rank.tensor, tensor))
    assert seen == {name for name, value in whole.items() if value is not None}
    state, told = _read(tmp_path / "parts")
    assert_equal(state, state_of(ours))
    assert told == []


def _virtual(path):
    """Three layers on two ranks of two stages, of which one has no layer."""
    saved = _load(path / "mp_rank_00")
    shutil.rmtree(path / "mp_rank_00")
    model = saved["model"]
    layers: list[dict] = [{}, {}, {}]
    for name, value in model.items():
        found = re.search(r"layers\.(\d)", name)
        if found:
            layers[int(found[1])][name.replace(found[0], "layers.0")] = value
    first = {name: value for name, value in model.items() if name.startswith("embedding")}
    last = {name: model[name] for name in model if re.match(r"decoder\.final|output", name)}
    chunks = [[first | layers[0], layers[2]], [layers[1], last]]
    saved["args"] = None
    for rank, (one, two) in enumerate(chunks):
        folder = path / f"mp_rank_00_{rank:03d}"
        folder.mkdir()
        content = {**saved, "model0": one, "model1": two}
        del content["model"]
        torch.save(content, folder / RANK_FILE)


def _old(path):
    """Names from before megatron-core."""
    renamed = {
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": "post_attention_norm",
        "input_layernorm": "input_norm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "final_layernorm": "final_norm",
        "decoder.": "",
    }

    def change(saved):
        encoder = {}
        for name, value in saved["model"].items():
            if name.startswith("decoder.") and value is not None:
                for theirs, old in renamed.items():
                    name = name.replace(theirs, old)
                encoder[name] = value
        rows = saved["model"]["embedding.word_embeddings.weight"]
        embedding = {"word_embeddings": {"weight": rows}}
        output = {"weight": saved["model"]["output_layer.weight"]}
        parts = {"embedding": embedding, "encoder": encoder, "output_layer": output}
        saved["model"] = {"language_model": parts}

    _edit(path / "mp_rank_00", change)


def _grouped(path):
    """Experts of Transformer Engine's grouped products."""

    def change(saved):
        pattern = r"local_experts\.(\d)\.(linear_fc\d)\.weight$"
        saved["model"] = {
            re.sub(pattern, r"\2.weight\1", name): value for name, value in saved["model"].items()
        }

    _edit(path / "mp_rank_00", change)


def _packed(path):
    """All experts in one tensor."""

    def change(saved):
        model = saved["model"]
        for layer in range(2):
            before = f"decoder.layers.{layer}.mlp.experts."
            for number in (1, 2):
                names = [f"{before}local_experts.{e}.linear_fc{number}.weight" for e in range(4)]
                each = [model.pop(name).T.contiguous() for name in names]
                packed = torch.stack(each)
                shape = (32, -1) if number == 1 else (-1, 32)
                model[f"{before}weight{number}"] = packed.view(shape)

    _edit(path / "mp_rank_00", change)


def _bare(path):
    """Nothing but weights, under a name with the number of a stage, and states of fp8."""

    def change(saved):
        weights = {name: value for name, value in saved["model"].items() if value is not None}
        weights["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(4).byte()
        saved.clear()
        saved["model"] = weights

    _edit(path / "mp_rank_00", change)
    (path / "mp_rank_00").rename(path / "mp_rank_00_000")


FORMS = {
    "virtual stages": (_virtual, "llama", {"num_hidden_layers": 3}),
    "old names": (_old, "llama", {}),
    "grouped experts": (_grouped, "qwen3_moe", {}),
    "packed experts": (_packed, "mixtral", {}),
    "weights only": (_bare, "qwen2", {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_are_read(form, tmp_path):
    change, family, more = FORMS[form]
    ours = tiny(family, **more)
    change(_write(ours, tmp_path))
    assert_equal(_read(tmp_path)[0], state_of(ours))


def test_the_optimizers_state_is_left_out_and_that_is_told(tmp_path, core):
    """As it is in a file: with tensors that have attributes, enumerations, and random states."""
    from megatron.core.enums import ModelType

    ours = tiny("llama")
    path = _write(ours, tmp_path)
    assert _read(tmp_path)[1] == []

    def change(saved):
        master = torch.zeros(3)
        master.tensor_model_parallel = True
        saved["optimizer"] = {"optimizer": {"state": {0: {"exp_avg": master}}}}
        saved["args"].model_type = ModelType.encoder_or_decoder
        saved["args"].params_dtype = torch.bfloat16
        saved["rng_state"] = [{"np_rng_state": numpy.random.get_state()}]

    _edit(path / "mp_rank_00", change)
    state, told = _read(tmp_path)
    assert_equal(state, state_of(ours))
    assert len(told) == 1 and "the optimizer's state is left out" in told[0]


def test_a_checkpoint_is_replaced_once_the_new_one_is_complete(tmp_path):
    first = state_of(tiny("llama"))
    write_megatron_legacy(first, tmp_path, RankFormat(RankGrid(2, 2)))
    second = state_of(tiny("llama", vocab_size=80))
    source = second.kinds["model"]
    read = source.read

    def fails(name, dim=None, intervals=()):
        if name == "model.norm.weight":
            raise OSError(5, "Input/output error")
        return read(name, dim, intervals)

    source.read = fails
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_megatron_legacy(second, tmp_path, RankFormat())
    assert_equal(_read(tmp_path)[0], first)
    source.read = read
    write_megatron_legacy(second, tmp_path, RankFormat())
    assert_equal(_read(tmp_path)[0], second)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([TRACKER, "release"])


def _convert(*words):
    return convert.main([str(word) for word in words])


def test_a_round_by_the_command(tmp_path, capsys):
    """hf, a file for each of four ranks, merak; beside hf, merak. And what is told of AdamW."""
    ours = tiny("qwen2")
    ours.save_pretrained(tmp_path / "hf")
    ranks = ["--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2]
    legacy = ["--to", "megatron-legacy", *ranks]
    assert _convert(tmp_path / "hf", tmp_path / "megatron", *legacy) == 0
    folders = sorted(each.parent.name for each in tmp_path.glob(f"megatron/release/*/{RANK_FILE}"))
    assert folders == [f"mp_rank_{t:02d}_{p:03d}" for t in range(2) for p in range(2)]
    assert (tmp_path / "megatron" / TRACKER).read_text() == "release"
    assert _convert(tmp_path / "megatron", tmp_path / "round", "--allow-pickle") == 0
    assert _convert(tmp_path / "hf", tmp_path / "straight") == 0
    one, _ = read_merak(tmp_path / "round", None, True, print)
    two, _ = read_merak(tmp_path / "straight", None, True, print)
    assert_equal(one, two)
    assert_equal(one, state_of(ours))
    write_merak(state_of(tiny("llama"), steps=7), tmp_path / "trained", print)
    capsys.readouterr()
    assert _convert(tmp_path / "trained", tmp_path / "seven", "--to", "megatron-legacy") == 0
    assert "AdamW's state of 7 steps left out" in capsys.readouterr().out
    # as Megatron-LM's converter calls its formats
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / MARK).touch()  # of one that was killed
    (tmp_path / "again" / "iter_0000007.new").mkdir()
    words = ["--loader", "mcore", "--allow-pickle", "--saver", "mcore"]
    assert _convert(tmp_path / "seven", tmp_path / "again", *words) == 0
    assert (tmp_path / "again" / "iter_0000007" / "metadata.json").is_file()


class _Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def _truncate(path):
    size = (path / "mp_rank_01_000" / RANK_FILE).stat().st_size
    os.truncate(path / "mp_rank_01_000" / RANK_FILE, size - 700)


def _configure(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def _without_args(path, **changes):
    _configure(path, **changes)
    for folder in path.glob("mp_rank_*"):
        _edit(folder, lambda saved: saved.pop("args"))


def _change_weights(path, change):
    _edit(path / "mp_rank_00_000", lambda saved: change(saved["model"]))


_QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
BAD = {
    "truncated": (_truncate, "mp_rank_01_000/model_optim_rng.pt: it cannot be read"),
    "a missing rank": (
        lambda path: shutil.rmtree(path / "mp_rank_01_001"),
        r"mp_rank_01_001 is missing, of 2 x 2 x 1 ranks",
    ),
    "a missing rank, the last of its axis": (
        lambda path: [shutil.rmtree(each) for each in path.glob("mp_rank_01*")],
        "mp_rank_01_000 is missing, of 2 x 2 x 1",
    ),
    "a missing stage, without arguments": (
        lambda path: [
            _without_args(path),
            *map(shutil.rmtree, path.glob("mp_rank_*_001")),
        ],
        "its ranks have 1 layers, and the config 2",
    ),
    "ranks of another run": (
        lambda path: shutil.copytree(path / "mp_rank_01_000", path / "mp_rank_02_000"),
        "files of 3 ranks where the run had tensor_model_parallel_size 2",
    ),
    "other names": (
        lambda path: shutil.copytree(path / "mp_rank_01_000", path / "mp_rank_01"),
        "names of its directories differ",
    ),
    "two saves": (
        lambda path: _edit(path / "mp_rank_01_000", lambda saved: saved.update(iteration=9)),
        "it is of iteration 9 with 1 stages, and mp_rank_00_000 of iteration 0",
    ),
    "code": (
        lambda path: _edit(path / "mp_rank_01_001", lambda saved: saved.update(args=_Runs())),
        "posix.system|os.system",
    ),
    "no tracker": (
        lambda path: (path.parent / TRACKER).unlink(),
        "does not say which checkpoint is the newest",
    ),
    "a wrong tracker": (
        lambda path: (path.parent / TRACKER).write_text("latest"),
        "it says 'latest', which is no iteration",
    ),
    "a tracker of another checkpoint": (
        lambda path: (path.parent / TRACKER).write_text("5"),
        "iter_0000005 is not complete; release is",
    ),
    "another shape": (
        lambda path: _change_weights(path, lambda model: model.update({_QKV: torch.zeros(3, 32)})),
        r"linear_qkv.weight has shape \(3, 32\), and the model of the config \(32, 32\) for 2 ranks",
    ),
    "no tensor": (
        lambda path: _change_weights(path, lambda model: model.update({_QKV: 3})),
        "linear_qkv.weight in it is no tensor of floating-point numbers",
    ),
    "a missing weight": (
        lambda path: _change_weights(path, lambda model: model.pop(_QKV)),
        "linear_qkv.weight is not in it",
    ),
    "a weight too many": (
        lambda path: _change_weights(
            path, lambda model: model.update({_QKV.replace("weight", "bias"): torch.zeros(32)})
        ),
        "linear_qkv.bias, which the config's model does not have",
    ),
    "a changed model": (lambda path: _configure(path, num_hidden_layers=3), "num_layers 2"),
    "a changed model, without arguments": (
        lambda path: _without_args(path, intermediate_size=40),
        r"linear_fc1.weight has shape \(48, 32\), and the model of the config \(40, 32\)",
    ),
    "another type": (lambda path: _configure(path, model_type="gemma"), "not known here"),
    "no config": (lambda path: (path / "config.json").unlink(), "Name the model's config.json"),
    "no weights": (
        lambda path: _edit(path / "mp_rank_00_000", lambda saved: saved.pop("model")),
        "it holds no weights of a model",
    ),
    "no dictionary": (
        lambda path: torch.save([1], path / "mp_rank_00_000" / RANK_FILE),
        "it holds no dictionary",
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of four ranks."""
    directory = tmp_path_factory.mktemp("written")
    _write(tiny("llama"), directory, (2, 2, 1))
    return directory


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_are_refused_in_one_line(case, written, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(written, "in")
    change, message = BAD[case]
    change(tmp_path / "in" / "release")
    assert _convert("in", "out", "--allow-pickle") == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists() and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("grid", "experts", "message"),
    [
        (
            (1, 1, 1),
            2,
            r"local_experts.2.linear_fc1.weight, which the config's model does not have",
        ),
        ((1, 1, 2), 8, r"local_experts.2.linear_fc1.weight is not in it"),
        ((1, 1, 2), 3, "its experts are on 2 ranks, and the config has 3"),
    ],
)
def test_other_numbers_of_experts_are_refused(grid, experts, message, tmp_path):
    path = _write(tiny("mixtral"), tmp_path, grid)
    _configure(path, num_local_experts=experts)
    with pytest.raises(ConfigError, match=f"num_experts of the config {experts}"):
        _read(tmp_path)
    for folder in path.glob("mp_rank_*"):
        # the shape of a router says the number, too
        _edit(folder, lambda saved: _reroute(saved, experts))
    with pytest.raises(CheckpointError, match=message):
        _read(tmp_path)


def _reroute(saved, experts):
    del saved["args"]
    for name in saved["model"]:
        if name.endswith("router.weight"):
            saved["model"][name] = torch.zeros(experts, 32)


def test_pickles_are_read_on_request_only(written, tmp_path, capsys):
    assert _convert(written, tmp_path / "out") == 1
    assert "--allow-pickle" in capsys.readouterr().err
    assert _convert(written, tmp_path / "out", "--from", "megatron", "--allow-pickle") == 1
    assert "--from megatron-legacy" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_byte_that_changed_is_found(written, tmp_path, capsys):
    shutil.copytree(written, tmp_path / "in")
    path = tmp_path / "in" / "release" / "mp_rank_01_001" / RANK_FILE
    norm = torch.load(path, weights_only=False)["model"]["decoder.final_layernorm.weight"]
    # that of the first rank is read
    path = path.parent.parent / "mp_rank_00_001" / RANK_FILE
    data = bytearray(path.read_bytes())
    data[data.index(norm.numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert _convert(tmp_path / "in", tmp_path / "out", "--allow-pickle") == 1
    assert "Bad CRC-32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_old_orders_and_other_splits_are_refused(tmp_path):
    path = _write(tiny("llama"), tmp_path / "old")
    _old(path)
    _edit(path / "mp_rank_00", lambda saved: saved.update(checkpoint_version=1.0))
    with pytest.raises(CheckpointError, match="checkpoint_version is 1.0"):
        _read(tmp_path / "old")
    path = _write(tiny("mixtral"), tmp_path / "experts", (2, 1, 1))

    def of_one(saved):
        saved["args"].expert_tensor_parallel_size = 1

    _edit(path / "mp_rank_00", of_one)
    with pytest.raises(CheckpointError, match="expert_tensor_parallel_size 1, and tensor_model"):
        _read(tmp_path / "experts")
    path = _write(tiny("gpt2"), tmp_path / "tied", (1, 2, 1))
    _edit(path / "mp_rank_00_001", lambda saved: saved["model"]["output_layer.weight"].add_(1))
    with pytest.raises(CheckpointError, match="not the embedding, to which the config ties it"):
        _read(tmp_path / "tied")


@pytest.mark.parametrize(
    ("family", "grid", "message"),
    [
        ("llama", (3, 1, 1), "--target-tensor-parallel-size 3: the model has 4 attention heads"),
        ("llama", (8, 1, 1), "--target-tensor-parallel-size 8: the model has 4 attention heads"),
        ("llama", (1, 3, 1), "--target-pipeline-parallel-size 3: the model has 2 layers"),
        ("llama", (1, 1, 2), "--target-expert-parallel-size 2: the model has no experts"),
        ("mixtral", (1, 1, 8), "--target-expert-parallel-size 8: the model has 4 experts"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(family, grid, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        _write(tiny(family), tmp_path / "out", grid)
    assert not (tmp_path / "out").exists()

"""Reading HuggingFace directories: values against from_pretrained, memory, and every way in which
one can be bad.
"""

import copy
import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_merak.checkpoint import hf_files
from megatron_merak.checkpoint.hf import (
    HFSource,
    ModuleSource,
    fill,
    from_pretrained,
    save_hf,
    source_of,
)
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.errors import CheckpointError, ConfigError, DamagedError
from megatron_merak.graph.capture.empty import init_empty_weights

from .hf_models import CONFIGS, build, check_equal, content, model_class

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{n}-of-00004.safetensors" for n in (1, 2))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(a model, its directory of several files)."""
    directory = tmp_path_factory.mktemp("llama")
    model = build("llama")
    model.save_pretrained(directory, max_shard_size="30KB")
    return model, directory


@pytest.fixture
def damaged(llama, tmp_path):
    """The directory of ``llama``, to damage."""
    for path in llama[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def filled(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of an empty model, read in three intervals along its last dimension."""
    made = []
    for name, parameter in model.named_parameters():
        n = parameter.shape[-1]
        spans = ((n // 2, n), (0, n // 4), (n // 4, n // 2))
        made.append(
            Shard(
                name,
                tuple(parameter.shape),
                parameter.dim() - 1,
                spans,
                torch.empty(parameter.shape),
            )
        )
    fill(made, model.merak_source)
    return {
        s.name: torch.cat(
            [s.tensor[..., -(n := s.shape[-1]) // 2 :], s.tensor[..., : n - n // 2]], -1
        )
        for s in made
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_intervals_equal_what_transformers_loads(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    empty = from_pretrained(tmp_path)
    assert type(empty) is model_class(name)
    made = filled(empty)
    for parameter, tensor in model.named_parameters():
        n = tensor.shape[-1]
        want = torch.cat(
            [tensor[..., n // 2 :], tensor[..., : n // 4], tensor[..., n // 4 : n // 2]], -1
        )
        back = torch.cat([want[..., -(n // 2) :], want[..., : n - n // 2]], -1)
        assert torch.equal(made[parameter], back.detach()), parameter
    check_equal(dict(empty.named_buffers()), dict(model.named_buffers()))


def test_only_the_wanted_expert_is_read(tmp_path, monkeypatch):
    build("mixtral").save_pretrained(tmp_path)
    source = from_pretrained(tmp_path).merak_source
    read, seen = hf_files.WeightFiles.read, []

    def spy(self, name, take):
        values = read(self, name, take)
        seen.append((name, values.numel()))
        return values

    monkeypatch.setattr(hf_files.WeightFiles, "read", spy)
    part = source.read("model.layers.1.mlp.experts.gate_up_proj", 1, ((64, 80),))
    assert tuple(part.shape) == (4, 16, 32) and sum(count for _, count in seen) == part.numel()
    assert [name.rsplit(".", 2)[1] for name, _ in seen] == ["w3"] * 4
    seen.clear()
    source.read("model.layers.0.mlp.experts.down_proj", 0, ((2, 3),))
    assert [name for name, _ in seen] == ["model.layers.0.block_sparse_moe.experts.2.w2.weight"]


def test_shards_may_be_views_of_other_dtypes(llama):
    model, directory = llama
    held = torch.zeros(3, 96, 32, dtype=torch.bfloat16).transpose(1, 2)
    shard = Shard("lm_head.weight", (96, 32), 0, ((90, 96), (4, 6)), held[1].T[2:10])
    fill([shard], HFSource(directory))
    want = model.lm_head.weight.detach()
    assert (
        torch.equal(held[1].T[2:10], torch.cat([want[90:], want[4:6]]).bfloat16())
        and not held[0].any()
    )


def test_a_bare_model_finds_its_weights_in_a_headed_one_and_back(llama, tmp_path):
    from transformers import AutoModel, AutoModelForSequenceClassification

    model, directory = llama
    bare = from_pretrained(directory, auto_class=AutoModel, allow_extra=("lm_head.weight",))
    assert torch.equal(
        bare.merak_source.read("layers.0.mlp.up_proj.weight"),
        model.model.layers[0].mlp.up_proj.weight,
    )
    with pytest.raises(
        CheckpointError, match=r"1 tensors have no place in LlamaModel: lm_head.weight.*allow_extra"
    ):
        from_pretrained(directory, auto_class=AutoModel)
    model.model.save_pretrained(tmp_path)
    headed = from_pretrained(
        tmp_path, auto_class=AutoModelForSequenceClassification, allow_missing=("score.*",)
    )
    assert "score.weight" not in headed.merak_source.names()
    assert torch.equal(headed.merak_source.read("model.norm.weight"), model.model.norm.weight)
    with pytest.raises(
        CheckpointError, match=r"1 tensors of Llama\w+ are missing: score.weight.*allow_missing"
    ):
        from_pretrained(tmp_path, auto_class=AutoModelForSequenceClassification)


def test_a_part_of_a_model_brings_its_own_weights(llama):
    """A teacher inside a pupil: both, or one of the two, come from a directory."""
    model, directory = llama
    for pupil in (from_pretrained(directory), build("gpt2")):
        pupil.teacher = from_pretrained(directory)
        source = source_of(pupil)
        own = {*pupil.merak_source.names()} if hasattr(pupil, "merak_source") else set()
        assert {*source.names()} == own | {
            f"teacher.{name}" for name in pupil.teacher.merak_source.names()
        }
        for name, wanted in model.named_parameters():
            assert torch.equal(source.read(f"teacher.{name}"), wanted)
            assert source.shape(f"teacher.{name}") == tuple(wanted.shape)
            assert not own or torch.equal(source.read(name), wanted)
    assert (
        source_of(build("gpt2")) is None and source_of(pupil.teacher) is pupil.teacher.merak_source
    )


def test_tied_tensors(tmp_path):
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    source = from_pretrained(tmp_path).merak_source
    assert torch.equal(source.read("lm_head.weight"), source.read("transformer.wte.weight"))
    tensors = content(tmp_path)
    both = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"].clone()}
    save_file(both, tmp_path / "model.safetensors", {"format": "pt"})
    from_pretrained(tmp_path)
    both["lm_head.weight"][95, 31] += 1
    save_file(both, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"wte.weight and lm_head.weight are tied.*tie_word_embeddings"
    ):
        from_pretrained(tmp_path)
    untied = from_pretrained(tmp_path, tie_word_embeddings=False).merak_source
    assert not torch.equal(untied.read("lm_head.weight"), untied.read("transformer.wte.weight"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(tmp_path, value):
    weight = torch.randn(6, 4, dtype=torch.bfloat16)
    weight[1, 2] = value
    save_file({"layer.weight": weight}, tmp_path / "model.safetensors", {"format": "pt"})
    whole = Shard("layer.weight", (6, 4), None, (), torch.empty(6, 4))
    with pytest.raises(
        DamagedError, match="tensor layer.weight: 1 of 24 values that were read are NaN or infinite"
    ):
        fill([whole], HFSource(tmp_path))
    rest = Shard("layer.weight", (6, 4), 0, ((2, 6),), torch.empty(4, 4))
    fill([rest], HFSource(tmp_path))  # the rows that this rank needs are finite
    assert torch.equal(rest.tensor, weight[2:].float())


def test_a_real_module_is_a_source():
    model = build("llama")
    source = ModuleSource(model)
    weight = model.lm_head.weight.detach()
    assert source.read("lm_head.weight").data_ptr() == weight.data_ptr()
    assert torch.equal(
        source.read("lm_head.weight", 1, ((30, 32), (0, 2))),
        torch.cat([weight[:, 30:], weight[:, :2]], 1),
    )
    assert (
        source.shape("lm_head.weight") == (96, 32)
        and source.dtype("lm_head.weight") == torch.float32
    )
    with init_empty_weights():
        model.lm_head = torch.nn.Linear(32, 96, bias=False)
    assert sorted(set(source.names()) - set(ModuleSource(model).names())) == ["lm_head.weight"]


def test_without_weights_all_is_to_be_initialised(llama, tmp_path):
    (tmp_path / "config.json").write_bytes((llama[1] / "config.json").read_bytes())
    model = from_pretrained(tmp_path, num_hidden_layers=3, dtype=torch.bfloat16)
    assert (
        model.merak_source is None
        and model.config.num_hidden_layers == 3
        and model.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "t5"])
def test_dtypes_are_those_of_from_pretrained(name, tmp_path):
    model = build(name).to(torch.float16 if name == "t5" else torch.bfloat16)
    model.save_pretrained(tmp_path)
    set_config(tmp_path, dtype=None)
    theirs, ours = model_class(name).from_pretrained(tmp_path), from_pretrained(tmp_path)
    for tensors in ("named_parameters", "named_buffers"):
        want = {name: tensor.dtype for name, tensor in getattr(theirs, tensors)()}
        assert {name: tensor.dtype for name, tensor in getattr(ours, tensors)()} == want
    if name == "t5":
        assert {p.dtype for p in ours.parameters()} == {torch.float16, torch.float32}


# Damage: (what is done to the directory, what the error says).


def rewrite_index(directory: Path, change) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


def set_file(name: str):
    return lambda d: rewrite_index(
        d, lambda index: index["weight_map"].update({"lm_head.weight": name})
    )


def header(directory: Path, change) -> None:
    path = directory / FIRST
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    text = json.loads(data[8 : 8 + length])
    new = change(text) or json.dumps(text)
    path.write_bytes(struct.pack("<Q", len(new)) + new.encode() + data[8 + length :])


def entry(**fields):
    return lambda d: header(
        d, lambda text: next(v for k, v in text.items() if k[0] != "_").update(fields)
    )


def link_out(directory: Path) -> None:
    path = directory / FIRST
    outside = directory.parent / "outside.safetensors"
    os.replace(path, outside)
    path.symlink_to(outside)


def truncate(directory: Path, count: int) -> None:
    path = directory / SECOND
    path.write_bytes(path.read_bytes()[:count])


DAMAGE = {
    "parent directory": (set_file(f"../{FIRST}"), "not a file of this directory"),
    "absolute": (set_file("/etc/passwd.safetensors"), "not a file of this directory"),
    "hidden parent": (set_file("a/../../x.safetensors"), "not a file of this directory"),
    "backslash": (set_file("..\\x.safetensors"), "not a file of this directory"),
    "not a name": (set_file(["x"]), "not a file of this directory"),
    "other kind": (set_file("config.json"), "no .safetensors file"),
    "link out": (link_out, "which is outside of the model directory"),
    "missing file": (lambda d: (d / SECOND).unlink(), "No such file"),
    "a directory": (
        lambda d: [set_file("x.safetensors")(d), (d / "x.safetensors").mkdir()],
        "not a regular file",
    ),
    "not there": (
        lambda d: rewrite_index(d, lambda i: i["weight_map"].update(ghost=FIRST)),
        "ghost",
    ),
    "no map": (lambda d: (d / INDEX).write_text("{}"), "no weight_map"),
    "not an object": (lambda d: (d / INDEX).write_text("[1]"), "JSON list where an object belongs"),
    "not json": (lambda d: (d / INDEX).write_text("{"), "not valid JSON"),
    "deep json": (lambda d: (d / INDEX).write_text('{"a":' * 100_000), "not valid JSON"),
    "twice": (
        lambda d: (d / INDEX).write_text('{"weight_map": {"a": "b", "a": "c"}}'),
        "there twice",
    ),
    "cut short": (lambda d: truncate(d, -10), "bytes where its header describes"),
    "cut in the header": (lambda d: truncate(d, 100), "too few for its header"),
    "nearly empty": (lambda d: truncate(d, 3), "too few for its header"),
    "long header": (lambda d: (d / FIRST).write_bytes(b"\xff" * 99), "too few for its header"),
    "no json header": (lambda d: header(d, lambda text: "{]"), "not valid JSON"),
    "dtype": (entry(dtype="F8_E4M3"), "dtype F8_E4M3, which is not supported"),
    "shape": (entry(shape=[1, 2, 3]), "of shape"),
    "negative shape": (entry(shape=[-1, 32]), "its header describes"),
    "float shape": (entry(shape=[96.0, 32]), "its header describes"),
    "offsets": (entry(data_offsets=[4, 12292]), "of shape|leaves or overlaps"),
    "huge": (entry(shape=[1 << 40, 1 << 40]), "of shape"),
    "no shape": (entry(shape=None), "its header describes"),
    "no config": (lambda d: (d / "config.json").unlink(), "it has no config.json"),
    "bad config": (lambda d: (d / "config.json").write_text("llama"), "not valid JSON"),
    "other sizes": (lambda d: set_config(d, vocab_size=95), "has shape"),
    "too few layers": (
        lambda d: set_config(d, num_hidden_layers=1),
        "have no place in LlamaForCausalLM",
    ),
    "too many layers": (
        lambda d: set_config(d, num_hidden_layers=3),
        r"are missing: model.layers.2.*and \d more",
    ),
    "unknown type": (lambda d: set_config(d, model_type="llamma"), "nearest known type is llama"),
    "no type": (lambda d: set_config(d, model_type=None), "it has no model_type"),
    "own code": (
        lambda d: set_config(d, model_type="mine", auto_map={"AutoConfig": "m.C"}),
        "trust_remote_code",
    ),
    "quantised": (
        lambda d: set_config(d, quantization_config={"quant_method": "fp8"}),
        "quantized",
    ),
    "impossible": (lambda d: set_config(d, num_attention_heads=0), "its num_attention_heads is 0"),
}


def set_config(directory: Path, **fields) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_a_value_is_read(name, damaged, monkeypatch):
    damage, reason = DAMAGE[name]
    damage(damaged)

    def never(self, name, take):
        raise AssertionError("a value was read")

    monkeypatch.setattr(hf_files.WeightFiles, "read", never)
    with pytest.raises(CheckpointError, match=reason) as caught:
        from_pretrained(damaged)
    assert caught.value.what and caught.value.remedy


def test_a_link_inside_a_hub_cache_is_followed(damaged, tmp_path_factory):
    cache = tmp_path_factory.mktemp("hub") / "models--a--b"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in damaged.iterdir():
        os.replace(path, cache / "blobs" / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    assert HFSource(snapshot).read("model.norm.weight").numel() == 32


def test_a_directory_that_is_none():
    with pytest.raises(
        CheckpointError, match="/nonexistent/model: it does not exist.*nothing is downloaded"
    ):
        from_pretrained("/nonexistent/model")
    with pytest.raises(CheckpointError, match="not a directory"):
        HFSource("/nonexistent/model")


def test_an_override_that_the_config_does_not_know(damaged):
    with pytest.raises(ConfigError, match="Did you mean num_hidden_layers"):
        from_pretrained(damaged, num_hidden_layer=3)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_its_own_code(damaged, monkeypatch):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(damaged / "modules")
    )
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    set_config(damaged, model_type="own", auto_map=names, architectures=["OwnModel"])
    (damaged / "own.py").write_text(OWN_CODE)
    with pytest.raises(CheckpointError, match="has its own code"):
        from_pretrained(damaged)
    model = from_pretrained(damaged, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    held = [
        Shard(n, tuple(p.shape), None, (), torch.empty(p.shape))
        for n, p in model.named_parameters()
    ]
    fill(held, model.merak_source)
    save_hf(damaged / "out", model, held)
    again = from_pretrained(damaged / "out", trust_remote_code=True)
    assert type(again).__name__ == "OwnModel" and (damaged / "out" / "own.py").is_file()
    check_equal(content(damaged / "out"), content(damaged))


class Evil:
    def __reduce__(self):
        return (os.system, ("echo unpickled",))


def test_pickled_weights_need_the_flag_and_hold_tensors_only(llama, tmp_path):
    model, directory = llama
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="unpickling can run code"):
        from_pretrained(tmp_path)
    source = from_pretrained(tmp_path, allow_pickle=True).merak_source
    assert torch.equal(source.read("lm_head.weight", 0, ((3, 5),)), model.lm_head.weight[3:5])
    torch.save({"lm_head.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a file of tensors"):
        from_pretrained(tmp_path, allow_pickle=True)


def test_a_source_survives_a_copy_of_its_model(llama):
    source = from_pretrained(llama[1]).merak_source
    source.read("lm_head.weight")
    assert copy.deepcopy([source])[0] is source


def test_a_plain_module_reads_its_own_names(tmp_path):
    model = torch.nn.Linear(4, 3)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    with init_empty_weights():
        empty = torch.nn.Linear(4, 3)
    assert torch.equal(
        HFSource(tmp_path).bind(empty).read("weight", 1, ((2, 4),)), model.weight[:, 2:]
    )
    with pytest.raises(CheckpointError, match="are missing: 0.weight, 0.bias"):
        HFSource(tmp_path).bind(torch.nn.Sequential(empty))


def test_a_remedy_lets_through_what_is_missing_and_nothing_else(tmp_path):
    model = torch.nn.ModuleDict(
        {"body": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))}
    )
    save_file(
        {k: v for k, v in model.state_dict().items() if k.endswith("weight")},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=re.escape("from_pretrained(..., allow_missing=('body.*.bias',))")
    ):
        HFSource(tmp_path).bind(model)
    assert HFSource(tmp_path).bind(model, ("body.*.bias",)).names() == [
        "body.0.weight",
        "body.1.weight",
    ]

"""Training states in stores of torch.distributed.checkpoint, under any program's names, and what is
refused of them.
"""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_merak.checkpoint.hf import ModuleSource, Source
from megatron_merak.errors import CheckpointError, ConfigError
from megatron_merak.formats.dcp import (
    ACCELERATE,
    FLAVOURS,
    PLAIN,
    TORCHTITAN,
    read_dcp,
    write_dcp_state,
)
from megatron_merak.formats.state import PortableState

from ..checkpoint.hf_models import SIZES, build, configuration
from .titan import Titan

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(model: Any, forward: Callable[[torch.Tensor], torch.Tensor], steps: int = 2) -> Any:
    """The optimizer of a model after some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03125, betas=(0.875, 0.96875))
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(0, 96, (2, 8), generator=generator)
        forward(tokens).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Any]:
    """(a model, its optimizer after two steps)."""
    model: Any = build("llama")
    return model, trained(model, lambda tokens: model(input_ids=tokens).logits)


@pytest.fixture(scope="module")
def config(tmp_path_factory, llama) -> Path:
    directory = tmp_path_factory.mktemp("config")
    llama[0].config.save_pretrained(directory)
    return directory


def plain(llama: tuple[Any, Any]) -> dict[str, Any]:
    model, optimizer = llama
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def save(state: dict[str, Any], directory: Path) -> Path:
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def read(directory: Path, config: Path | None = None, **options: Any) -> PortableState:
    return read_dcp(directory, config, allow_pickle=True, **options)


class Values(Source):
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def read(self, name: str, dim: int | None = None, intervals: Any = ()) -> torch.Tensor:
        tensor = self._tensors[name]
        if dim is None:
            return tensor
        return torch.cat([tensor.narrow(dim, a, b - a) for a, b in intervals], dim)


def state_of(model: Any, optimizer: Any, **fields: Any) -> PortableState:
    named = dict(model.named_parameters())
    moments = {
        kind: Values({name: optimizer.state[p][kind] for name, p in named.items()})
        for kind in ("exp_avg", "exp_avg_sq")
    }
    kinds = {"model": ModuleSource(model), **moments}
    steps = int(next(iter(optimizer.state.values()))["step"])
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    defaults = {
        "iteration": 7,
        "optimizer_steps": steps,
        "consumed_samples": 28,
        "groups": [{**group, "params": list(named)}],
    }
    return PortableState(kinds, model.config.to_dict(), **{**defaults, **fields})


def assert_equal(found: PortableState, model: Any, optimizer: Any) -> None:
    """Weights and moments equal those of a transformers model, to the bit."""
    named = dict(model.named_parameters())
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        assert sorted(found.kinds[kind].names()) == sorted(named)
        for name, parameter in named.items():
            want = parameter if kind == "model" else optimizer.state[parameter][kind]
            assert torch.equal(found.kinds[kind].read(name), want), (kind, name)


@pytest.mark.parametrize(
    ("key", "wrapped"),
    [
        (lambda n: n, "optim"),
        (lambda n: f"model.{n}", "optim"),
        (lambda n: f"module.{n}", "optimizer"),
        (lambda n: f"app.model.{n}", "app.optim"),
        (lambda n: f"state.m.{n}", "state.o"),
        (lambda n: f"m._orig_mod.{n.replace('layers.1.', 'layers.1._orig_mod.')}", "o"),
    ],
)
def test_prefixes_are_found(key, wrapped, llama, config, tmp_path):
    model, optimizer = llama
    state: dict[str, Any] = {key(n): t for n, t in model.state_dict().items()}
    for name, values in get_optimizer_state_dict(model, optimizer)["state"].items():
        state |= {f"{wrapped}.state.{name}.{kind}": value for kind, value in values.items()}
    lines: list[str] = []
    found = read(save(state, tmp_path), config, say=lines.append)
    assert_equal(found, model, optimizer)
    assert (found.iteration, found.optimizer_steps, found.groups) == (2, 2, [])
    assert f"under {wrapped}.state" in lines[0]


def test_a_directory_of_steps_is_not_guessed(llama, config, tmp_path):
    save(plain(llama), tmp_path / "step-10")
    with pytest.raises(CheckpointError, match="no .metadata, but step-10. Give one of these"):
        read(tmp_path, config)


def test_weights_alone_are_a_state_without_a_run(llama, config, tmp_path):
    found = read(save({"model": llama[0].state_dict()}, tmp_path), config)
    assert not found.has_optimizer
    assert (found.iteration, found.optimizer_steps) == (0, 0)
    assert list(found.kinds) == ["model"]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_is_written_is_read_again(flavour, llama, tmp_path):
    model, optimizer = llama
    state = state_of(model, optimizer)
    write_dcp_state(state, tmp_path, flavour, chunk_bytes=1000)
    found = read(tmp_path)
    assert_equal(found, model, optimizer)
    samples = 0 if flavour == TORCHTITAN else 28
    assert (found.iteration, found.optimizer_steps, found.consumed_samples) == (7, 2, samples)
    assert [sorted(group["params"]) for group in found.groups] == [
        sorted(name for name, _ in model.named_parameters())
    ]
    assert found.groups[0]["lr"] == 0.03125 and tuple(found.groups[0]["betas"]) == (0.875, 0.96875)
    if flavour == ACCELERATE:
        assert_equal(read(tmp_path / "pytorch_model_fsdp_0"), model, optimizer)
    assert found.config == json.loads((tmp_path / "config.json").read_text())


def test_another_store_is_replaced_and_other_files_stay(llama, tmp_path):
    state = state_of(*llama)
    (tmp_path / "notes.txt").write_text("mine")
    write_dcp_state(state, tmp_path, ACCELERATE)
    (tmp_path / "__0_9.distcp").write_bytes(b"old")
    write_dcp_state(state, tmp_path, PLAIN)
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert files == [".metadata", "__0_0.distcp", "config.json", "notes.txt"]


def test_without_links_the_metadata_comes_last(llama, tmp_path, monkeypatch):
    """A kill then leaves no store, rather than the names of one and the tensors of another."""
    write_dcp_state(state_of(*llama), tmp_path, PLAIN)
    calls = []
    real = os.replace

    def no_link(*paths: Any, **options: Any) -> None:
        raise PermissionError(errno.EPERM, "no links")

    def replaced(one: Any, other: Any) -> None:
        if Path(other).parent == tmp_path:
            assert not (tmp_path / ".metadata").exists()
            calls.append(Path(other).name)
        real(one, other)

    monkeypatch.setattr(os, "symlink", no_link)
    monkeypatch.setattr(os, "replace", replaced)
    write_dcp_state(state_of(*llama), tmp_path, PLAIN)
    assert calls == ["__0_0.distcp", "config.json", ".metadata"]
    assert_equal(read(tmp_path), *llama)


def test_a_writing_that_fails_leaves_the_old_store(llama, tmp_path):
    state = state_of(*llama)
    write_dcp_state(state, tmp_path, PLAIN)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    class Failing(Values):
        def read(self, name: str, dim: int | None = None, intervals: Any = ()) -> torch.Tensor:
            raise CheckpointError("tensor", name, "it is damaged", "Copy it again")

    kinds = {**state.kinds, "exp_avg_sq": Failing(state.kinds["exp_avg_sq"]._tensors)}
    with pytest.raises(CheckpointError, match="it is damaged"):
        write_dcp_state(PortableState(kinds, state.config), tmp_path, PLAIN)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_plain_store_is_what_torch_restores_from_it_alone(llama, tmp_path):
    model, optimizer = llama
    write_dcp_state(state_of(model, optimizer), tmp_path / "store", PLAIN)
    dcp_to_torch_save(tmp_path / "store", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    want = get_optimizer_state_dict(model, optimizer)
    assert found["optim"]["param_groups"][0]["params"] == want["param_groups"][0]["params"]
    assert found["model"].keys() == model.state_dict().keys()
    for name, values in want["state"].items():
        assert all(torch.equal(found["optim"]["state"][name][k], v) for k, v in values.items())


def test_master_weights_are_written_and_moments_of_bf16_read_as_fp32(llama, config, tmp_path):
    model, optimizer = llama
    masters = Values({n: p.detach() for n, p in model.named_parameters()})
    rounded = Values({n: p.detach().bfloat16() for n, p in model.named_parameters()})
    state = state_of(model, optimizer)
    kinds = {**state.kinds, "model": rounded, "master": masters}
    write_dcp_state(PortableState(kinds, state.config, 7, 2), tmp_path / "a", PLAIN)
    assert_equal(read(tmp_path / "a"), model, optimizer)

    stored = plain(llama)
    stored["model"] = {n: t.bfloat16() for n, t in stored["model"].items()}
    for values in stored["optim"]["state"].values():
        values["exp_avg"] = values["exp_avg"].bfloat16()
    found = read(save(stored, tmp_path / "b"), config)
    assert found.kinds["model"].dtypes() == [torch.bfloat16]
    assert found.kinds["exp_avg"].dtypes() == [torch.float32]
    want = stored["optim"]["state"][NORM]["exp_avg"].float()
    assert torch.equal(found.kinds["exp_avg"].read(NORM), want)


def test_of_tied_weights_one_is_read_and_every_name_is_written(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    optimizer = trained(model, lambda tokens: model(input_ids=tokens).logits)
    model.config.save_pretrained(tmp_path / "config")
    state = plain((model, optimizer))
    found = read(save(state, tmp_path / "a"), tmp_path / "config")
    assert_equal(found, model, optimizer)
    write_dcp_state(found, tmp_path / "b", PLAIN)
    theirs = {"model": {n: torch.zeros_like(t) for n, t in model.state_dict().items()}}
    dcp.load(theirs, checkpoint_id=tmp_path / "b", no_dist=True)
    assert torch.equal(theirs["model"]["lm_head.weight"], model.lm_head.weight)
    assert_equal(read(tmp_path / "b"), model, optimizer)
    state["model"]["lm_head.weight"] = state["model"]["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match="tied in the model, but have different values"):
        read(save(state, tmp_path / "c"), tmp_path / "config")


def test_names_of_files_and_what_they_merge_into(tmp_path):
    """Of a program that trains the tensors that save_pretrained writes, with experts one by one."""
    model: Any = build("mixtral")
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert len(tensors) > len(model.state_dict())
    moments = {
        name: {"exp_avg": 2 * tensor, "exp_avg_sq": tensor * tensor, "step": torch.tensor(4.0)}
        for name, tensor in tensors.items()
    }
    state = {"model": tensors, "optim": {"state": moments}}
    found = read(save(state, tmp_path / "store"), tmp_path / "model")
    assert found.optimizer_steps == 4
    for name, parameter in model.named_parameters():
        assert torch.equal(found.kinds["model"].read(name), parameter)
        assert torch.equal(found.kinds["exp_avg"].read(name), 2 * parameter)
        assert torch.equal(found.kinds["exp_avg_sq"].read(name), parameter * parameter)


# ---- torchtitan


def titan_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """What torchtitan saves: the weights outside, all else under its name."""
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
        "lr_scheduler": {"last_epoch": 2, "base_lrs": [0.1]},
        "dataloader": {"dp_rank_0": b"state"},
        "train_state": {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": 32},
    }


@pytest.fixture(scope="module")
def titan() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Titan(configuration("llama"))
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.RMSNorm)):
        torch.nn.init.normal_(norm.weight, 1.0)
    return model, trained(model, model)


def test_torchtitans_llama_computes_the_same(titan, config, tmp_path):
    model, optimizer = titan
    lines: list[str] = []
    found = read(save(titan_state(model, optimizer), tmp_path), config, say=lines.append)
    assert "torchtitan's names of LlamaForCausalLM, state of AdamW after 2 steps" in lines[0]
    assert (found.iteration, found.optimizer_steps) == (2, 2)
    theirs: Any = build("llama", seed=9)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(found.kinds["model"].read(name))
    tokens = torch.randint(0, 96, (3, 16))
    torch.testing.assert_close(theirs(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)
    part = found.kinds["model"].read("model.layers.1.self_attn.q_proj.weight", 0, ((3, 7),))
    assert torch.equal(part, theirs.model.layers[1].self_attn.q_proj.weight[3:7])
    check_next_step(theirs, found, model, optimizer)


def check_next_step(theirs: Any, found: PortableState, model: Any, optimizer: Any) -> None:
    """One more step from the moments that were read has the same effect in both programs."""
    other = torch.optim.AdamW(theirs.parameters(), lr=0.03125, betas=(0.875, 0.96875))
    for name, parameter in theirs.named_parameters():
        other.state[parameter] = {
            "step": torch.tensor(float(found.optimizer_steps)),
            **{k: found.kinds[k].read(name).clone() for k in ("exp_avg", "exp_avg_sq")},
        }
    before = {n: t.clone() for n, t in model.state_dict().items()}
    kept = optimizer.state_dict()
    tokens = torch.randint(0, 96, (3, 16))
    for forward, each in (
        (lambda: theirs(input_ids=tokens).logits, other),
        (lambda: model(tokens), optimizer),
    ):
        forward().logsumexp(-1).mean().backward()
        each.step()
        each.zero_grad()
    torch.testing.assert_close(theirs(input_ids=tokens).logits, model(tokens), rtol=1e-3, atol=1e-3)
    model.load_state_dict(before)
    optimizer.load_state_dict(kept)


def test_torchtitan_loads_what_is_written_for_it(titan, config, tmp_path):
    model, optimizer = titan
    names = {f"state.{n}.step" for n, _ in model.named_parameters()}
    found = read(save(titan_state(model, optimizer), tmp_path / "theirs"), config)
    write_dcp_state(found, tmp_path / "ours", TORCHTITAN, chunk_bytes=700)
    fresh = Titan(configuration("llama"))
    other = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)  # adds initial_lr
    assert schedule.last_epoch == 0
    state = {
        **{n: t for n, t in get_model_state_dict(fresh).items() if n != "freqs_cis"},
        "optimizer": get_optimizer_state_dict(fresh, other, options=FLAT),
        "train_state": {"step": 0, "ntokens_seen": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    set_optimizer_state_dict(fresh, other, state["optimizer"], options=FLAT)
    assert state["train_state"]["step"] == 2
    assert other.param_groups[0]["betas"] == (0.875, 0.96875)
    for name, parameter in fresh.named_parameters():
        own = model.get_parameter(name)
        assert torch.equal(parameter, own), name
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(other.state[parameter][kind], optimizer.state[own][kind]), name
    assert len(names) == len(other.state)


def test_names_of_todays_torchtitan_are_there_too(titan, config, tmp_path):
    model, optimizer = titan

    def todays(name: str) -> str:
        for part in ("wq", "wk", "wv"):
            name = name.replace(f"attention.{part}.", f"attention.qkv_linear.{part}.")
        return name.replace("output.weight", "lm_head.weight")

    state = titan_state(model, optimizer)
    renamed = {todays(k): v for k, v in state.items() if k != "optimizer"}
    renamed["optimizer"] = {todays(k): v for k, v in state["optimizer"].items()}
    old = read(save(state, tmp_path / "old"), config)
    new = read(save(renamed, tmp_path / "new"), config)
    for kind, source in old.kinds.items():
        for name in source.names():
            assert torch.equal(source.read(name), new.kinds[kind].read(name))
    write_dcp_state(new, tmp_path / "ours", TORCHTITAN)
    theirs = {todays(n): torch.zeros_like(p) for n, p in model.named_parameters()}
    dcp.load(theirs, checkpoint_id=tmp_path / "ours", no_dist=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(theirs[todays(name)], parameter)
    assert read(tmp_path / "ours").iteration == 2


def test_torchtitans_qwen3_has_its_rows_as_transformers_has(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model: Any = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    optimizer = trained(model, lambda tokens: model(input_ids=tokens).logits)
    write_dcp_state(state_of(model, optimizer), tmp_path, TORCHTITAN)
    q = model.model.layers[1].self_attn.q_proj.weight
    norm = model.model.layers[0].self_attn.k_norm.weight
    theirs = {
        "layers.1.attention.wq.weight": torch.zeros_like(q),
        "layers.0.attention.k_norm.weight": torch.zeros_like(norm),
    }
    dcp.load(theirs, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(theirs["layers.1.attention.wq.weight"], q)
    assert torch.equal(theirs["layers.0.attention.k_norm.weight"], norm)
    assert_equal(read(tmp_path), model, optimizer)


def test_a_model_that_torchtitan_does_not_have(tmp_path):
    model: Any = build("gpt2")
    state = PortableState({"model": ModuleSource(model)}, model.config.to_dict())
    with pytest.raises(ConfigError, match="torchtitan has no gpt2"):
        write_dcp_state(state, tmp_path / "new", TORCHTITAN)
    assert not (tmp_path / "new").exists()


# ---- what is refused


def each(state: dict[str, Any], change: Callable[[str, dict[str, Any]], object]) -> None:
    for name, values in state["optim"]["state"].items():
        change(name, values)


def numbered(state: dict[str, Any]) -> None:
    values = list(state["optim"]["state"].values())
    state["optim"] = {"state": dict(enumerate(values))}


def of_another(state: dict[str, Any]) -> None:
    each(state, lambda name, values: values.clear() or values.update(momentum_buffer=torch.ones(1)))


def twice(state: dict[str, Any]) -> None:
    state["ema"] = {name: value.clone() for name, value in state["model"].items()}


def set_step(state: dict[str, Any], value: Any) -> None:
    state["optim"]["state"][NORM]["step"] = value


def of_model(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["model"].__setitem__(name, value)


def of_norm(kind: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["optim"]["state"][NORM].__setitem__(kind, value)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "missing": (lambda s: s["model"].pop(NORM), "1 of 21 tensors of Llama.* missing: model.norm"),
    "extra": (of_model("model.more", torch.ones(2)), "1 tensors have no place in .*: model.more"),
    "shape": (of_model(NORM, torch.ones(31)), r"model.norm.weight has shape \(31,\), and"),
    "integers": (of_model(NORM, torch.ones(32).int()), "model.norm.weight has dtype int32"),
    "twice": (twice, "more than once: after 'model.' and 'ema.'"),
    "none": (lambda s: s.__setitem__("model", {"a": torch.ones(1)}), "none of its tensors"),
    "some state": (lambda s: s["optim"]["state"].pop(NORM), "1 of 21 exp_avg .*: model.norm"),
    "half a state": (
        lambda s: s["optim"]["state"][NORM].pop("exp_avg_sq"),
        "1 of 21 exp_avg_sq .* are missing: model.norm.weight",
    ),
    "a step": (lambda s: s["optim"]["state"][NORM].pop("step"), "1 of 21 step .*: model.norm"),
    "extra state": (
        lambda s: s["optim"]["state"].__setitem__("x", s["optim"]["state"][NORM]),
        "1 exp_avg have no place in .*: x",
    ),
    "shape of state": (of_norm("exp_avg", torch.ones(3)), r"exp_avg model.norm.weight has shape"),
    "fp64": (of_norm("exp_avg", torch.ones(32).double()), "exp_avg model.norm.weight has dtype"),
    "steps": (of_norm("step", torch.tensor(3.0)), "different numbers of steps: 2 of .*, 3 of"),
    "half": (lambda s: each(s, lambda n, v: v.update(step=torch.tensor(1.5))), "its step is 1.5"),
    "nan": (of_norm("step", torch.tensor(float("nan"))), "is nan, not a number of steps"),
    "text": (of_norm("step", "two"), "is 'two', not a number of steps"),
    "numbers": (numbered, "has numbers in place of names .optim.state.0."),
    "sgd": (of_another, "state of its optimizer is momentum_buffer"),
    "amsgrad": (
        lambda s: each(s, lambda n, v: v.update(max_exp_avg_sq=v["exp_avg_sq"])),
        "state of its optimizer is max_exp_avg_sq",
    ),
    "two": (lambda s: s.__setitem__("other", s["optim"]), "2 optimizers: optim., other."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_fit(case, llama, config, tmp_path):
    change, text = REFUSED[case]
    model, _ = llama
    state = plain(llama)
    state["model"] = dict(state["model"])
    state["optim"] = {"state": {n: dict(v) for n, v in state["optim"]["state"].items()}}
    change(state)
    save(state, tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match=text) as raised:
        read(tmp_path, config)
    assert "\n" not in str(raised.value)
    assert sorted(os.listdir(tmp_path)) == before


def test_without_a_config_the_flag_is_named(llama, tmp_path):
    save(plain(llama), tmp_path)
    with pytest.raises(CheckpointError, match="no config.json.*with --config DIR"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        read_dcp(tmp_path)


def test_a_state_that_lacks_a_tensor_is_not_written(llama, tmp_path):
    state = state_of(*llama)
    tensors = dict(state.kinds["exp_avg"]._tensors)
    del tensors[EMBEDDING]
    kinds = {**state.kinds, "exp_avg": Values(tensors)}
    with pytest.raises(CheckpointError, match="parameter groups 1: they are not the parameters"):
        write_dcp_state(replace(state, groups=[{"params": [NORM]}]), tmp_path / "new")
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}: the state has no exp_avg"):
        write_dcp_state(PortableState(kinds, state.config), tmp_path / "new")
    assert not (tmp_path / "new").exists()

"""save_hf against save_pretrained: the same tensors under the same names, whatever the ranks hold
of them.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_merak.checkpoint import hf_save
from megatron_merak.checkpoint.hf import from_pretrained, save_hf
from megatron_merak.checkpoint.shard import Shard
from megatron_merak.errors import CheckpointError
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.stages.init_captured import draw_parameter

from ..ranks import run_ranks
from .hf_models import CONFIGS, build, check_equal, content, model_class, shards

LIMIT = "30KB"


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_what_transformers_writes_and_opens_there(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=LIMIT)
    save_hf(tmp_path / "ours", model, shards(model), max_shard_size=LIMIT)
    check_equal(content(tmp_path / "ours"), content(tmp_path / "theirs"))
    for file in ("config.json", "generation_config.json"):
        theirs, ours = tmp_path / "theirs" / file, tmp_path / "ours" / file
        assert theirs.exists() == ours.exists() and (
            not ours.exists() or ours.read_text() == theirs.read_text()
        )
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(content(tmp_path / "ours"))
    again, info = model_class(name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    check_equal(dict(again.state_dict()), dict(model.state_dict()))


def test_one_file_is_the_same_to_the_byte(tmp_path):
    model = build("deepseek_v3").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    save_hf(tmp_path / "ours", model, shards(model))
    theirs, ours = (sorted((tmp_path / side).iterdir()) for side in ("theirs", "ours"))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_equals_what_transformers_writes_of_every_type(number, tmp_path):
    """Every type that can be made from a tiny configuration; those of one number take about half a
    minute.
    """
    from ..zoo.configs import tiny_config
    from ..zoo.heads import heads
    from ..zoo.specimen import Specimen

    compared = 0
    for model_type in sorted(heads())[number::24]:
        try:
            specimen = Specimen(heads()[model_type], tiny_config(model_type), "")
            with init_empty_weights():
                size = sum(
                    p.numel()
                    for p in specimen.model_class._from_config(specimen.config).parameters()
                )
        # a configuration that the heuristics do not suit: the parity table lists these
        except Exception:
            continue
        if size > 6_000_000:
            continue
        model, theirs, ours = (
            specimen.model(),
            tmp_path / "theirs" / model_type,
            tmp_path / "ours" / model_type,
        )
        model.save_pretrained(theirs, max_shard_size="100KB")
        save_hf(ours, model, shards(model), max_shard_size="100KB")
        check_equal(content(ours), content(theirs))
        empty = from_pretrained(theirs, auto_class=specimen.model_class)
        for name in {*empty.merak_source.names()} & {name for name, _ in model.named_parameters()}:
            assert torch.equal(empty.merak_source.read(name), model.get_parameter(name)), (
                f"{model_type}: {name}"
            )
        compared += 1
    assert compared > 4


def plain() -> torch.nn.Module:
    """Not of transformers, which takes a rank longer to import than all else."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 7)
    )
    model[1].running_mean.normal_()
    return model.append(torch.nn.Embedding(48, 6, dtype=torch.bfloat16)).append(model[0])


def save_in_parts(rank: int, world: int, directory: str) -> list:
    model, parts, group = plain(), shards(plain(), rank, world), torch.distributed.group.WORLD
    for name, tensor in model.state_dict().items():
        # the first rank's buffers are all that counts of the model
        if rank or "running" not in name:
            tensor.zero_()
    out, errors = Path(directory) / "out", []
    save_hf(out, model, parts, group, "cpu", "1KB")
    full_disk = mock.patch("os.fsync", side_effect=OSError(28, "No space left on device"))
    for target, held, context in (
        (out, parts[:-1] if rank == 1 else parts, nullcontext()),
        ("/dev/null/out", parts, nullcontext()),
        (out, parts, full_disk),
    ):
        try:
            with context:
                save_hf(target, model, held, group, "cpu", "1KB")
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_divided_over_ranks(tmp_path):
    first, *others = run_ranks(save_in_parts, 3, str(tmp_path))
    assert others == [first] * 2 and len(first) == 3
    assert "along dim 0: indices [8, 16) are in no part" in first[0]
    assert "on rank 0, Not a directory" in first[1] and "on rank 0, No space left" in first[2]
    assert "model-00001-of-" in first[2], "a full disk is told at the first file"
    state = dict(plain().state_dict())
    check_equal(
        content(tmp_path / "out"),
        {name: state[name] for name in state if not name.startswith("4.")},
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2


def save_experts(rank: int, world: int, directory: str) -> None:
    parts = shards(build("mixtral"), rank, world)
    empty = from_pretrained(Path(directory) / "theirs")
    save_hf(Path(directory) / "ours", empty, parts, torch.distributed.group.WORLD, "cpu", LIMIT)


@pytest.mark.slow
def test_experts_divided_over_ranks(tmp_path):
    build("mixtral").save_pretrained(tmp_path / "theirs", max_shard_size=LIMIT)
    run_ranks(save_experts, 3, str(tmp_path))
    check_equal(content(tmp_path / "ours"), content(tmp_path / "theirs"))


def test_a_failed_write_leaves_the_earlier_save(tmp_path, monkeypatch):
    model = build("llama")
    save_hf(tmp_path, model, shards(model), max_shard_size=LIMIT)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = build("llama", seed=1)

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        hf_save._File, "write", lambda self, data: self._do(lambda: full(self, data))
    )
    with pytest.raises(CheckpointError, match="No space left"):
        save_hf(tmp_path, other, shards(other), max_shard_size=LIMIT)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_tokenizer_that_cannot_be_saved_leaves_nothing(tmp_path):
    model = build("llama")
    with pytest.raises(AttributeError, match="save_pretrained"):
        save_hf(tmp_path / "out", model, shards(model), processing_class=object())
    assert not list((tmp_path / "out").iterdir())


def test_a_second_save_replaces_all_of_the_first(tmp_path):
    model, other = build("llama"), build("gpt2")
    save_hf(tmp_path, model, shards(model), max_shard_size=LIMIT)
    save_hf(tmp_path, other, shards(other))
    assert sorted(p.name for p in tmp_path.glob("model*")) == ["model.safetensors"]
    save_hf(tmp_path, model, shards(model), max_shard_size=LIMIT)
    assert not (tmp_path / "model.safetensors").exists()
    check_equal(
        dict(model_class("llama").from_pretrained(tmp_path).state_dict()), dict(model.state_dict())
    )


def test_dtype_of_the_config_is_that_of_the_shards(tmp_path):
    model = build("llama")
    halves = [
        Shard(s.name, s.shape, s.dim, s.intervals, s.tensor.bfloat16()) for s in shards(model)
    ]
    save_hf(tmp_path, model, halves)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert (
        model.config.dtype != torch.bfloat16
        and model_class("llama").from_pretrained(tmp_path).dtype == torch.bfloat16
    )


def test_tables_that_a_model_never_saves(tmp_path):
    from transformers import MarianConfig, MarianMTModel

    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 96,
        "max_position_embeddings": 32,
    }
    model = MarianMTModel(MarianConfig(**sizes, pad_token_id=0, decoder_start_token_id=0))
    model.save_pretrained(tmp_path / "theirs")
    save_hf(
        tmp_path / "ours",
        model,
        [part for part in shards(model) if "embed_positions" not in part.name],
    )
    check_equal(content(tmp_path / "ours"), content(tmp_path / "theirs"))
    empty = from_pretrained(tmp_path / "ours")
    table = "model.encoder.embed_positions.weight"
    assert table not in empty.merak_source.names()
    assert torch.equal(draw_parameter(empty, table, 0), model.get_parameter(table).detach())


def test_tokenizer_files_come_along(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    model = build("llama")
    save_hf(
        tmp_path,
        model,
        shards(model),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words),
    )
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("b") == [1]


def test_plain_modules_get_their_state_dict(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model.append(model[0])
    save_hf(tmp_path, model, shards(model))
    state = dict(model.state_dict())
    check_equal(
        content(tmp_path), {name: state[name] for name in state if not name.startswith("2.")}
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda parts: parts[1:], "no rank has it"),
        (
            lambda parts: [Shard("x", (4,), 0, ((0, 3),), torch.zeros(3)), *parts],
            r"\[3, 4\) are in no part",
        ),
        (
            lambda parts: [Shard(parts[0].name, (2, 2), None, (), torch.zeros(2, 2)), *parts[1:]],
            "the ranks have shape",
        ),
    ],
)
def test_shards_that_are_not_the_model_are_refused(change, reason, tmp_path):
    model = build("llama")
    with pytest.raises(CheckpointError, match=reason):
        save_hf(tmp_path / "out", model, change(shards(model)))
    assert not (tmp_path / "out").exists()

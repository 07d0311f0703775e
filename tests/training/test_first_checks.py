"""What a run reads and writes is looked at before anything is planned or captured, and the first
mistake is told in one line.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from megatron_merak.config import Config, HFConfig, RunConfig
from megatron_merak.data.indexed_dataset import IndexedDatasetWriter
from megatron_merak.errors import MerakError
from megatron_merak.training import pretrain, pretrain_hf
from tests.training.jobs import job

NULL = "--tokenizer-type NullTokenizer --data-path"
FILE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A dataset, a model's directory, and a checkpoint of iteration 1 of the GPT of flags."""
    root = tmp_path_factory.mktemp("place")
    with IndexedDatasetWriter(root / "a_text_document", np.uint16) as writer:
        writer.add_document(np.arange(50))
    (root / "cut.idx").write_bytes(b"MMIDIDX")
    (root / "cut.bin").touch()
    (root / "raw.jsonl").write_text('{"text": "a"}\n')
    (root / "empty").mkdir()
    (root / "megatron" / "release" / "mp_rank_00").mkdir(parents=True)
    (root / "megatron" / "release" / "mp_rank_00" / "model_optim_rng.pt").touch()
    (root / "weights").mkdir()
    (root / "weights" / "model.safetensors").touch()
    LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    ).save_pretrained(root / "model")
    job(0, 1, f"--train-iters 1 --save {root}/saved")
    job(0, 1, f"--model {root}/model --train-iters 1 --save {root}/saved_hf", HFConfig)
    return root


MISTAKES = {
    "absent": (f"{NULL} HERE/b", "index file HERE/b.idx: No such file"),
    "bin": (f"{NULL} HERE/a_text_document.bin", "Give HERE/a_text_document."),
    "idx": (f"{NULL} HERE/a_text_document.idx", "Give HERE/a_text_document."),
    "both": (f"{NULL} HERE/a_text_document.bin.idx", "Give HERE/a_text_document."),
    "output prefix": (f"{NULL} HERE/a", "HERE/a: it is no dataset, and .* Give HERE/a_text_d"),
    "directory": (f"{NULL} HERE", "it is a directory, and HERE/a_text_document is a dataset"),
    "text": (f"{NULL} HERE/raw.jsonl", "it is a file, .* Tokenize it with merak-preprocess"),
    "address": (f"{NULL} s3://a/b", "s3://a/b: it is an address, .* Copy its .bin and .idx"),
    "no list": (
        "--tokenizer-type NullTokenizer --data-args-path HERE/b",
        "HERE/b: it cannot be rea",
    ),
    "cut off": (f"{NULL} HERE/cut", "index file HERE/cut.idx: 7 bytes are fewer"),
    "tokenizer": (f"{FILE} HERE/none", "--tokenizer-model HERE/none: No such file"),
    "no tokenizer": (f"{FILE} HERE/empty", "--tokenizer-model HERE/empty/tokenizer.json: No such"),
    "curve": ("--curve HERE/curve.txt", "curve.txt: its suffix is none of .png, .pdf, .svg. Name"),
    "save": ("--save /proc/x", "--save /proc/x: it cannot be written"),
    "load": ("--load HERE/empty --exit-on-missing-checkpoint", "--load HERE/empty: it has no comp"),
    "load of Megatron-LM": (
        "--load HERE/megatron",
        "it has checkpoints of Megatron-LM. Convert them",
    ),
    "step": ("--load HERE/saved --ckpt-step 7", "of iteration 7 .complete are: 1."),
    "seed": ("--load HERE/saved --seed 7", "--seed 7: the checkpoint's run has seed 1234"),
    "board": ("--tensorboard-dir HERE/t", r"'\.\[tracking\]' in a clone"),
}


def refused(place: Path, flags: str, config: type[RunConfig]) -> str:
    with pytest.raises(MerakError) as caught:
        job(0, 1, f"--train-iters 2 {flags.replace('HERE', str(place))}", config)
    return str(caught.value).replace(str(place), "HERE")


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("config", [Config, HFConfig])
def test_nothing_is_planned_where_files_are_not_as_they_should(place, name, config, monkeypatch):
    """None of these needs the model; 'step' and 'seed' are of the kind's own checkpoint."""
    monkeypatch.setattr(pretrain, "traced_gpt", lambda *_: pytest.fail("it was captured"))
    monkeypatch.setattr(pretrain_hf, "traced_of", lambda *_: pytest.fail("it was captured"))
    monkeypatch.setattr("megatron_merak.training.trackers.chosen.is_installed", lambda _: False)
    monkeypatch.setattr("megatron_merak.training.outputs.check_drawing", lambda *_: None)
    if not name.startswith(("load", "step", "seed")):
        built = lambda *_: pytest.fail("its model was built")  # noqa: E731
        monkeypatch.setattr(pretrain_hf, "build_model", built)
    flags, told = MISTAKES[name]
    if config is HFConfig:
        rules = "--model HERE/model --mock-data --tensor-parallel-rules nope"
        assert refused(place, rules, config).startswith("--tensor-parallel-rules nope: ")
        flags = f"--model HERE/model {flags.replace('saved', 'saved_hf')}"
        flags += " --vocab-size 60" if NULL in flags else ""
    text = refused(place, flags, config)
    assert "\n" not in text
    assert re.search(told, text), text


@pytest.mark.parametrize(
    ("config", "flags", "told"),
    [
        (Config, "--load HERE/weights", "--load HERE/weights: it has a HuggingFace model"),
        (Config, "--load HERE/saved --ffn-hidden-size 64", "--ffn-hidden-size 64: the checkpoint"),
        (HFConfig, "--model HERE/other --load HERE/saved_hf", "config.json intermediate_size 64"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before(place, config, flags, told, monkeypatch):
    monkeypatch.setattr(pretrain, "traced_gpt", lambda *_: pytest.fail("it was captured"))
    monkeypatch.setattr(pretrain_hf, "traced_of", lambda *_: pytest.fail("it was captured"))
    shape = LlamaConfig.from_pretrained(place / "model")
    shape.intermediate_size = 64
    shape.save_pretrained(place / "other")
    assert refused(place, flags, config).startswith(told)

"""pretrain_hf.py: beside pretrain_gpt.py, on four ranks, into a HuggingFace directory and back."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from megatron_merak.cluster import CLUSTERS
from megatron_merak.config import (
    HFConfig,
    HFDataConfig,
    HFModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from megatron_merak.data.mock import MockIndexedDataset
from megatron_merak.data.tokenizer import Tokenizer
from megatron_merak.errors import CheckpointError, DataError
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.pipeline_parallel.pictures.trace import from_trace
from megatron_merak.plan import Grid, held_parameters
from megatron_merak.training import pretrain_hf
from megatron_merak.training.hf_model import blueprint_of, build_model, traced_of
from megatron_merak.training.pretrain_hf import with_tokenizer
from megatron_merak.training.token_model import TokenModel
from megatron_merak.training.trainer import Trainer
from tests.scripts import run_script
from tests.training.jobs import job

ROOT = Path(__file__).resolve().parents[2]
COMMON = """--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data --log-interval 1
    --eval-iters 1 --train-samples 24 --rampup-batch-size 4 4 8"""  # steps of 4, 4, 8, 8 samples
GPT = """--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --vocab-size 130 --make-vocab-size-divisible-by 1"""
LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=130,
    rms_norm_eps=1e-6,
)


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "llama.json"
    path.write_text(json.dumps(LLAMA.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    return path


def pretrain(
    script: str, flags: str, ranks: int = 1, check: bool = True
) -> subprocess.CompletedProcess:
    done = run_script(script, [*COMMON.split(), *flags.split()], ranks)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def losses(path: Path, kind: str = "train") -> dict[int, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["iteration"]: row["loss"] for row in rows if row["kind"] == kind}


def test_a_checkpoint_of_the_gpt_of_flags_goes_on_as_huggingfaces_model(tmp_path, shape):
    """Data, loss, schedules, optimizer and evaluation are the same, so nothing tells the two models
    apart.
    """
    gpt, hf = tmp_path / "gpt.jsonl", tmp_path / "hf.jsonl"
    pretrain("pretrain_gpt.py", f"{GPT} --save {tmp_path}/c --save-interval 2 --metrics {gpt}")
    told = pretrain(
        "pretrain_hf.py", f"--model {shape} --load {tmp_path}/c --ckpt-step 2 --metrics {hf}"
    ).stdout
    assert "loaded the checkpoint of iteration 2" in told
    assert losses(hf) == pytest.approx({k: v for k, v in losses(gpt).items() if k > 2}, abs=2e-6)
    for kind in ("valid", "test"):
        assert losses(hf, kind) == pytest.approx(losses(gpt, kind), abs=2e-6)


@pytest.mark.long
def test_four_ranks_write_a_directory_that_transformers_opens(tmp_path, shape):
    alone, together, again = (tmp_path / f"{name}.jsonl" for name in ("alone", "together", "again"))
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    pretrain("pretrain_hf.py", f"--model {shape} --metrics {alone}")
    told = pretrain(
        "pretrain_hf.py",
        f"--model {shape} --metrics {together} {layout} --save-hf {tmp_path}/out --save {tmp_path}/c "
        f"--timeline {tmp_path}/t.json --make-vocab-size-divisible-by 8",
        ranks=4,
    ).stdout
    assert losses(together) == pytest.approx(losses(alone), abs=1e-5) and len(losses(alone)) == 4
    assert losses(together, "valid") == pytest.approx(losses(alone, "valid"), abs=1e-5)
    assert (
        "Captured as it is, is_causal kept." in told
        and f"saved {tmp_path}/out for HuggingFace" in told
    )
    (view,) = from_trace(json.loads((tmp_path / "t.json").read_text()))
    assert view.clock == "measured" and view.peak_in_flight() == (2, 1)
    # From the directory, and from the checkpoint with another layout, evaluation finds the trained
    # weights.
    # the last stage is on the first rank
    layout = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"
    pretrain(
        "pretrain_hf.py", f"--model {tmp_path}/out --skip-train --metrics {again} {layout}", ranks=2
    )
    assert losses(again, "valid")[0] == pytest.approx(losses(together, "valid")[4], abs=1e-5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert model.model.embed_tokens.weight.shape == (130, 32)
    document = torch.from_numpy(MockIndexedDataset(130, 129).get(3, 0, 17))[None]
    with torch.no_grad():
        assert model(input_ids=document, labels=document).loss < 5.5


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--model nowhere", "--model nowhere: it does not exist"),
        ("--model SHAPE --save-hf /dev/null/x", "--save-hf /dev/null/x: it cannot be written"),
    ],
)
def test_a_mistake_is_told_in_one_line(shape, flags, told):
    done = pretrain("pretrain_hf.py", flags.replace("SHAPE", str(shape)), check=False)
    assert done.returncode != 0 and "consumed samples" not in done.stdout
    assert told in [line for line in done.stderr.splitlines() if line][-1]


def test_data_that_is_not_there_is_told_before_the_model_is_captured(shape, monkeypatch):
    monkeypatch.setattr(pretrain_hf, "traced_of", lambda *_: pytest.fail("it was captured"))
    flags = "--train-iters 1 --tokenizer-type NullTokenizer --data-path nowhere"
    with pytest.raises(DataError, match="index file nowhere.idx"):
        job(0, 1, f"--model {shape} {flags}", HFConfig)


def test_what_is_no_model_is_told_of_its_flag(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    told = {"": "it has no config.json.", "other.json": "it has no model_type"}
    for name, reason in told.items():
        with pytest.raises(CheckpointError, match=f"^--model {tmp_path / name}: {reason}"):
            build_model(HFModelConfig(model=str(tmp_path / name), seq_length=16))


def resolved(shape: Path, **data) -> tuple[HFConfig, Tokenizer]:
    ids = data.pop("vocab_size", None)
    config = HFConfig(
        model=HFModelConfig(model=str(shape), seq_length=16, vocab_size=ids),
        train=TrainConfig(micro_batch_size=1),
        data=HFDataConfig(**data),
    )
    return with_tokenizer(config, build_model(config.model))


def test_generated_and_numeric_data_have_the_ids_that_the_model_knows(shape):
    config, tokenizer = resolved(shape, mock_data=True)
    assert (tokenizer.vocab_size, tokenizer.eod, config.model.vocab_size) == (130, 129, 130)
    _, tokenizer = resolved(shape, tokenizer_type="NullTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (130, 129)
    _, tokenizer = resolved(shape, tokenizer_type="NullTokenizer", vocab_size=99)
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)
    with pytest.raises(
        DataError, match="embedding has 130 rows, and NullTokenizer adds a token"
    ) as caught:
        resolved(shape, tokenizer_type="NullTokenizer", vocab_size=130)
    assert caught.value.remedy == "Use at most 129"


def test_the_tokenizer_of_the_directory_is_used_and_must_fit(shape, tmp_path):
    with pytest.raises(DataError, match="has no tokenizer"):
        resolved(shape)
    (tmp_path / "config.json").write_text(shape.read_text())
    write_tokenizer(tmp_path, ids=120)
    config, tokenizer = resolved(tmp_path)
    assert config.data.tokenizer_model == str(tmp_path) and tokenizer.vocab_size == 120
    write_tokenizer(tmp_path, ids=131)
    with pytest.raises(DataError, match="ids up to 130, and the model's embedding has 130 rows"):
        resolved(tmp_path)


def test_a_plan_counts_the_state_of_the_optimizer(shape):
    config, _ = resolved(shape, mock_data=True)
    traced, _ = traced_of(build_model(config.model), config)
    adam, sgd = (
        blueprint_of(
            traced,
            replace(config, optimizer=OptimizerConfig(optimizer=name)),
            1,
            CLUSTERS["cpu"],
        ).plan
        for name in ("adam", "sgd")
    )
    assert (adam.state_bytes, sgd.state_bytes) == (8, 4)
    (more,), (less,) = adam.predicted_bytes, sgd.predicted_bytes
    assert more - less == 4 * held_parameters(adam.units)


def test_a_micro_batch_without_targets_counts_nothing(shape):
    config, _ = resolved(shape, mock_data=True)
    changes = {
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "calculate_per_token_loss": True,
        "train_iters": 1,
    }
    config = replace(
        config, train=replace(config.train, **changes), optimizer=OptimizerConfig(lr=0.1)
    )
    traced, batches = traced_of(build_model(config.model), config)
    blueprint = blueprint_of(traced, config, 1, CLUSTERS["cpu"])
    model = TokenModel(blueprint, batches, config, build_mesh(Grid(), 0, torch.device("cpu")))
    tokens = torch.arange(32).view(2, 16)
    full = {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(2, 16)}
    empty = full | {"loss_mask": torch.zeros(2, 16)}
    assert model.mean_loss([full, empty]) == model.mean_loss([full]) == pytest.approx(4.9, abs=0.1)
    assert model.mean_loss([empty]) == 0
    assert not Trainer(config, model).step([full, empty]).skipped


def write_tokenizer(directory: Path, ids: int) -> None:
    vocabulary = {f"w{i}": i for i in range(ids - 1)} | {"</s>": ids - 1}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(directory)

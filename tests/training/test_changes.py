"""A run that resumes with other flags than the one that saved: another model or data is refused,
the rest is told.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from megatron_merak.checkpoint.sealed import seal
from megatron_merak.config import Config, HFConfig
from megatron_merak.data.indexed_dataset import IndexedDatasetWriter
from megatron_merak.errors import CheckpointError
from tests.ranks import run_ranks
from tests.training.jobs import job


def _jobs(rank: int, world: int, runs: list[str], config=Config) -> list[str]:
    """Several jobs, one after the other: what each printed, or its error."""
    told = []
    for flags in runs:
        try:
            told.append(job(rank, world, flags, config))
        except CheckpointError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def resumed(root: Path, first: str, *others: str, config=Config, ranks: int = 1) -> list[str]:
    """What the jobs with the flags ``others`` tell that resume the one with ``first``."""
    runs = [
        f"--train-iters 1 --save {root} {first}",
        *(f"--train-iters 2 --load {root} {flags}" for flags in others),
    ]
    return run_ranks(_jobs, ranks, runs, config)[-1][1:]


def changed(told: str) -> str:
    return next(line for line in told.splitlines() if line.startswith("Changed since"))


def test_another_model_is_refused_by_flag_and_both_values(tmp_path):
    changed = {
        "--num-attention-heads 2": "--num-attention-heads 2: the checkpoint's run had 4",
        "--position-embedding-type none": "--position-embedding-type none: the checkpoint's run had rope",
        "--rotary-base 500": "--rotary-base 500: the checkpoint's run had 10000",
        "--swiglu": "--swiglu on: the checkpoint's run had off; another value makes another model. Leave --swiglu out",
        "--norm-epsilon 1e-3": "--norm-epsilon 0.001: the checkpoint's run had 1e-05",
        "--seq-length 8": "--seq-length 8: the checkpoint's run had 16",
    }
    rope = "--position-embedding-type rope --rotary-base 10000"
    flags = [f"{rope} {flag}" if "position" not in flag else flag for flag in changed]
    told = resumed(tmp_path, rope, *flags)
    for expected, text in zip(changed.values(), told, strict=True):
        assert text.startswith("CheckpointError") and expected in text and "another model" in text
    told = resumed(
        tmp_path,
        rope,
        f"{rope} --finetune --rotary-base 500 --max-position-embeddings 64",
        "--finetune --num-attention-heads 2",
    )
    assert "--rotary-base 500 (it was 10000)" in told[0] and told[1].startswith("CheckpointError")


def test_the_same_model_in_other_words_resumes_without_a_word(tmp_path):
    same = "--ffn-hidden-size 128 --kv-channels 8 --group-query-attention --num-query-groups 4 --train-iters 1"
    same += " --init-method-std 0.5"
    layout = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 2 --cross-entropy-chunk-size 8"
    (told,) = resumed(tmp_path, "", f"{same} {layout} --max-position-embeddings 16", ranks=2)
    assert told.startswith(f"loaded the checkpoint of iteration 1 from {tmp_path}\n")


def test_another_schedule_or_batch_is_told_and_the_flags_count(tmp_path):
    new = (
        "--lr 1e-3 --adam-beta2 0.99 --weight-decay 0.2 --global-batch-size 8 --hidden-dropout 0.1"
    )
    kept, taken, forced = resumed(
        tmp_path,
        "",
        new,
        "--lr 1e-3 --use-checkpoint-opt-param-scheduler",
        "--lr 1e-3 --override-opt-param-scheduler",
    )
    for told in (
        "--lr 0.001 (it was 0.01)",
        "--adam-beta2 0.99 (it was 0.95)",
        "--weight-decay 0.2 (it was 0.1)",
        "--global-batch-size 8 (it was 4)",
        "--hidden-dropout 0.1 (it was 0.0)",
        "--train-iters 2 (it was 1)",
    ):
        assert told in changed(kept)
    assert "learning rate: 5.500000E-04" in kept and "learning rate: 5.500000E-04" in forced
    assert "--lr 0.001 (it was 0.01)" in changed(forced)
    assert changed(taken).endswith("written: --train-iters 2 (it was 1)")
    assert "learning rate: 1.000000E-03" in taken  # the end of a cosine over one step


def _write(prefix: Path, first: int) -> Path:
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for k in range(30):
            writer.add_document([(first + k * j) % 59 for j in range(20)])
    return prefix


@pytest.mark.long
def test_other_training_data_is_refused_wherever_its_file_is_called_the_same(tmp_path):
    source = _write(tmp_path / "data", 1)
    moved, other = _write(tmp_path / "elsewhere" / "moved", 1), _write(tmp_path / "other", 2)
    flags = (
        "--tokenizer-type NullTokenizer --vocab-size 59 --data-path {} --data-cache-path "
        + f"{tmp_path}/cache"
    )
    first = flags.format(source)
    told = resumed(
        tmp_path / "c",
        f"{first} --split 1",
        f"{flags.format(moved)} --split 1",
        f"{flags.format(other)} --split 1",
        f"{flags.format(other)} --split 1 --override-dataset",
        f"{flags.format(other)} --split 1 --finetune",
        f"{first} --split 1,1",
        f"{first} --split 1 --eod-mask-loss",
        f"{first} --split 1 --train-iters 40",
        f"{flags.format(f'1 {source} 1 {other}')} --split 1",
    )
    assert (
        "Other" not in told[0]
        and "another order" not in told[0]
        and "loaded the checkpoint" in told[0]
    )
    assert f"training data {other}: the checkpoint's run read other data: fingerprint" in told[1]
    assert "Other training data than the checkpoint's run, as --override-dataset allows" in told[2]
    assert "Other" not in told[3] and "consumed samples:            4 |" in told[3]
    assert (
        "sequences [0, 15]" in told[4] and "end-of-document id left out of the loss 59" in told[5]
    )
    assert "Samples come in another order than in the checkpoint's run" in told[6]
    assert "2 data sets, and then 1" in told[7]


@pytest.mark.long
def test_a_huggingface_model_is_compared_by_its_config_file(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 60}
    made = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, attention_dropout=0.0)

    def write(name: str, **changes) -> str:
        path = tmp_path / name
        path.write_text(
            json.dumps(made.to_dict() | {"architectures": ["LlamaForCausalLM"]} | changes)
        )
        return f"--model {path}"

    told = resumed(
        tmp_path / "c",
        write("one"),
        write("same", transformers_version="x"),
        write("heads", num_attention_heads=2, num_key_value_heads=2, head_dim=16),
        write("dropout", attention_dropout=0.5),
        config=HFConfig,
    )
    assert (
        "Changed" in told[0]
        and "config.json" not in told[0]
        and "--train-iters 2 (it was 1)" in told[0]
    )
    assert (
        "config.json head_dim 16: the checkpoint's run had 8; another value makes another model"
        in told[1]
    )
    assert "config.json attention_dropout 0.5 (it was 0.0)" in told[2]


META = {
    "consumed_samples": ["4", -1, None, 1.5, True, 2**70, [], ...],
    "optimizer_steps": ["1", -1, None, [1], ...],
    "iteration": ["1", None, -5, {}],
    "config": [None, [], {}, {"train": 3}, "x", ...],
    "data": [3, [], {"train": 5}, {"train": {"sources": [1], "samples": {}}}],
    "model": [[], 5, "x"],
    "global_batch_size": ["8", -1, 2.5],
}


def _odd(rank: int, world: int, root: Path) -> None:
    job(rank, world, f"--train-iters 1 --save {root}")
    path = root / "iter_0000001" / "manifest.json"
    good = json.loads(path.read_bytes())
    good.pop("sha256")
    for name, values in META.items():
        for value in values:
            meta = {**good["meta"], name: value}
            if value is ...:
                del meta[name]
            path.write_bytes(seal({**good, "meta": meta}))
            with pytest.raises(
                CheckpointError,
                match=f"{name}, .*, is (missing from|.* in) what it says of its run",
            ):
                job(rank, world, f"--train-iters 2 --load {root}")


def test_a_meta_of_odd_types_is_a_typed_error(tmp_path):
    run_ranks(_odd, 1, tmp_path)

"""The order of Megatron-LM's tool with --partitions, and its other flags."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_merak.cli import preprocess_data as command
from megatron_merak.data.preprocess import EncoderConfig, preprocess
from megatron_merak.megatron_flags import PREPROCESSING_REFUSED, PREPROCESSING_TAKEN
from tests.checkpoint.kills import DISK, fork, kill_before_call

CONFIG = EncoderConfig("NullTokenizer", None, 9999, ("text",), append_eod=True)
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9999"]


def inputs(root: Path, *counts: int) -> list[Path]:
    paths = []
    number = 0
    for place, count in enumerate(counts):
        path = root / f"{place}.jsonl"
        lines = [{"text": f"{n} " * (n % 4)} for n in range(number, number + count)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        number += count
        paths.append(path)
    return paths


def files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{kind}").read_bytes() for kind in ("bin", "idx")]


def theirs(prefix: Path, paths: list[Path], partitions: int) -> None:
    """What Megatron-LM's tool does: lines are dealt out, each part is built, all are joined."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dealt: list[list[str]] = [[] for _ in range(partitions)]
    lines = [line for path in paths for line in path.read_text().splitlines()]
    for place, line in enumerate(lines):
        dealt[place % partitions].append(json.loads(line)["text"])
    whole = IndexedDatasetBuilder(f"{prefix}_text_document.bin", np.uint16)
    for number, texts in enumerate(dealt):
        part = f"{prefix}_{number}"
        builder = IndexedDatasetBuilder(f"{part}.bin", np.uint16)
        for text in texts:
            ids = [*map(int, text.split())]
            ids += [9999] * bool(ids)
            builder.add_document(ids, [len(ids)] if ids else [])
        builder.finalize(f"{part}.idx")
        whole.add_index(part)
    whole.finalize(f"{prefix}_text_document.idx")


@pytest.mark.parametrize(
    "partitions", [1, 3, *(pytest.param(each, marks=pytest.mark.long) for each in (2, 8))]
)
def test_partitions_have_the_bytes_of_megatron_core(tmp_path, partitions):
    paths = inputs(tmp_path, 7, 1, 5)
    theirs(tmp_path / "theirs", paths, partitions)
    preprocess(paths, str(tmp_path / "ours"), CONFIG, partitions=partitions)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_the_order_of_the_input_can_be_kept(tmp_path):
    paths = inputs(tmp_path, 13)
    common = ["--input", str(paths[0]), *NULL, "--append-eod"]
    kept = [*common, "--partitions", "4", "--keep-sequential-samples"]
    for name, flags in (("plain", common), ("kept", kept), ("dealt", kept[:-1])):
        assert command.main([*flags, "--output-prefix", str(tmp_path / name)]) == 0
    assert files(tmp_path / "plain") == files(tmp_path / "kept") != files(tmp_path / "dealt")


def test_a_killed_run_goes_on_within_a_partition(tmp_path):
    paths = inputs(tmp_path, 3000, 2500)
    preprocess(paths, str(tmp_path / "whole"), CONFIG, partitions=3)
    goes_on = 0
    for number in range(20, 120, 20):

        def work(report, number=number):
            kill_before_call(number, DISK | {"truncate", "seek", "flock"})
            preprocess(paths, str(tmp_path / "out"), CONFIG, partitions=3, seal_every=0)

        fork(work)
        seal = tmp_path / ".out.unfinished" / "progress.json"
        sealed = json.loads(seal.read_text())["progress"] if seal.exists() else {"documents": 0}
        goes_on += 0 < sealed["documents"] < 5500
        counts = preprocess(paths, str(tmp_path / "out"), CONFIG, partitions=3)
        assert counts["documents"] == 5500
        assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert goes_on > 1


def test_every_flag_of_the_tool_is_answered(capsys):
    """Those of tools/preprocess_data.py and its tokenizers, by name."""
    ours = {name for action in command.parser()._actions for name in action.option_strings}
    answered = ours | PREPROCESSING_TAKEN.keys() | PREPROCESSING_REFUSED.keys()
    assert {
        *"""--input --json-keys --split-sentences --keep-newlines --append-eod --lang --output-prefix
        --workers --find-optimal-num-workers --workers-to-check --max-documents --performance-dir
        --partitions --log-interval --keep-sequential-samples --tokenizer-type --tokenizer-model
        --vocab-size --vocab-file --merge-file --tiktoken-pattern --tiktoken-num-special-tokens
        --trust-remote-code --make-vocab-size-divisible-by""".split()
    } <= answered
    for name in (*PREPROCESSING_REFUSED, "--vocab-extra-ids", "--legacy-tokenizer"):
        with pytest.raises(SystemExit):
            command.main(["--input", "x", "--output-prefix", "y", *NULL, name, "z"])
        told = capsys.readouterr().err
        assert f"flag {name}: is a Megatron-LM flag that megatron_merak does not" in told


def test_flags_without_effect_are_taken_with_a_notice(tmp_path, capsys):
    (path,) = inputs(tmp_path, 3)
    flags = "--log-interval 5 --lang=german --keep-newlines --dataset-impl mmap --chunk-size 3"
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), *NULL]
    assert command.main([*arguments, *flags.split()]) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" changes nothing: ")[0] for line in told[:5]] == [
        "--log-interval 5",
        "--lang german",
        "--keep-newlines",
        "--dataset-impl mmap",
        "--chunk-size 3",
    ]
    with pytest.raises(SystemExit):
        command.main([*arguments, "--log-interval", "--append-eod"])
    assert "--log-interval (no value): it has one. Leave it out" in capsys.readouterr().err

"""merak-preprocess merge, inspect and verify: megatron-core's bytes, what is there, every damage."""

import json
import struct

import numpy as np
import pytest

from megatron_merak.cli import preprocess_data as command
from megatron_merak.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

DOCUMENTS = ([[1, 2], [3]], [[4]], [], [[5] * 9, [6], [7, 8]])


def write(prefix, documents=DOCUMENTS, dtype=np.uint16):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add_document(sum(sequences, []), [len(sequence) for sequence in sequences])
    return str(prefix)


def peer(prefix, documents):
    """What megatron-core's own builder writes."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for sequences in documents:
        builder.add_document(sum(sequences, []), [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def files(prefix):
    return [open(f"{prefix}.{suffix}", "rb").read() for suffix in ("bin", "idx")]


def test_merged_data_has_the_bytes_of_megatron_core(tmp_path, capsys):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    (tmp_path / "parts").mkdir()
    parts = [
        peer(tmp_path / "parts" / "b", DOCUMENTS),
        peer(tmp_path / "parts" / "a", [[[n] * n] for n in range(1, 50)]),
        peer(tmp_path / "parts" / "c", []),
    ]
    for inputs, order in ((parts, parts), ([str(tmp_path / "parts")], sorted(parts))):
        builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.uint16)
        for part in order:
            builder.add_index(part)
        builder.finalize(str(tmp_path / "theirs.idx"))
        arguments = ["merge", "--input", *inputs, "--output-prefix", str(tmp_path / "ours")]
        assert command.main(arguments) == 0
        assert files(tmp_path / "ours") == files(tmp_path / "theirs")
        told = "53 documents, 1,241 tokens of 3 datasets\n"
        assert capsys.readouterr().out == f"{told}wrote {tmp_path / 'ours'}.bin and .idx\n"


def test_a_dataset_that_was_trained_on_can_be_merged(tmp_path, capsys):
    write(tmp_path / "a")
    (tmp_path / "a" / "cache").mkdir(parents=True)
    arguments = ["merge", "--input", str(tmp_path / "a"), "--output-prefix", str(tmp_path / "b")]
    assert command.main(arguments) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mrge", "--input", "a"], "command mrge: it is none of merge, inspect, verify. The neare"),
        (["text.jsonl"], "command text.jsonl: it is none of merge, inspect, verify. Leave it out"),
        (
            ["--output-prefix", "x"],
            "--input, --tokenizer-type (missing): they are needed. Give them",
        ),
    ],
)
def test_mistyped_commands(words, told, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(words)
    assert caught.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["inspect", "verify"])
def test_a_prefix_without_a_dataset_is_named_with_the_word_that_gave_it(tmp_path, tool, capsys):
    write(tmp_path / "a")

    def told(prefix):
        try:
            command.main([tool, prefix])
        except SystemExit as end:
            return str(end.code)
        return capsys.readouterr().err

    assert f"PREFIX {tmp_path}/a.bin: a dataset is named without" in told(f"{tmp_path}/a.bin")
    absent = "none.idx: No such file or directory. Check the path given with PREFIX."
    assert absent in told(f"{tmp_path}/none")


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (["a", "wide"], "dataset {}/wide: its token ids are int32, those of the output uint16"),
        (["a", "out"], "--output-prefix {}/out: it is one of the inputs"),
        (["a", "nowhere"], "index file {}/nowhere.idx: No such file or directory"),
        (["half"], "--input {}/half/x.idx: it is missing"),
        (["none"], "--input {}/none: it has no .bin and .idx files"),
    ],
)
def test_what_cannot_be_merged_is_named_and_leaves_what_was_there(tmp_path, inputs, told, capsys):
    write(tmp_path / "a")
    write(tmp_path / "out")
    write(tmp_path / "wide", dtype=np.int32)
    (tmp_path / "half").mkdir()
    (tmp_path / "none").mkdir()
    (tmp_path / "half" / "x.bin").write_bytes(b"")
    before = files(tmp_path / "out")
    given = [str(tmp_path / name) for name in inputs]
    with pytest.raises(SystemExit) as end:
        command.main(["merge", "--input", *given, "--output-prefix", str(tmp_path / "out")])
    assert told.format(tmp_path) in str(end.value)
    assert files(tmp_path / "out") == before and not list(tmp_path.glob(".*"))


def test_inspect_shows_numbers_lengths_and_text(tmp_path, capsys):
    prefix = write(tmp_path / "a", [[[n % 4] * n] for n in range(2, 20)])
    assert command.main(["inspect", prefix]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{prefix}: 18 documents, 18 sequences, 189 tokens (uint16, 378 bytes)",
        "tokens of a sequence",
        f"  {'2 to 3':>24}  {2:>12}  {'#' * 10}",
        f"  {'4 to 7':>24}  {4:>12}  {'#' * 20}",
        f"  {'8 to 15':>24}  {8:>12}  {'#' * 40}",
        f"  {'16 to 31':>24}  {4:>12}  {'#' * 20}",
        "first document",
        "  2 2",
    ]
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    assert command.main(["inspect", prefix, "--json", *numbers]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["first_document"] == [2, 2] and facts["first_document_text"] == "2 2"
    assert facts["tokens"] == 189 and facts["lengths"][0] == [2, 3, 2]
    with pytest.raises(SystemExit, match="first document has id 2, it has 2 ids"):
        command.main(["inspect", prefix, *numbers[:-1], "1"])
    assert command.main(["inspect", write(tmp_path / "empty", [])]) == 0
    assert "0 documents, 0 sequences, 0 tokens" in capsys.readouterr().out


def poke(path, offset, kind, value):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(struct.pack(kind, value))


DAMAGE = {
    "a cut data file": (
        lambda p: open(f"{p}.bin", "r+b").truncate(30),
        "sequence 5 has 2 tokens of 2 bytes at byte 28, which does not lie in the 30 bytes",
    ),
    "a longer data file": (
        lambda p: open(f"{p}.bin", "ab").write(b"xx"),
        "a.bin has 34 bytes, and its sequences end at 32",
    ),
    "a pointer": (
        lambda p: poke(f"{p}.idx", 34 + 4 * 6 + 8 * 1, "<q", 2),
        "sequence 1 begins at byte 2, and the one before it ends at byte 4",
    ),
    "a length": (
        lambda p: poke(f"{p}.idx", 34 + 4 * 2, "<i", -1),
        "sequence 2 has -1 tokens of 2 bytes",
    ),
    "an id": (
        lambda p: poke(f"{p}.bin", 2 * 7, "<H", 60000),
        "token 3 of sequence 3, in document 3, at byte 14: id 60000 is not below 10",
    ),
    "a document": (
        lambda p: poke(f"{p}.idx", 34 + 12 * 6 + 8 * 2, "<q", 1),
        "document indices do not ascend from 0 to the 6 sequences",
    ),
    "the header": (lambda p: poke(f"{p}.idx", 0, "<B", 0), "it starts with"),
    "no data file": (lambda p: __import__("os").unlink(f"{p}.bin"), "data file .*No such file"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_names_the_place_of_a_damage(tmp_path, name, capsys):
    import re

    sound = write(tmp_path / "sound")
    prefix = write(tmp_path / "a")
    assert command.main(["verify", sound, prefix, "--vocab-size", "10"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{each}: sound, 4 documents, 6 sequences" for each in (sound, prefix)
    ]
    damage, told = DAMAGE[name]
    damage(prefix)
    assert command.main(["verify", prefix, sound, "--vocab-size", "10"]) == 1
    said = capsys.readouterr()
    assert re.search(told, said.err), said.err
    assert said.out == f"{sound}: sound, 4 documents, 6 sequences\n"


def test_verify_names_some_of_many_places(tmp_path, capsys):
    prefix = write(tmp_path / "a", [[[-5]]] * 99, np.int32)
    assert command.main(["verify", prefix]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21 and lines[-1].endswith("and perhaps more: 20 places are named")
    assert "token 0 of sequence 1, in document 1, at byte 4: id -5 is below 0" in lines[1]
    assert len(IndexedDataset(prefix)) == 99


def test_text_becomes_the_bytes_of_megatron_core(tmp_path):
    """As its tool has it: an empty document has no sequence, and no end of a document."""
    lines = [{"text": "1 2"}, {"text": ""}, {"text": "7"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    theirs = peer(tmp_path / "theirs", [[[1, 2, 99]], [], [[7, 99]]])
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "ours")]
    arguments += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--append-eod"]
    assert command.main(arguments) == 0
    assert files(tmp_path / "ours_text_document") == files(theirs)

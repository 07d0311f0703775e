"""Lists of data sets in files: their words are those of the flags, and mistakes in them are named."""

import json

import pytest

from megatron_merak.config import DataConfig
from megatron_merak.data.sources import source_of
from megatron_merak.errors import DataError


def test_a_list_has_the_words_of_data_path(tmp_path):
    path = tmp_path / "blend.txt"
    path.write_text("0.3 a\n0.7\tb\n\n")
    data = DataConfig(data_args_path=str(path))
    assert not data.by_part
    for part in range(3):
        source = source_of(data, part)
        assert source == (f"--data-args-path ({path})", ("0.3", "a", "0.7", "b"))


def test_a_list_by_part(tmp_path):
    path = tmp_path / "parts.json"
    path.write_text(json.dumps({"train": [30, "a", 0.1, "b"], "valid": "c d", "test": None}))
    data = DataConfig(per_split_data_args_path=str(path))
    assert data.by_part
    assert [source_of(data, part).words for part in range(3)] == [
        ("30", "a", "0.1", "b"),
        ("c", "d"),
        (),
    ]
    assert source_of(data, 1).flag == f"--per-split-data-args-path ({path}, valid)"
    path.write_text('{"train": ["a"]}')
    assert [source_of(data, part).words for part in range(3)] == [("a",), (), ()]


@pytest.mark.parametrize(
    "content, told",
    [
        ("[1]", " {path}: it is not an object. Give it the keys train, valid, test."),
        ("{", " {path}: it is not JSON ("),
        ('{"valdi": []}', " ({path}) valdi: is no part of the data. The nearest is valid."),
        ('{"x": []}', " ({path}) x: is no part of the data. Use train, valid, test."),
        ('{"train": []}', " ({path}) train: names no dataset. Write it like ['0.3', 'PREFIX1',"),
        ('{"train": "  "}', " ({path}) train: names no dataset. Write it like"),
        ('{"train": {}}', " ({path}) train: is no list of weights and prefixes. Write it like"),
        ('{"train": [true]}', " ({path}) train: is no list of weights and prefixes. Write it like"),
        (
            '{"train": ["a", ""]}',
            " ({path}) train: is no list of weights and prefixes. Write it like",
        ),
    ],
)
def test_mistakes_in_a_list_by_part(tmp_path, content, told):
    path = tmp_path / "parts.json"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        source_of(DataConfig(per_split_data_args_path=str(path)), 0)
    assert str(caught.value).startswith(
        "--per-split-data-args-path" + told.replace("{path}", str(path))
    )


@pytest.mark.parametrize("flag", ["data_args_path", "per_split_data_args_path"])
def test_files_that_cannot_be_read(tmp_path, flag):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "bytes"):
        with pytest.raises(DataError, match="it cannot be read .* Name a text file"):
            source_of(DataConfig(**{flag: str(path)}), 0)


def test_an_empty_list(tmp_path):
    (tmp_path / "blend.txt").write_text("\n")
    with pytest.raises(DataError, match="it names no dataset"):
        source_of(DataConfig(data_args_path=str(tmp_path / "blend.txt")), 0)

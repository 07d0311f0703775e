"""No change of any byte of a checkpoint goes unnoticed, and the error says where."""

import hashlib
import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file

from megatron_merak.checkpoint.manifest import parse_manifest
from megatron_merak.checkpoint.store import Shard, latest, load, save
from megatron_merak.errors import CheckpointError, DamagedError

NAMES = ("a.weight", "b.bias")
FILE = "model-rank-00000.safetensors"


def _shards(value: float) -> dict:
    tensors = [torch.full((3, 4), value), torch.full((5,), value)]
    return {
        "model": [
            Shard(name, tuple(t.shape), None, (), t) for name, t in zip(NAMES, tensors, strict=True)
        ]
    }


def _save(root, iteration=10, value=1.5):
    return save(root, iteration, _shards(value), {"consumed_samples": 1}, None, "cpu")


def _refusal(root, iteration=10, verify=True) -> str:
    shards = _shards(-1)
    with pytest.raises(CheckpointError) as caught:
        load(root, shards, None, "cpu", iteration, verify)
    assert all((part.tensor == -1).all() for part in shards["model"]), (
        "a tensor changed before the refusal"
    )
    return str(caught.value)


def test_every_flipped_byte_of_a_tensor_file_is_found(tmp_path):
    file = _save(tmp_path) / FILE
    good, draw = file.read_bytes(), random.Random(0)
    data = len(good) - 4 * (12 + 5)
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        message = _refusal(tmp_path)
        assert str(file) in message
        if position >= data:
            assert NAMES[position >= data + 48] in message
    file.write_bytes(good)
    load(tmp_path, _shards(0), None, "cpu")


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = _save(tmp_path) / "manifest.json"
    good = path.read_bytes()
    parse_manifest(good, path)
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(CheckpointError, match="manifest"):
                parse_manifest(bytes(bad), path)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_of_another_length_is_found_without_reading_it(tmp_path, verify):
    file = _save(tmp_path) / FILE
    good = file.read_bytes()
    for bad in (b"", good[:7], good[: len(good) // 2], good[:-1], good + b"\0"):
        file.write_bytes(bad)
        assert f"{file}: on" not in (message := _refusal(tmp_path, verify=verify))
        assert f"it has {len(bad)} bytes where {len(good)} were written" in message
    file.unlink()
    assert "it is missing" in _refusal(tmp_path, verify=verify)


def test_truncated_manifests_do_not_count_and_older_checkpoints_do(tmp_path):
    _save(tmp_path, 5)
    path = _save(tmp_path, 10) / "manifest.json"
    good = path.read_bytes()
    for bad in (
        b"",
        good[: len(good) // 2],
        good[:-1],
        good + b"\n",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
    ):
        path.write_bytes(bad)
        assert latest(tmp_path) == 5
        assert str(path) in _refusal(tmp_path, 10)


@pytest.mark.parametrize("verify", [True, False])
def test_files_of_two_saves_do_not_mix(tmp_path, verify):
    first, second = _save(tmp_path, 5), _save(tmp_path, 10)
    assert (first / FILE).stat().st_size == (second / FILE).stat().st_size, (
        "the length must not tell"
    )
    third = _save(tmp_path, 15)
    shutil.copy(second / FILE, third / FILE)
    assert "belongs to another save" in _refusal(tmp_path, 15, verify)


def test_a_directory_under_another_name_is_refused(tmp_path):
    _save(tmp_path, 5).rename(tmp_path / "iter_0000020")
    with pytest.raises(DamagedError, match="belongs to iteration 5"):
        latest(tmp_path)
    assert "belongs to iteration 5" in _refusal(tmp_path, 20)


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_only_regular_files_are_opened(tmp_path, kind):
    file = _save(tmp_path) / FILE
    file.rename(tmp_path / "outside")
    if kind == "link":
        file.symlink_to(tmp_path / "outside")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert "not a regular file" in _refusal(tmp_path)


def _part(**changes):
    def change(document):
        document["tensors"]["model"]["a.weight"]["parts"][0].update(changes)

    return change


def _entry(**changes):
    return lambda document: document["tensors"]["model"]["a.weight"].update(changes)


HOSTILE = {
    "parent": (_part(file="../model-rank-00000.safetensors"), "not the name of a tensor file"),
    "absolute": (_part(file="/etc/passwd"), "not the name of a tensor file"),
    "nul": (_part(file="model-rank-00000.safetensors\0"), "not the name of a tensor file"),
    "number": (_part(file=3), "not the name of a tensor file"),
    "unlisted": (_part(file="model-rank-00001.safetensors"), "not listed"),
    "no part": (_entry(parts=[]), "stored in full 0 times"),
    "negative": (_entry(shape=[-3, 4]), "-3 stands where a size"),
    "huge": (_entry(shape=[2**70, 4]), "stands where a size"),
    "fraction": (_entry(shape=[3.0, 4]), "3.0 stands where a size"),
    "bool": (_entry(shape=[True, 4]), "True stands where a size"),
    "dtype": (_entry(dtype="object"), "unknown dtype 'object'"),
    "dim": (_entry(dim=2), "has no dim 2"),
    "backwards": (
        lambda d: (_entry(dim=0)(d), _part(intervals=[[3, 0]])(d)),
        "ends before it starts",
    ),
    "gap": (lambda d: (_entry(dim=0)(d), _part(intervals=[[0, 2]])(d)), "are in no part"),
    "triple": (lambda d: (_entry(dim=0)(d), _part(intervals=[[0, 2, 3]])(d)), "unpack"),
    "shape type": (_entry(shape=None), "NoneType"),
    "list": (lambda d: d.update(tensors=[]), "no attribute"),
    "meta": (lambda d: d.update(meta=[]), "not an object"),
    "absent": (lambda d: d.pop("files"), "has no 'files'"),
    "digest": (
        lambda d: d["tensors"]["model"]["a.weight"]["parts"][0].update(digest="crc32:0"),
        "'crc32:0' stands where a digest belongs",
    ),
    "slab of its own dim": (
        lambda d: (_entry(dim=0)(d), _part(intervals=[[0, 3]], slab=[0, 0, 3])(d)),
        "has the slab [0, 0, 3]",
    ),
    "slab of no dim": (_part(slab=[1, 0, 4]), "has the slab [1, 0, 4]"),
    "slab that is text": (_part(slab="all"), "has the slab 'all'"),
    "slab outside": (
        lambda d: (_entry(dim=0)(d), _part(intervals=[[0, 3]], slab=[1, 0, 5])(d)),
        "along dim 1: indices [4, 5) lie outside the tensor",
    ),
    "gap between slabs": (
        lambda d: (_entry(dim=0)(d), _part(intervals=[[0, 3]], slab=[1, 0, 3])(d)),
        "along dim 1: indices [3, 4) are in no part",
    ),
    "gap in a slab": (
        lambda d: (_entry(dim=0)(d), _part(intervals=[[0, 2]], slab=[1, 0, 4])(d)),
        "along dim 0: indices [2, 3) are in no part",
    ),
    "version": (lambda d: d.update(version=4), "version is 4 and this program reads 1, 2 and 3"),
    "format": (lambda d: d.update(format="x"), "its format is 'x'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_with_a_right_digest_is_refused(tmp_path, case):
    path = _save(tmp_path) / "manifest.json"
    change, message = HOSTILE[case]
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(sealed(document))
    assert message in _refusal(tmp_path, 10)


def test_a_manifest_that_lies_about_a_tensor_is_refused_before_it_is_copied(tmp_path):
    path = _save(tmp_path) / "manifest.json"
    document = json.loads(path.read_bytes())
    document["tensors"]["model"]["a.weight"].update(dtype="int32")
    path.write_bytes(sealed(document))
    assert "another shape or dtype than the manifest says" in _refusal(tmp_path, 10)


def test_a_checkpoint_of_version_1_is_read_and_its_damage_found(tmp_path):
    """It has SHA-256 where later ones name their digest."""
    path = _save(tmp_path) / "manifest.json"
    before = path.read_bytes()
    document = json.loads(before)
    for file, written in document["files"].items():
        start = (path.parent / file).read_bytes()
        length = 8 + int.from_bytes(start[:8], "little")
        written["header"] = hashlib.sha256(start[:length]).hexdigest()
        tensors = load_file(path.parent / file)
        for entries in document["tensors"].values():
            for name, entry in entries.items():
                for part in entry["parts"]:
                    if part["file"] == file:
                        del part["digest"]
                        data = tensors[name].contiguous().view(-1).view(torch.uint8).numpy()
                        part["sha256"] = hashlib.sha256(data).hexdigest()
    path.write_bytes(sealed(document | {"version": 1}))
    assert path.read_bytes() != before
    assert load(tmp_path, _shards(0), None, "cpu")["iteration"] == 10
    file = max(path.parent.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "was changed after it was written" in _refusal(tmp_path, 10)


def sealed(document: dict) -> bytes:
    """What an attacker can do as well as the program: the digest is against accidents, not against
    people.
    """
    document.pop("sha256", None)
    text = json.dumps(document, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**document, "sha256": digest}, separators=(",", ":")).encode() + b"\n"

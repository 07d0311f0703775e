"""Stores of torch.distributed.checkpoint: any chunks, and every way in which one can be bad."""

import io
import os
import pickle
import random
import shutil
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_merak.errors import CheckpointError, DamagedError
from megatron_merak.formats.dcp_files import (
    DcpFiles,
    DcpTensor,
    StoredChunk,
    untiled,
    write_dcp,
)
from tests.power_cut import Disk

FILE = "__0_0.distcp"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Code:
    """What a pickle runs when it is read by what trusts it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@st.composite
def tiled(draw: Any) -> tuple[tuple[int, ...], list[StoredChunk]]:
    """A shape, and chunks that tile it: each cut in two along some dimension, a few times."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    chunks = [StoredChunk((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        chunk = chunks.pop(draw(st.integers(0, len(chunks) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, chunk.shape[dim]))
        for start, extent in ((0, at), (at, chunk.shape[dim] - at)):
            offsets = list(chunk.offsets)
            sizes = list(chunk.shape)
            offsets[dim] += start
            sizes[dim] = extent
            if extent:
                chunks.append(StoredChunk(tuple(offsets), tuple(sizes)))
    return shape, draw(st.permutations(chunks))


def cut(values: torch.Tensor, chunk: StoredChunk) -> torch.Tensor:
    pairs = zip(chunk.offsets, chunk.shape, strict=True)
    return values[tuple(slice(at, at + extent) for at, extent in pairs)]


@settings(max_examples=25, deadline=None)
@given(tiled(), st.data())
def test_any_chunks_are_read_whole_and_in_part_here_and_by_torch(tmp_path_factory, tiles, data):
    shape, chunks = tiles
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    directory = tmp_path_factory.mktemp("store")
    tensors = {"w": DcpTensor(shape, torch.float32, tuple(chunks))}
    write_dcp(directory, tensors, lambda name, chunk: cut(values, chunk), {}, file_bytes=1500)
    files = DcpFiles(directory, allow_pickle=True)
    assert files.tensors == tensors
    assert torch.equal(files.read("w"), values)
    theirs = {"w": torch.zeros(shape)}
    dcp.load(theirs, checkpoint_id=directory, no_dist=True)
    assert torch.equal(theirs["w"], values)
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        bounds = st.tuples(st.integers(0, shape[dim]), st.integers(0, shape[dim])).map(sorted)
        intervals = tuple(
            tuple(each) for each in data.draw(st.lists(bounds, min_size=1, max_size=3))
        )
        want = torch.cat([values.narrow(dim, a, b - a) for a, b in intervals], dim)
        assert torch.equal(files.read("w", dim, intervals), want)
    shutil.rmtree(directory)


def test_a_store_of_torch_with_objects(tmp_path):
    state = {
        "model": {"w": torch.randn(5, 3), "b": torch.randn(4).bfloat16(), "n": torch.tensor(7)},
        "groups": [{"lr": numpy.float64(0.5), "betas": (0.75, 0.5), "params": ["w", "b"]}],
        "bytes": io.BytesIO(b"text"),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    files = DcpFiles(tmp_path, allow_pickle=True)
    assert sorted(files.tensors) == ["model.b", "model.n", "model.w"]
    for name, value in state["model"].items():
        assert torch.equal(files.read(f"model.{name}"), value)
        assert files.tensors[f"model.{name}"].dtype == value.dtype
    assert files.object("groups.0.lr") == 0.5
    assert files.object("groups.0.betas") == (0.75, 0.5)
    assert files.object("groups.0.params") == ["w", "b"]
    assert files.object("bytes").getvalue() == b"text"
    assert files.object("step") == 3
    order = sorted(files.tensors, key=files.place)
    assert [files.place(name)[1] for name in order] == sorted(files.place(n)[1] for n in order)


def test_what_is_written_has_every_name_and_is_restored_nested(tmp_path):
    whole = {"a.w": DcpTensor((2,), torch.float32, (StoredChunk((0,), (2,)),))}
    write_dcp(
        tmp_path / "store",
        whole,
        lambda name, chunk: torch.arange(1.0, 1e5)[:2],
        {"a.0": 0.5},
        aliases={"a.x.y": "a.w", "b": "a.0"},
        paths={"a.w": ("a", "w"), "a.x.y": ("a", "x.y"), "a.0": ("a", "0"), "b": ("b",)},
    )
    assert sorted(os.listdir(tmp_path / "store")) == [".metadata", FILE]
    assert (tmp_path / "store" / FILE).read_bytes().count(b"PK\x05\x06") == 2
    assert os.path.getsize(tmp_path / "store" / FILE) < 5000  # not the memory around the tensor
    dcp_to_torch_save(tmp_path / "store", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    assert found["a"]["w"].tolist() == found["a"]["x.y"].tolist() == [1.0, 2.0]
    assert found["a"]["0"] == found["b"] == 0.5


def test_of_a_writing_that_fails_nothing_is_left(tmp_path):
    tensors = {
        name: DcpTensor((2,), torch.float32, (StoredChunk((0,), (2,)),)) for name in ("a", "b")
    }

    def values(name: str, chunk: StoredChunk) -> torch.Tensor:
        return torch.zeros(2) if name == "a" else torch.zeros(3)

    with pytest.raises(CheckpointError, match="b: its chunk at"):
        write_dcp(tmp_path, tensors, values, {}, file_bytes=1)
    assert os.listdir(tmp_path) == []


def test_chunks_are_asked_for_one_at_a_time(tmp_path):
    """Each is gone before the next: whatever the model's size, one is in memory."""
    alive: list[weakref.ref] = []

    def values(name: str, chunk: StoredChunk) -> torch.Tensor:
        assert all(each() is None for each in alive)
        made = torch.zeros(chunk.shape)
        alive.append(weakref.ref(made))
        return made

    chunks = tuple(StoredChunk((row, 0), (1, 4)) for row in range(4))
    write_dcp(tmp_path, {"w": DcpTensor((4, 4), torch.float32, chunks)}, values, {})
    assert len(alive) == 4


def make(directory: Path) -> None:
    state = {"w": torch.arange(6.0).view(3, 2), "v": torch.ones(2), "o": {"p": (1, 2)}}
    dcp.save(state, checkpoint_id=directory, no_dist=True)


def edited(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A change to what `.metadata` says."""

    def apply(directory: Path) -> None:
        path = directory / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return apply


def stored(metadata: Any, name: str, **fields: Any) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == name)
    old = metadata.storage_data[index]
    values = {key: getattr(old, key) for key in ("relative_path", "offset", "length")}
    metadata.storage_data[index] = _StorageInfo(**{**values, **fields})


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        listed = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in boxes]
        metadata.state_dict_metadata["w"].chunks = listed
        info = metadata.storage_data[MetadataIndex("w", (0, 0))]
        for offsets, _ in boxes:
            metadata.storage_data[MetadataIndex("w", offsets)] = info

    return change


def dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.int32


BAD = {
    "no metadata": (lambda d: (d / ".metadata").unlink(), CheckpointError, "no .metadata"),
    "of ranks": (
        lambda d: (d / ".metadata").rename(d / "__0.metadata"),
        CheckpointError,
        "each rank wrote",
    ),
    "cut metadata": (
        lambda d: (d / ".metadata").write_bytes((d / ".metadata").read_bytes()[:-40]),
        DamagedError,
        "cannot be parsed",
    ),
    "no pickle": (lambda d: (d / ".metadata").write_bytes(b"{}"), DamagedError, "cannot be parsed"),
    "another pickle": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        DamagedError,
        "does not say where",
    ),
    "code in metadata": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps(Code(d / "ran"))),
        CheckpointError,
        "names .posix.mkdir., which no store",
    ),
    "code in planner data": (
        lambda d: edited(lambda m: setattr(m, "planner_data", Code(d / "ran")))(d),
        CheckpointError,
        "names .posix.mkdir., which no store",
    ),
    "missing file": (lambda d: (d / FILE).unlink(), DamagedError, "No such file"),
    "cut file": (
        lambda d: os.truncate(d / FILE, os.path.getsize(d / FILE) - 1),
        DamagedError,
        "bytes, and the record of",
    ),
    "another directory": (
        edited(lambda m: stored(m, "w", relative_path="../other")),
        DamagedError,
        "no file of this directory",
    ),
    "absolute": (
        edited(lambda m: stored(m, "w", relative_path="/dev/zero")),
        DamagedError,
        "no file of this directory",
    ),
    "beyond": (edited(lambda m: stored(m, "w", length=1 << 40)), DamagedError, "ends at"),
    "negative": (edited(lambda m: stored(m, "w", offset=-1)), DamagedError, "is at"),
    "short record": (edited(lambda m: stored(m, "w", length=8)), DamagedError, "its record 8"),
    "transformed": (
        edited(lambda m: stored(m, "w", transform_descriptors=["zstd"])),
        CheckpointError,
        "transformed by an extension",
    ),
    "nowhere": (
        edited(lambda m: m.storage_data.pop(MetadataIndex("w", (0, 0)))),
        DamagedError,
        "does not say where w",
    ),
    "gap": (edited(chunks(((0, 0), (1, 2)), ((2, 0), (1, 2)))), DamagedError, "4 of 6 elements"),
    "overlap": (edited(chunks(((0, 0), (2, 2)), ((1, 0), (2, 2)))), DamagedError, "overlap"),
    "outside": (edited(chunks(((1, 0), (3, 2)))), DamagedError, "reaches out of it"),
    "dimensions": (edited(chunks(((0,), (6,)))), DamagedError, "1 dimensions"),
    "shape": (
        edited(lambda m: setattr(m.state_dict_metadata["w"], "size", (3, "2"))),
        DamagedError,
        "tensor w has shape",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_store_that_cannot_be_opened(case, tmp_path):
    spoil, kind, text = BAD[case]
    make(tmp_path)
    spoil(tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match=text) as raised:
        DcpFiles(tmp_path, allow_pickle=True)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
    assert sorted(os.listdir(tmp_path)) == before and "ran" not in before


def other_dtype(directory: Path) -> None:
    edited(dtype)(directory)


def broken_zip(directory: Path) -> None:
    data = bytearray((directory / FILE).read_bytes())
    at = pickle.loads((directory / ".metadata").read_bytes()).storage_data[
        MetadataIndex("w", (0, 0))
    ]
    data[at.offset + 4 : at.offset + at.length] = bytes(at.length - 4)
    (directory / FILE).write_bytes(data)


def flipped(directory: Path) -> None:
    data = bytearray((directory / FILE).read_bytes())
    at = data.index(torch.arange(6.0).numpy().tobytes())
    data[at + 5] ^= 4
    (directory / FILE).write_bytes(data)


def no_zip(directory: Path) -> None:
    data = bytearray((directory / FILE).read_bytes())
    at = pickle.loads((directory / ".metadata").read_bytes()).storage_data[
        MetadataIndex("w", (0, 0))
    ]
    data[at.offset : at.offset + 4] = b"\x80\x02}q"
    (directory / FILE).write_bytes(data)


def record(directory: Path, name: str, value: Any) -> None:
    """Put another value in the place of a record."""
    with open(directory / FILE, "ab") as file:
        at = file.tell()
        torch.save(value, file)
        length = file.tell() - at
    edited(lambda m: stored(m, name, offset=at, length=length))(directory)


RECORDS = {
    "dtype": (
        other_dtype,
        DamagedError,
        "float32 of shape .3, 2. where .metadata says torch.int32",
    ),
    "shape": (lambda d: record(d, "w", torch.ones(2, 3)), DamagedError, "shape .2, 3. where"),
    "no tensor": (lambda d: record(d, "w", {"w": 1, "x": "y" * 99}), DamagedError, "holds a dict"),
    "code": (lambda d: record(d, "w", Code(d / "ran")), CheckpointError, "posix.mkdir"),
    "no zip": (no_zip, DamagedError, "not what torch.save writes"),
    "a bit": (flipped, DamagedError, "Bad CRC-32 for file"),
    "zeros": (broken_zip, DamagedError, "cannot be read"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_cannot_be_read(case, tmp_path):
    spoil, kind, text = RECORDS[case]
    make(tmp_path)
    spoil(tmp_path)
    files = DcpFiles(tmp_path, allow_pickle=True)
    assert files.read("v").tolist() == [1.0, 1.0]
    with pytest.raises(CheckpointError, match=text) as raised:
        files.read("w")
    assert type(raised.value) is kind and "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_a_record_without_sums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        make(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    files = DcpFiles(tmp_path, allow_pickle=True)
    assert torch.equal(files.read("w"), torch.arange(6.0).view(3, 2))


def test_bytes_that_are_changed_anywhere_are_one_typed_error_or_change_nothing(tmp_path):
    make(tmp_path)
    names = (".metadata", FILE)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    rnd = random.Random(11)
    refused = 0
    for _ in range(150):
        for name in names:
            (tmp_path / name).write_bytes(before[name])
        name = rnd.choice(names)
        data = bytearray(before[name])
        for _ in range(rnd.choice((1, 2, 5))):
            data[rnd.randrange(len(data))] = rnd.randrange(256)
        (tmp_path / name).write_bytes(data)
        try:
            files = DcpFiles(tmp_path, allow_pickle=True)
            read = {each: files.read(each).tolist() for each in files.tensors}
            for each in files.objects:
                files.object(each)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert name == ".metadata" or read["w"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert refused > 100


def test_an_object_that_would_run_code(tmp_path):
    make(tmp_path)
    record(tmp_path, "o.p", Code(tmp_path / "ran"))
    with pytest.raises(CheckpointError, match="object o.p needs more than values .posix.mkdir"):
        DcpFiles(tmp_path, allow_pickle=True).object("o.p")
    assert not (tmp_path / "ran").exists()


def test_what_megatron_core_keeps_in_its_metadata_is_passed_over(tmp_path, monkeypatch):
    """Plans of all ranks, of torch's classes and of its own, and a path."""
    make(tmp_path)
    theirs = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    theirs.MCoreSavePlan = type("MCoreSavePlan", (), {"__module__": theirs.__name__})
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)

    def change(metadata: Any) -> None:
        chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((3, 2)))
        written = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size((3, 2)))
        item = WriteItem(MetadataIndex("w", (0, 0)), WriteItemType.SHARD, tensor_data=written)
        metadata.all_local_plans = [SavePlan([item]), theirs.MCoreSavePlan()]
        metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (3, 2)}}
        metadata.storage_meta = StorageMeta(Path("/some/where"), "id")

    edited(change)(tmp_path)
    files = DcpFiles(tmp_path, allow_pickle=True)
    assert torch.equal(files.read("w"), torch.arange(6.0).view(3, 2))


def test_pickles_are_read_on_request_only(tmp_path):
    make(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.metadata is a pickle.*--allow-pickle"):
        DcpFiles(tmp_path, allow_pickle=False)


def test_a_file_that_is_a_link_out_of_the_store(tmp_path):
    make(tmp_path / "store")
    (tmp_path / "store" / FILE).rename(tmp_path / FILE)
    (tmp_path / "store" / FILE).symlink_to(tmp_path / FILE)
    with pytest.raises(DamagedError, match="no regular file of the store"):
        DcpFiles(tmp_path / "store", allow_pickle=True)


def test_a_tensor_of_many_chunks_is_checked_in_time():
    """In any order, along the shorter dimension too: the square of their number would take hours."""
    count = 30_000
    cuts = [StoredChunk((0, at), (1 << 20, 1)) for at in range(count)]
    assert untiled(DcpTensor((1 << 20, count), torch.float32, tuple(cuts[::-1]))) == ""
    assert "overlap" in untiled(
        DcpTensor((1 << 20, count), torch.float32, (*cuts, StoredChunk((0, 7), (1, 2))))
    )


def constant(directory: Path, value: float) -> None:
    """Write a store of two files that hold a value."""
    whole = DcpTensor((2,), torch.float32, (StoredChunk((0,), (2,)),))
    made = torch.full((2,), value)
    write_dcp(directory, {"a": whole, "b": whole}, lambda name, chunk: made, {}, file_bytes=1)


def test_a_power_cut_leaves_a_whole_store_or_none(tmp_path):
    (tmp_path / "disk").mkdir()
    constant(tmp_path / "disk" / "old", 1.0)
    disk = Disk(tmp_path / "disk", tmp_path / "spare")
    found: set[tuple] = set()

    def check() -> None:
        shown = []
        for name in ("old", "new"):
            try:
                files = DcpFiles(tmp_path / "spare" / name, allow_pickle=True)
            except DamagedError:
                raise
            except CheckpointError:
                shown.append(None)
                continue
            values = {*files.read("a").tolist(), *files.read("b").tolist()}
            assert len(values) == 1 and sorted(files.tensors) == ["a", "b"]
            shown.append(values.pop())
        found.add(tuple(shown))

    with disk.watched(check):
        constant(tmp_path / "disk" / "old", 2.0)
        constant(tmp_path / "disk" / "new", 3.0)
    disk.cut(check)
    disk.close()
    assert found == {(1.0, None), (None, None), (2.0, None), (2.0, 3.0)}

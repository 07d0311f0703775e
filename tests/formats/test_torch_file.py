"""Files of torch.save, read and written a tensor at a time, beside torch itself."""

import os
import pickle
import zipfile

import numpy
import pytest
import torch

from megatron_merak.errors import CheckpointError, DamagedError
from megatron_merak.formats import torch_file
from megatron_merak.formats.torch_file import LateTensor, TensorOnDisk, TorchFile, write_torch


@pytest.mark.parametrize("large", [False, True])
def test_torch_loads_what_is_written(large, tmp_path, monkeypatch):
    if large:  # 64-bit sizes
        monkeypatch.setattr(torch_file, "_LARGE", 100)
    values = {
        "turned": torch.randn(5, 3).bfloat16().T,
        "part of more": torch.randn(900)[:700],
        "empty": torch.empty(0, 4).half(),
        "number": torch.tensor(3.0),
    }
    late = {name: LateTensor(name, tuple(v.shape), v.dtype) for name, v in values.items()}
    path = tmp_path / "file.pt"
    with open(path, "wb") as file:
        write_torch(file, {**late, "step": 3, "none": None, "set": {1}}, values.__getitem__)
    assert zipfile.ZipFile(path).testzip() is None
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert (loaded["step"], loaded["none"], loaded["set"]) == (3, None, {1})
        for name, value in values.items():
            assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name
            assert loaded[name].data_ptr() % 64 == 0
    read = TorchFile(path).load()
    assert all(torch.equal(read[name].read(), value) for name, value in values.items())


def test_what_torch_saves_is_read(tmp_path):
    """Views of one memory, parameters, tensors with attributes, and what lies beside them."""
    flat = torch.arange(24.0)
    tensor = torch.ones(3)
    tensor.partition_dim = 1
    parameter = torch.nn.Parameter(torch.full((2,), 4.0))
    parameter.shared = True
    saved = {
        "first": flat[:12].view(3, 4),
        "turned": flat[12:].view(4, 3).T,
        "tensor": tensor,
        "parameter": parameter,
        "plain": torch.nn.Parameter(torch.zeros(1)),
        "numpy": numpy.random.RandomState(1).get_state(),
        "bytes": b"\x00\xff",
        "set": {2},
    }
    path = tmp_path / "file.pt"
    torch.save(saved, path)
    read = TorchFile(path).load()
    for name in ("first", "turned", "tensor", "parameter", "plain"):
        assert isinstance(read[name], TensorOnDisk)
        assert torch.equal(read[name].read(), saved[name]), name
    assert read["bytes"] == b"\x00\xff" and read["set"] == {2}


class _Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def _changed(path):
    """One byte of a tensor is another one."""
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((8,), 3.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)


BAD = {
    "code": (lambda path: torch.save({"a": _Runs()}, path), CheckpointError, "system"),
    "truncated": (lambda path: os.truncate(path, 600), DamagedError, "not a zip file"),
    "changed": (_changed, DamagedError, "Bad CRC-32"),
    "a bare pickle": (
        lambda path: path.write_bytes(pickle.dumps(_Runs())),
        DamagedError,
        "not a zip file",
    ),
    "missing": (lambda path: path.unlink(), DamagedError, "it is missing"),
    "another archive": (
        lambda path: zipfile.ZipFile(path, "w").close(),
        DamagedError,
        "not of torch.save",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_line(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, kind, message = BAD[case]
    path = tmp_path / "file.pt"
    torch.save({"a": torch.full((8,), 3.0)}, path)
    change(path)
    with pytest.raises(kind, match=message) as caught:
        TorchFile(path).load()["a"].read()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()

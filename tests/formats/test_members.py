"""Members of enumerations in pickles of early releases of Python 3.11, which name them by ``getattr``:
of classes that only stand for others, and of no other class.
"""

import enum
import io
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from megatron_merak.errors import CheckpointError
from megatron_merak.formats.dcp_pickle import read_metadata
from megatron_merak.formats.pickles import Inert, PlainUnpickler


class Member:
    """Is pickled as a member of a class."""

    def __init__(self, kind: Any, name: str):
        self.kind = kind
        self.name = name

    def __reduce__(self) -> tuple:
        return getattr, (self.kind, self.name)


def test_a_metadata_with_members(tmp_path: Path):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps([Member(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"), 1]))
    member, one = read_metadata(path)
    assert type(member).__name__ == "_MEM_FORMAT_ENCODING" and one == 1


def test_a_metadata_with_attributes_of_others(tmp_path: Path):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Member(set, "mro")))
    with pytest.raises(CheckpointError, match="it names 'builtins.getattr', which no store"):
        read_metadata(path)


def test_settings_with_members(monkeypatch):
    theirs = types.ModuleType("megatron.core.enums")
    theirs.Backend = enum.Enum("Backend", ["flash"], module=theirs.__name__)
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    data = pickle.dumps([Member(theirs.Backend, "flash"), 1])
    member, one = PlainUnpickler(io.BytesIO(data)).load()
    assert type(member) is Inert and one == 1
    with pytest.raises(pickle.UnpicklingError, match="it names builtins.getattr, which is not"):
        PlainUnpickler(io.BytesIO(pickle.dumps(Member(set, "mro")))).load()

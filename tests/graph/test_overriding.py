"""Attributes of torch and transformers are replaced for a while, and missing ones are named."""

import re
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megatron_merak
from megatron_merak.errors import TraceError
from megatron_merak.graph.capture.overriding import overriding


class Base:
    @classmethod
    def made(cls):
        return cls.__name__


class Derived(Base):
    pass


@pytest.mark.parametrize(
    "owner", [Base, Derived, Derived()], ids=["own", "inherited", "of an object"]
)
def test_what_was_there_comes_back(owner):
    before = dict(vars(owner))
    with pytest.raises(KeyError), overriding(owner, "made", lambda: "another"):
        assert owner.made() == "another"
        raise KeyError
    assert dict(vars(owner)) == before
    assert owner.made() == (owner if isinstance(owner, type) else type(owner)).__name__


def test_methods_of_compiled_classes_come_back():
    before = Tensor.bincount
    with overriding(Tensor, "bincount", lambda self: self):
        assert torch.ones(1).bincount() == 1
    assert Tensor.bincount is before and "bincount" not in vars(Tensor)


@pytest.mark.parametrize("owner", [torch, nn.Module, types.SimpleNamespace()])
def test_what_a_release_lacks_is_named(owner):
    with pytest.raises(TraceError, match=r"has no [\w.]+\.renamed_since, which a capture replaces"):
        with overriding(owner, "renamed_since", None):
            pass


def test_nothing_else_replaces_attributes():
    """A patch by unittest.mock of something that a release renamed is an AttributeError of the
    mock.
    """
    package = Path(megatron_merak.__file__).parent
    found = [
        path
        for path in package.rglob("*.py")
        if re.search(r"^\s*(from|import) unittest", path.read_text(), re.M)
    ]
    assert not found

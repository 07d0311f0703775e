"""Tracing with the values of the batch: where a model asks for one, the trace takes the example's and marks a guard.

What is computed from the batch and constants alone is computed twice while the model is traced, with and without
values. What depends on a parameter or on chance has no values, so that asking for them fails as in any trace.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._export import non_strict_utils
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from megatron_merak.graph.capture.watch import place

aten = torch.ops.aten
GUARD = "guard of "  # how the message of an assertion starts that is a guard, before the model's line


_LIKE_FIRST = ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full")
_LIKE_SECOND = ("expand_as", "view_as", "reshape_as", "type_as")


def only_like(func: Any) -> int | None:
    """Which argument of an operation matters by its shape and dtype only; None: no argument."""
    name = func._schema.name.removeprefix("aten::") if isinstance(func, OpOverload) else ""
    return 0 if name in _LIKE_FIRST else 1 if name in _LIKE_SECOND else None


@dataclass(frozen=True)
class Asked:
    """The model's line ``place`` asked for ``value`` of ``tensor``: its only one, or how many it selects."""

    tensor: Tensor
    value: Any
    counts: bool
    place: str


class KnowingMode(FakeTensorMode):
    """A world of fake tensors some of which have values: ``values``, by tensor. asked: what has not been marked yet."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.values = WeakIdKeyDictionary()
        self.asked: list[Asked] = []
        self._spoilt: dict[int, torch.UntypedStorage] = {}

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:
        fake = super().from_tensor(tensor, **options)
        if not isinstance(tensor, FakeTensor):
            self.values[fake] = tensor
        return fake

    def dispatch(self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, OpOverload) or not func._schema.returns:
            return super().dispatch(func, types, args, kwargs)
        like = only_like(func)
        given = [x for i, x in enumerate(args) if i != like]
        known = torch.Tag.nondeterministic_seeded not in func.tags
        known = known and all(self._known(x) for x in tree_leaves((given, kwargs)))
        if known and func in _ASKS:
            return self._ask(func, args, kwargs)
        made = super().dispatch(func, types, args, kwargs)
        if known:
            self._keep(made, self._compute(func, args, kwargs))
        else:
            self._spoil(func, args, kwargs)
        return made

    def knows(self, tensor: Tensor) -> bool:
        return self._value(tensor) is not None

    def _known(self, leaf: Any) -> bool:
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return False
        return not isinstance(leaf, FakeTensor) or self.knows(leaf)

    def _value(self, tensor: Tensor) -> Tensor | None:
        value = self.values.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        return None if value is None or value.untyped_storage()._cdata in self._spoilt else value

    def _compute(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        like = only_like(func)
        with no_dispatch(), torch.no_grad():
            given = [torch.empty(x.shape, dtype=x.dtype) if i == like else x for i, x in enumerate(args)]
            given, kwargs = tree_map(lambda x: self._value(x) if isinstance(x, Tensor) else x, (given, kwargs))
            return func(*given, **kwargs)

    def _keep(self, made: Any, values: Any) -> None:
        for fake, value in zip(tree_leaves(made), tree_leaves(values), strict=True):
            if isinstance(fake, FakeTensor) and fake.shape == value.shape and fake.dtype == value.dtype:
                self.values[fake] = value

    def _spoil(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """What is written without values has none from now on, nor have its views."""
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in tree_leaves(kwargs.get(argument.name, args[index] if index < len(args) else None)):
                value = self._value(x) if isinstance(x, Tensor) else None
                if value is not None:
                    self._spoilt[value.untyped_storage()._cdata] = value.untyped_storage()

    def _ask(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        value = self._compute(func, args, kwargs)
        counts = isinstance(value, Tensor)
        self.asked.append(Asked(args[0], value.shape[0] if counts else value, counts, place()))
        if not counts:
            return value
        with self:
            made = torch.empty(value.shape, dtype=value.dtype)
        self.values[made] = value
        return made


_ASKS = (aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default)


class _Marks(TorchFunctionMode):
    """Leaves an assertion in the graph behind each of the model's calls that asked for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: list[KnowingMode] = []

    def world(self, **options: Any) -> KnowingMode:
        self.worlds.append(KnowingMode(**options))
        return self.worlds[-1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            args = args[0], self._chosen(args[1])
        elif func in (torch.masked_select, Tensor.masked_select):
            values, mask = torch.broadcast_tensors(args[0], kwargs.pop("mask", args[-1]))
            func, args = Tensor.__getitem__, (values, self._chosen(mask))
        elif func in (torch.repeat_interleave, Tensor.repeat_interleave) and "output_size" not in kwargs:
            repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
            if isinstance(repeats, Tensor) and repeats.dim() == 1:
                kwargs = {**kwargs, "output_size": int(repeats.sum())}
        elif func in (torch.narrow, Tensor.narrow):
            args = args[0], *(int(x) if isinstance(x, Tensor) else x for x in args[1:])
            kwargs = {name: int(x) if isinstance(x, Tensor) and name == "start" else x for name, x in kwargs.items()}
        result = func(*args, **kwargs)
        self._mark()
        return result

    def _chosen(self, index: Any) -> Any:
        """An index whose masks of known values are the positions that they select, as everywhere in torch."""
        parts: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            mask = isinstance(part, FakeTensor) and part.dtype == torch.bool and part.dim() > 0
            known = mask and any(world.knows(part) for world in self.worlds)
            parts += part.nonzero(as_tuple=True) if known else (part,)
            self._mark()
        return tuple(parts) if isinstance(index, tuple) or len(parts) != 1 else parts[0]

    def _mark(self) -> None:
        for world in self.worlds:
            while world.asked:
                asked = world.asked.pop(0)
                tensor = torch.count_nonzero(asked.tensor) if asked.counts else asked.tensor.reshape(())
                aten._assert_async.msg(torch.eq(tensor, asked.value), GUARD + asked.place)


@contextmanager
def values_of_batch() -> Iterator[None]:
    """Inside, a model is traced with the values of the real tensors that it is given, and of its buffers.

    Both are written to where the model writes to them, so they should be copies.
    """
    marks = _Marks()
    with (
        torch.random.fork_rng(devices=[]),
        mock.patch.object(non_strict_utils, "FakeTensorMode", marks.world),
        marks,
    ):
        yield
    if any(world.asked for world in marks.worlds):
        raise RuntimeError("the model asked for a value where no guard could be left")

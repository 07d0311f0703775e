"""Tracing with the values of an example batch: where a model reads a value, the trace uses it and
adds a guard.

While the model is traced, what depends on the batch and constants alone is computed with and
without values. What depends on parameters or random numbers has no values; reading them fails as in
any trace.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._export import non_strict_utils
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from megatron_merak.graph.capture.overriding import overriding
from megatron_merak.graph.capture.watch import model_line
from megatron_merak.graph.ir.operators import facts_named

aten = torch.ops.aten
# start of the message of an assertion that is a guard; the model's line follows
GUARD = "guard of "


def shape_only_argument(func: Any) -> int | None:
    """Return the index of the argument of which only shape and dtype matter; None if there
    is none.
    """
    return (
        facts_named(func._schema.name.removeprefix("aten::")).like
        if isinstance(func, OpOverload)
        else None
    )


@dataclass(frozen=True)
class ValueRead:
    """One read of a tensor's value by the model.

    value:    the only element of ``tensor``; if ``is_count``, its number of nonzero elements.
    is_count: whether the model read the positions of nonzero elements, so that a shape depends on
              their number.
    line:     the model's line of code.
    """

    tensor: Tensor
    value: Any
    is_count: bool
    line: str


class ValueTrackingMode(FakeTensorMode):
    """A fake tensor mode in which some tensors have values.

    values: fake tensor -> its value.
    reads:  values that the model has read and that are not guarded yet.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.values = WeakIdKeyDictionary()
        self.reads: list[ValueRead] = []
        self._forgotten: dict[int, torch.UntypedStorage] = {}

    def from_tensor(self, tensor: Tensor, **options: Any) -> FakeTensor:
        fake = super().from_tensor(tensor, **options)
        if not isinstance(tensor, FakeTensor):
            self.values[fake] = tensor
        return fake

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, OpOverload) or not func._schema.returns:
            return super().dispatch(func, types, args, kwargs)
        like = shape_only_argument(func)
        inputs = [x for i, x in enumerate(args) if i != like]
        has_values = torch.Tag.nondeterministic_seeded not in func.tags
        has_values = has_values and all(self._is_known(x) for x in tree_leaves((inputs, kwargs)))
        if has_values and func in _ASKS:
            return self._read(func, args, kwargs)
        result = super().dispatch(func, types, args, kwargs)
        if has_values:
            self._remember(result, self._compute(func, args, kwargs))
        else:
            self._forget(func, args, kwargs)
        return result

    def has_value(self, tensor: Tensor) -> bool:
        return self._value(tensor) is not None

    def _is_known(self, leaf: Any) -> bool:
        if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
            return False
        return not isinstance(leaf, FakeTensor) or self.has_value(leaf)

    def _value(self, tensor: Tensor) -> Tensor | None:
        value = self.values.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        return None if value is None or value.untyped_storage()._cdata in self._forgotten else value

    def _compute(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        like = shape_only_argument(func)
        with no_dispatch(), torch.no_grad():
            inputs = [
                torch.empty(x.shape, dtype=x.dtype) if i == like else x for i, x in enumerate(args)
            ]
            inputs, kwargs = tree_map(
                lambda x: self._value(x) if isinstance(x, Tensor) else x, (inputs, kwargs)
            )
            return func(*inputs, **kwargs)

    def _remember(self, result: Any, values: Any) -> None:
        for fake, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
            if (
                isinstance(fake, FakeTensor)
                and fake.shape == value.shape
                and fake.dtype == value.dtype
            ):
                self.values[fake] = value

    def _forget(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """Forget the values of tensors that are written to with unknown values, and of
        their views.
        """
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in tree_leaves(
                kwargs.get(argument.name, args[index] if index < len(args) else None)
            ):
                value = self._value(x) if isinstance(x, Tensor) else None
                if value is not None:
                    self._forgotten[value.untyped_storage()._cdata] = value.untyped_storage()

    def _read(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        value = self._compute(func, args, kwargs)
        is_count = isinstance(value, Tensor)
        self.reads.append(
            ValueRead(args[0], value.shape[0] if is_count else value, is_count, model_line())
        )
        if not is_count:
            return value
        with self:
            result = torch.empty(value.shape, dtype=value.dtype)
        self.values[result] = value
        return result


_ASKS = (aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default)


class _GuardMarks(TorchFunctionMode):
    """Adds an assertion to the graph after each call of the model that read a value."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[ValueTrackingMode] = []

    def new_mode(self, **options: Any) -> ValueTrackingMode:
        self.modes.append(ValueTrackingMode(**options))
        return self.modes[-1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            args = args[0], self._positions_of(args[1])
        elif func in (torch.masked_select, Tensor.masked_select):
            values, mask = torch.broadcast_tensors(args[0], kwargs.pop("mask", args[-1]))
            func = Tensor.__getitem__
            args = (values, self._positions_of(mask))
        elif (
            func in (torch.repeat_interleave, Tensor.repeat_interleave)
            and "output_size" not in kwargs
        ):
            repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
            if isinstance(repeats, Tensor) and repeats.dim() == 1:
                kwargs = {**kwargs, "output_size": int(repeats.sum())}
        elif func in (torch.narrow, Tensor.narrow):
            args = args[0], *(int(x) if isinstance(x, Tensor) else x for x in args[1:])
            kwargs = {
                name: int(x) if isinstance(x, Tensor) and name == "start" else x
                for name, x in kwargs.items()
            }
        elif func is torch.tensor and args and _of_scalars(args[0]):
            to = {
                name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None
            }
            func = Tensor.to
            args = (torch.stack(tuple(args[0])).detach(),)
            kwargs = to
        elif func in (torch.unique_consecutive, Tensor.unique_consecutive) and _alone(args, kwargs):
            flat = args[0].flatten()
            first = torch.ones_like(flat[:1], dtype=torch.bool)
            starts = torch.cat((first, flat[1:] != flat[:-1]))
            func = Tensor.__getitem__
            args = (flat, self._positions_of(starts))
            kwargs = {}
        result = func(*args, **kwargs)
        self._mark()
        return result

    def _positions_of(self, index: Any) -> Any:
        """Replace masks with known values in an index by the positions that they select, which is
        equivalent.
        """
        parts: list[Any] = []
        for part in index if isinstance(index, tuple) else (index,):
            mask = isinstance(part, FakeTensor) and part.dtype == torch.bool and part.dim() > 0
            has_value = mask and any(mode.has_value(part) for mode in self.modes)
            parts += part.nonzero(as_tuple=True) if has_value else (part,)
            self._mark()
        return tuple(parts) if isinstance(index, tuple) or len(parts) != 1 else parts[0]

    def _mark(self) -> None:
        for mode in self.modes:
            while mode.reads:
                read = mode.reads.pop(0)
                tensor = (
                    torch.count_nonzero(read.tensor) if read.is_count else read.tensor.reshape(())
                )
                aten._assert_async.msg(torch.eq(tensor, read.value), GUARD + read.line)


def _alone(args: Any, kwargs: Any) -> bool:
    """Whether a call has no argument, beside the first, other than None and False."""
    return len(args) == 1 and all(value is None or value is False for value in kwargs.values())


def _of_scalars(data: Any) -> bool:
    """Whether ``data`` is a list of tensors of one element, whose values ``torch.tensor`` would
    read.
    """
    return (
        isinstance(data, list | tuple)
        and len(data) > 0
        and all(isinstance(x, Tensor) and not x.dim() for x in data)
    )


@contextmanager
def values_of_batch() -> Iterator[None]:
    """Trace a model with the values of its real inputs and buffers, inside the context.

    The model may write to them, so they should be copies.
    """
    marks = _GuardMarks()
    with (
        torch.random.fork_rng(devices=[]),
        overriding(non_strict_utils, "FakeTensorMode", marks.new_mode),
        marks,
    ):
        yield
    if any(mode.reads for mode in marks.modes):
        raise RuntimeError("the model read a value where no guard could be added")

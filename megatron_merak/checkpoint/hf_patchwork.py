"""Tensors that are not in memory: which rectangles of stored tensors they consist of.

    a = stored("experts.0.w1", (64, 32), torch.float32)
    b = stored("experts.1.w1", (64, 32), torch.float32)
    read(torch.stack([a, b])[:, :8], fetch)         # fetches rows [0, 8) of each, and nothing else

Code that renames, merges and splits the tensors of a checkpoint runs on them unchanged. cat, stack,
split, transpose and the like only move rectangles; the result of any other operation is computed
when it is read, from its full operands.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

Range = tuple[int, int]
# (stored name, [start, stop) per dim) -> that rectangle
Fetch = Callable[[str, tuple[Range, ...]], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Computed:
    """Output number ``index`` of an operation on patchworks."""

    func: Callable
    args: tuple
    kwargs: dict
    index: int


@dataclass(frozen=True, eq=False)
class Patch:
    """A rectangle of ``source``, ``take[d]`` along its dim d, as part of a patchwork.

    Along dim i of the patchwork it starts at ``at[i]``, and shows dim ``axes[i]`` of the source,
    None for extent 1.
    """

    source: str | Computed
    take: tuple[Range, ...]
    axes: tuple[int | None, ...]
    at: tuple[int, ...]

    def extent(self, dim: int) -> int:
        axis = self.axes[dim]
        return 1 if axis is None else self.take[axis][1] - self.take[axis][0]

    def narrow(self, dim: int, start: int, stop: int) -> "Patch | None":
        """Return the part within [start, stop) along ``dim`` of the patchwork, in coordinates that
        begin at ``start``.
        """
        first = max(start, self.at[dim])
        last = min(stop, self.at[dim] + self.extent(dim))
        if first >= last:
            return None
        take = list(self.take)
        axis = self.axes[dim]
        if axis is not None:
            begin = take[axis][0] - self.at[dim]
            take[axis] = (begin + first, begin + last)
        return replace(self, take=tuple(take), at=_put(self.at, dim, first - start))


class Patchwork(torch.Tensor):
    """A tensor whose elements are ``patches``, which cover it once. In-place operations are
    refused.
    """

    patches: tuple[Patch, ...]

    @staticmethod
    def __new__(cls, patches: Sequence[Patch], shape: Sequence[int], dtype: torch.dtype):
        cpu = torch.device("cpu")
        patchwork: Any = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=cpu
        )
        patchwork.patches = tuple(patches)
        return patchwork

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"Patchwork({tuple(self.shape)}, {self.dtype}, {len(self.patches)} patches)"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        move = _MOVES.get(func)
        moved = NotImplemented if move is None or kwargs else move(*args)
        return _compute(func, args, kwargs) if moved is NotImplemented else moved


def stored(name: str, shape: Sequence[int], dtype: torch.dtype) -> Patchwork:
    """Return a patchwork of one full stored tensor."""
    return _everything(name, shape, dtype)


def sources(tensor: Patchwork) -> list[str]:
    """Return the names of the stored tensors of which ``tensor`` consists, in the order in which
    `read` fetches them.
    """
    names = []
    for patch in tensor.patches:
        if isinstance(patch.source, str):
            names.append(patch.source)
        else:
            for operand in _operands(patch.source):
                names.extend(sources(operand))
    return list(dict.fromkeys(names))


def part(tensor: Patchwork, dim: int | None, intervals: Sequence[Range]) -> Patchwork:
    """Return the index ranges ``intervals`` along ``dim``, concatenated; the full tensor if ``dim``
    is None.
    """
    if dim is None:
        return tensor
    return _cat([_slice(tensor, dim, start, stop) for start, stop in intervals], dim)


def read(tensor: Patchwork, fetch: Fetch) -> torch.Tensor:
    """Return the values. fetch: called once per patch; if it returns "meta" tensors, so does this
    function.
    """
    result = None
    for patch in tensor.patches:
        values = _fetch(patch, fetch)
        if tuple(values.shape) == tuple(tensor.shape):
            return values
        if result is None:
            result = torch.empty(tensor.shape, dtype=tensor.dtype, device=values.device)
        region = tuple(
            slice(start, start + extent)
            for start, extent in zip(patch.at, values.shape, strict=True)
        )
        result[region].copy_(values)
    return torch.empty(tensor.shape, dtype=tensor.dtype) if result is None else result


def _fetch(patch: Patch, fetch: Fetch) -> torch.Tensor:
    """Return the patch in the orientation of the patchwork."""
    if isinstance(patch.source, str):
        values = fetch(patch.source, patch.take)
    else:
        values = _result(patch.source, fetch)[tuple(slice(*bounds) for bounds in patch.take)]
    shown = [axis for axis in patch.axes if axis is not None]
    hidden = [axis for axis in range(values.dim()) if axis not in shown]
    values = values.permute(shown + hidden)
    return values.reshape([patch.extent(dim) for dim in range(len(patch.axes))])


def _result(computed: Computed, fetch: Fetch) -> torch.Tensor:
    def value(operand: Patchwork) -> torch.Tensor:
        # which is what the operation was told about its strides
        return read(operand, fetch).contiguous()

    args, kwargs = tree_map_only(Patchwork, value, (computed.args, computed.kwargs))
    return tree_flatten(computed.func(*args, **kwargs))[0][computed.index]


def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    if getattr(func, "_schema", None) is None or func._schema.is_mutable:
        raise NotImplementedError(f"{func} on a tensor that is not in memory")
    args_like, kwargs_like = tree_map_only(Patchwork, _like, (args, kwargs))
    result = func(*args_like, **kwargs_like)
    numbers = itertools.count()

    def later(output: torch.Tensor) -> Patchwork:
        return _everything(Computed(func, args, kwargs, next(numbers)), output.shape, output.dtype)

    return tree_map_only(torch.Tensor, later, result)


def _like(x: Patchwork) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _operands(computed: Computed) -> list[Patchwork]:
    return [
        leaf
        for leaf in tree_flatten((computed.args, computed.kwargs))[0]
        if isinstance(leaf, Patchwork)
    ]


def _everything(source: str | Computed, shape: Sequence[int], dtype: torch.dtype) -> Patchwork:
    dims = range(len(shape))
    patches = (
        [Patch(source, tuple((0, n) for n in shape), tuple(dims), (0,) * len(shape))]
        if 0 not in shape
        else []
    )
    return Patchwork(patches, shape, dtype)


def _put(values: tuple, index: int, value: object) -> tuple:
    return values[:index] + (value,) + values[index + 1 :]


# How each operation moves rectangles. NotImplemented: not for these arguments.


def _same(x: Patchwork) -> Patchwork:
    return Patchwork(x.patches, x.shape, x.dtype)


def _slice(
    x: Patchwork, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
):
    if step != 1:
        return NotImplemented
    dim = range(x.dim())[dim]
    start, stop, _ = slice(start, stop).indices(x.shape[dim])
    patches = [cut for patch in x.patches if (cut := patch.narrow(dim, start, stop)) is not None]
    return Patchwork(patches, _put(tuple(x.shape), dim, max(stop - start, 0)), x.dtype)


def _cat(parts: Sequence[Patchwork], dim: int = 0):
    if not all(isinstance(x, Patchwork) and x.dim() and x.dtype == parts[0].dtype for x in parts):
        return NotImplemented
    dim = range(parts[0].dim())[dim]
    patches = []
    end = 0
    for x in parts:
        patches += [
            replace(patch, at=_put(patch.at, dim, patch.at[dim] + end)) for patch in x.patches
        ]
        end += x.shape[dim]
    shapes = {_put(tuple(x.shape), dim, end) for x in parts}
    return Patchwork(patches, shapes.pop(), parts[0].dtype) if len(shapes) == 1 else NotImplemented


def _stack(parts: Sequence[Patchwork], dim: int = 0):
    if not all(isinstance(x, Patchwork) for x in parts):
        return NotImplemented
    return _cat([_unsqueeze(x, dim) for x in parts], dim)


def _unsqueeze(x: Patchwork, dim: int) -> Patchwork:
    dim = range(x.dim() + 1)[dim]

    def insert(values: tuple, value: object) -> tuple:
        return values[:dim] + (value,) + values[dim:]

    patches = [
        replace(patch, axes=insert(patch.axes, None), at=insert(patch.at, 0)) for patch in x.patches
    ]
    return Patchwork(patches, insert(tuple(x.shape), 1), x.dtype)


def _squeeze(x: Patchwork, dim: int) -> Patchwork:
    dim = range(x.dim())[dim]
    if x.shape[dim] != 1:
        return _same(x)

    def drop(values: Sequence) -> tuple:
        return (*values[:dim], *values[dim + 1 :])

    patches = [replace(patch, axes=drop(patch.axes), at=drop(patch.at)) for patch in x.patches]
    return Patchwork(patches, drop(x.shape), x.dtype)


def _permute(x: Patchwork, dims: Sequence[int]) -> Patchwork:
    order = [range(x.dim())[dim] for dim in dims]

    def reorder(values: Sequence) -> tuple:
        return tuple(values[dim] for dim in order)

    patches = [
        replace(patch, axes=reorder(patch.axes), at=reorder(patch.at)) for patch in x.patches
    ]
    return Patchwork(patches, reorder(x.shape), x.dtype)


def _transpose(x: Patchwork, dim0: int, dim1: int) -> Patchwork:
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(x, order)


def _split(x: Patchwork, size: int | Sequence[int], dim: int = 0):
    extent = x.shape[dim]
    sizes = (
        [min(size, extent - start) for start in range(0, extent, size)]
        if isinstance(size, int)
        else size
    )
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(x, dim, end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _select(x: Patchwork, dim: int, index: int) -> Patchwork:
    index = range(x.shape[dim])[index]
    return _squeeze(_slice(x, dim, index, index + 1), dim)


def _unbind(x: Patchwork, dim: int = 0):
    return [_select(x, dim, index) for index in range(x.shape[dim])]


_aten = torch.ops.aten
_MOVES: dict[Callable, Callable] = {
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.clone.default: _same,
    _aten.cat.default: _cat,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.squeeze.dim: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: lambda x: _transpose(x, 0, 1) if x.dim() == 2 else NotImplemented,
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
}

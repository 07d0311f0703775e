"""Kernel times by the roofline model: every operation that PyTorch dispatches takes the longer of
arithmetic and traffic.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..cluster import Device

aten = torch.ops.aten
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward

# Products of rows with the weight of their group; each is one operation, whose own products nobody
# sees.
_GROUPED = (
    "aten::_grouped_mm",
    "transformers::grouped_mm_fallback",
    "merak::product_by_group",
)
_GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"
_GROUPED_WEIGHTS = "merak::add_products_"

# Neither read nor write what their arguments point to.
_FREE = frozenset(
    {
        aten.empty,
        aten.empty_like,
        aten.empty_strided,
        aten.new_empty,
        aten.new_empty_strided,
        aten.resize_,
        aten.detach,
        aten.alias,
        aten.lift_fresh,
        aten._unsafe_view,
        aten._reshape_alias,
        aten.set_,
        aten._local_scalar_dense,
        aten.is_same_size,
        aten.record_stream,
    }
)
_OVERWRITE = frozenset(
    {
        aten.copy_,
        aten.fill_,
        aten.zero_,
        aten.bernoulli_,
        aten.normal_,
        aten.uniform_,
        aten.random_,
        aten.exponential_,
    }
)
# written only when unscaled
_KEEP_GRADS = frozenset({aten._fused_adamw_, aten._fused_adam_, aten._fused_sgd_})
_GATHER = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})
_SCATTER = frozenset(
    {aten.index_add_, aten.index_put_, aten.scatter_add_, aten.index_copy_, aten.scatter_}
)


class Signature(NamedTuple):
    """How an operation uses its arguments, in order: which are only read, which only written."""

    free: bool
    read: tuple[bool, ...]
    written: tuple[bool, ...]
    names: tuple[str, ...]
    returns_new: tuple[bool, ...]


class ChargedKernels(TorchDispatchMode):
    """A dispatch mode that calls ``charge`` with the seconds of every operation.

    FLOPs are those of matrix products, convolutions and attention (its causal half). Traffic is
    what the operation reads and writes: a broadcast or expanded value once, and of a table only the
    rows that are looked up. Views and allocations are free; operations outside of PyTorch's own
    namespace cost their traffic only. Kernels are those that the model dispatches here, on the CPU:
    a kernel that a GPU would fuse counts as its parts, except attention, which is one kernel on a
    device with ``fused_attention``.
    """

    def __init__(self, device: Device, charge: Callable[[float], None]):
        super().__init__()
        self.device = device
        self.charge = charge
        self.fused_attention = device.fused_attention
        self._inside = False
        self._signatures: dict[Any, Signature] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._inside:
            return out
        if func not in self._signatures:
            self._signatures[func] = _signature(func)
        signature = self._signatures[func]
        if not signature.free:
            self.charge(self.seconds(func, signature, args, kwargs, out))
        return out

    def attention(
        self, run: Callable[[], Any], operands: tuple[Tensor | None, ...], causal: bool, back: bool
    ) -> Any:
        """Return what ``run`` returns, charged as one kernel; see ``ops.one_kernel``.

        operands: query, key and value as heads, and what else is read.
        """
        self._inside = True
        try:
            out = run()
        finally:
            self._inside = False
        query, key, value = operands[:3]
        assert query is not None and key is not None and value is not None
        flops = (2.5 if back else 1) * _attention_flops(query, key, value, causal)
        statistics = 4 * query.numel() // query.shape[-1]
        self.charge(
            self.device.kernel_time(flops, _bytes((operands, out)) + statistics, _dtype((query,)))
        )
        return out

    def seconds(self, func, signature: Signature, args: tuple, kwargs: dict, out: Any) -> float:
        """Return the time of one operation."""
        dtype = _dtype((args, kwargs))
        traffic = _traffic(func.overloadpacket, signature, args, kwargs, out=out)
        return self.device.kernel_time(
            _flops(func.overloadpacket, args, kwargs, out), traffic, dtype
        )


def _dtype(values: Any) -> str:
    small = any(t.is_floating_point() and t.element_size() == 2 for t in _tensors(values))
    return "bfloat16" if small else "float32"


def _signature(func) -> Signature:
    schema = func._schema
    write_only = func.overloadpacket in _OVERWRITE
    read = []
    written = []
    names = []
    for place, argument in enumerate(schema.arguments):
        mutable = argument.alias_info is not None and argument.alias_info.is_write
        read.append(not (mutable and (argument.is_out or (write_only and place == 0))))
        written.append(
            mutable and not (func.overloadpacket in _KEEP_GRADS and argument.name == "grads")
        )
        names.append(argument.name)
    new = tuple(value.alias_info is None for value in schema.returns)
    free = (
        func.is_view
        or func.overloadpacket in _FREE
        or func.namespace in ("c10d", "profiler", "prim")
    )
    return Signature(free, tuple(read), tuple(written), tuple(names), returns_new=new)


def _traffic(packet, signature: Signature, args: tuple, kwargs: dict, out: Any) -> float:
    """Return the bytes read and written."""
    outs = out if len(signature.returns_new) > 1 else (out,) * len(signature.returns_new)
    written = sum(
        _bytes(value) for value, new in zip(outs, signature.returns_new, strict=True) if new
    )
    values = {signature.names[place]: value for place, value in enumerate(args)} | kwargs
    if packet in _GATHER:
        table, *others = args
        return min(_bytes(table), written) + written + sum(map(_bytes, others))
    if packet in _SCATTER:
        table, *others = args
        touched = 2 * sum(_bytes(value) for value in others[-1:])
        return touched + sum(map(_bytes, others)) + sum(map(_bytes, kwargs.values()))
    moved = written
    if packet._qualified_op_name == _GROUPED_WEIGHTS and args[1].element_size() == 2:
        # products of all groups are written and read before they are added
        moved += 4 * args[0].numel()
    overwrites = values.get("beta") == 0 or values.get("add") is False
    for place, name in enumerate(signature.names):
        if name in values:
            read = signature.read[place] and not (place == 0 and overwrites)
            moved += _bytes(values[name]) * (read + signature.written[place])
    return moved


def _flops(packet, args: tuple, kwargs: dict, out: Any) -> float:
    if packet is _ATTENTION:
        return _attention_flops(args[0], args[1], args[2], _is_causal(args, 4, kwargs))
    if packet is _ATTENTION_BACKWARD:  # the scores again, and four products of their size
        return 2.5 * _attention_flops(args[1], args[2], args[3], _is_causal(args, 7, kwargs))
    if packet._qualified_op_name in _GROUPED:
        return _grouped_flops(args[0], args[1], out)
    if packet._qualified_op_name == _GROUPED_WEIGHTS:
        return 2.0 * args[1].numel() * args[2].shape[1]
    if packet._qualified_op_name == _GROUPED_BACKWARD:  # of rows and of weights
        return 4.0 * args[3].numel() * args[0].shape[-1]
    name = packet._qualified_op_name.removeprefix("aten::")
    count = flop_registry.get(packet) or flop_registry.get(getattr(aten, name.rstrip("_"), None))
    return 0.0 if count is None else count(*args, **kwargs, out_val=out)


def _grouped_flops(a: Tensor, b: Tensor, out: Tensor) -> float:
    """a [rows, i], b [groups, i, o] or, for the gradient of that, a [i, rows], b [rows, o]."""
    if a.dim() == b.dim() == 2:
        return 2.0 * a.numel() * b.shape[1]
    return 2.0 * out.numel() * a.shape[-1]


def _is_causal(args: tuple, place: int, kwargs: dict) -> bool:
    return args[place] if len(args) > place else kwargs.get("is_causal", False)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> float:
    """query [b, n, s, d], key [b, g, t, d], value [b, g, t, e]. causal: queries are of the last
    positions of the keys, and see half of the scores of their own.
    """
    batch, heads, length, dim = query.shape
    seen = key.shape[2] - (length / 2 if causal else 0)
    return 2 * batch * heads * length * seen * (dim + value.shape[3])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _bytes(value: Any) -> int:
    """Return the stored bytes of a value: an expanded tensor counts once."""
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in _tensors(value))

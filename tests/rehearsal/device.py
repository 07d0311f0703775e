"""A GPU that only pretends: tensors with shapes and no values on ``cuda:0``, which report what a real GPU would punish.

Inside ``Rehearsal`` whatever is made on the device ``cuda``, or moved to it, is a fake tensor; tensors on the CPU stay
real. It works with a PyTorch that was built without CUDA. What it reports:

    mixed   an operation on tensors on the GPU together with tensors on the CPU (CPU scalars are allowed)
    cpu     an operation on the CPU inside a micro-batch, where everything should be on the GPU
    sync    the host waits for the GPU: ``item``, ``bool``, ``tolist``, ``nonzero``, copies to the CPU, blocking copies

To C++ the fake tensors claim the device ``meta``, so that autograd needs no driver; to Python, ``cuda:0``.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from megatron_merak import ops
from megatron_merak.stages import parameter_shards

from .attention import attend
from .memory import Memory
from .places import GeneratedCode, at_work, inside_micro_batch, place

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten

# The host reads a value, or waits to learn the size of what it allocates.
_LOOKS = (aten._local_scalar_dense, aten.is_nonzero, aten.equal)
_SIZES = (
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
)
_INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)
# what is read of a tensor without values; 1.0 of other types
_ANSWERS = {torch.bool: True, torch.int64: 1}


@dataclass(frozen=True)
class Finding:
    """kind: see above. inside: it happened while a schedule ran."""

    kind: str
    operation: str
    place: str
    inside: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.operation} at {self.place}"


class StoppedError(Exception):
    """The rehearsal cannot go on: a GPU refuses an operation, or it alone knows the size of the
    result.
    """


class _FakeGpu(FakeTensorMode):
    """Where C++ asks one of the tensors for its device, to make another beside it, it means the
    GPU.
    """

    avoid_device_init = True  # whatever a driver tells: no real tensor is made on the GPU

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "meta":
            kwargs = kwargs | {"device": DEVICE}
        return super().__torch_dispatch__(func, types, args, kwargs)


class Rehearsal(TorchDispatchMode):
    """Use as a context manager; ``findings`` is what was found, in order.

    memory: of the GPU; None: it is not counted.
    """

    def __init__(self, memory: Memory | None = None):
        super().__init__()
        self.memory = memory
        self.launches = 0  # operations on the GPU that are no views
        self.findings: list[Finding] = []
        self.operations: set[str] = set()  # all that ran on the GPU
        self._fake = _FakeGpu(allow_non_fake_inputs=True)
        self._code, self._patches = GeneratedCode(), ExitStack()

    def inside(self) -> list[str]:
        """What was found inside micro-batches, each once."""
        return list(dict.fromkeys(str(finding) for finding in self.findings if finding.inside))

    def __enter__(self):
        for patch in (*_patches(), *self._code.patches()):
            self._patches.enter_context(patch)
        aten_of_gpus = self._patches.enter_context(torch.library._scoped_library("aten", "IMPL"))
        aten_of_gpus.impl("scaled_dot_product_attention", attend, "AutogradCUDA")
        self._patches.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        others = [x for x in tensors if not self._is_ours(x)]
        if len(others) < len(tensors):
            return self._on_gpu(func, args, kwargs, others)
        if _names_gpu(kwargs.get("device")):
            return self._to_gpu(func, args, kwargs, others)
        if _is_real(tensors, kwargs.get("device")) and not _is_view(func) and at_work():
            self._report("cpu", func)
        return func(*args, **kwargs)

    def _is_ours(self, tensor: Tensor) -> bool:
        return (
            isinstance(tensor, FakeTensor)
            and tensor.fake_mode is self._fake
            and tensor.fake_device == DEVICE
        )

    def _beside(self, tensor: Tensor) -> Tensor:
        """What C++ made beside one of our tensors, on the device that this claims, is ours too: a
        scalar, or zeros in a backward."""
        if not _is_beside(tensor):
            return tensor
        return self._run(torch.zeros, (tensor.shape,), {"dtype": tensor.dtype, "device": DEVICE})

    def _run(self, func, args: tuple, kwargs: dict) -> Any:
        with self._fake:
            results = func(*args, **kwargs)
        if self.memory is not None:
            self.memory.take(results)
        return results

    def _to_gpu(self, func, args: tuple, kwargs: dict, others: list[Tensor]) -> Any:
        """New tensors, or copies of some on the CPU."""
        if others and not kwargs.get("non_blocking"):
            self._report("sync", func)
        return self._run(func, args, kwargs | {"device": DEVICE})

    def _on_gpu(self, func, args: tuple, kwargs: dict, others: list[Tensor]) -> Any:
        self.operations.add(func.name())
        self.launches += not _is_view(func)
        packet = func.overloadpacket
        args, kwargs = tree_map_only(Tensor, self._beside, (args, kwargs))
        others = [x for x in others if not _is_beside(x)]
        if func.namespace == "c10d":
            return _communicate(func, args, kwargs)
        if packet is aten._to_copy or packet is aten.copy_:
            return self._copy(func, args, kwargs, others)
        if any(x.dim() for x in others):
            self._report("mixed", func)
            raise StoppedError(str(self.findings[-1]))
        if packet in _LOOKS:
            self._report("sync", func)
            return _ANSWERS.get(args[0].dtype, 1.0) if packet is aten._local_scalar_dense else True
        if _has_unknown_size(packet, args, kwargs):
            self._report("sync", func)
            raise StoppedError(str(self.findings[-1]))
        if func is aten.addmm.dtype_out:  # fake tensors of torch 2.11 take the type for beta
            assert kwargs["out"].shape == (args[1].shape[0], args[2].shape[1])
            return kwargs["out"]
        return self._run(func, args, kwargs)

    def _copy(self, func, args: tuple, kwargs: dict, others: list[Tensor]) -> Any:
        """Between devices, and between types on the GPU."""
        if func.overloadpacket is aten.copy_:
            if others and not (len(args) > 2 and args[2]):
                self._report("sync", func)
            return self._run(func, args, kwargs) if self._is_ours(args[0]) else args[0]
        if torch.device(kwargs.get("device") or DEVICE).type == "cpu":
            self._report("sync", func)
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return self._run(func, args, kwargs | {"device": DEVICE})

    def _report(self, kind: str, func) -> None:
        self.findings.append(Finding(kind, func.name(), place(self._code), inside_micro_batch()))


def _is_beside(tensor: Tensor) -> bool:
    made_by_backward = torch._C._current_autograd_node() is not None
    return (
        tensor.is_meta
        and not isinstance(tensor, FakeTensor)
        and (made_by_backward or not any(tensor.stride()))
    )


def _is_real(tensors: list[Tensor], device: Any) -> bool:
    """Whether an operation computes on the CPU."""
    fake = any(isinstance(x, FakeTensor) or x.is_meta for x in tensors)
    return not fake and (device is None or torch.device(device).type == "cpu")


def _is_view(func) -> bool:
    if func.overloadpacket is aten._unsafe_view:  # autograd alone takes it for another tensor
        return True
    aliased = func._schema.returns[0].alias_info if func._schema.returns else None
    return aliased is not None and not aliased.is_write


def _names_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _has_unknown_size(packet: Any, args: tuple, kwargs: dict) -> bool:
    if packet in _INDEXED:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return packet in _SIZES or (
        packet is aten.repeat_interleave and kwargs.get("output_size") is None
    )


def _communicate(func, args: tuple, kwargs: dict) -> Any:
    """A collective of torch's fake process group, which moves nothing: tensors on the CPU stand for
    ours.
    """
    stand_ins = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), (args, kwargs))
    found = func(*stand_ins[0], **stand_ins[1])
    if not isinstance(found, tuple | list):
        return found
    return (args[0], *found[1:])


class _Generators(list):
    """Of the GPUs, here one. Seeds go nowhere: fake tensors have no values."""

    def __init__(self):
        super().__init__([torch.Generator()])


def _make_subclass(cls, data, require_grad=False, *, device_for_backend_keys=None, **more):
    if device_for_backend_keys is not None and device_for_backend_keys.type == "cuda":
        more["dispatch_device"] = False  # a device that C++ asks for is that of ``data``: meta
    return _ORIGINAL(
        cls, data, require_grad, device_for_backend_keys=device_for_backend_keys, **more
    )


_ORIGINAL = torch.Tensor._make_subclass
_TOLIST = torch.Tensor.tolist
_DATA_PTR = torch.UntypedStorage.data_ptr


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


def _data_ptr(storage: torch.UntypedStorage) -> int:
    """An address tells storages apart, also those that have no memory."""
    return storage._cdata if storage.device.type == "meta" else _DATA_PTR(storage)


def _tolist(tensor: Tensor) -> Any:
    return _TOLIST(tensor.cpu())  # C++ does this for tensors on a GPU


def _patches():
    yield mock.patch.dict(ops.PROBLEMS, {"_ops_cuda": ""})
    yield mock.patch.object(ops, "adds_in_product", lambda device: device.type == "cuda")
    # fake tensors are for one thread
    yield mock.patch.object(parameter_shards, "workers_for", lambda model, device: 1)
    yield mock.patch.object(FakeTensor, "tolist", _tolist)
    yield mock.patch.object(FakeTensor, "data_ptr", _address)
    yield mock.patch.object(torch.Tensor, "_make_subclass", staticmethod(_make_subclass))
    yield mock.patch.object(torch.UntypedStorage, "data_ptr", _data_ptr)
    # where PyTorch was built with CUDA it asks for a driver
    if hasattr(fake_tensor, "init_gpu_context"):
        yield mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None)
    yield mock.patch.object(torch.backends.cudnn, "version", lambda: None)
    yield mock.patch.object(torch.cuda, "_lazy_init", lambda: None)
    yield mock.patch.object(torch.cuda, "current_device", lambda: DEVICE.index)
    yield mock.patch.object(torch.cuda, "default_generators", _Generators())

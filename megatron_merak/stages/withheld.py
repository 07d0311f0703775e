"""Withheld parameters: their trained values are sharded over ranks; they have metadata but no memory.

A withheld parameter stays the same object, in the model and wherever else it is referenced, with its name, shape,
strides, dtype, device and ``requires_grad``. The ``__torch_function__`` of its new class allows only functions that
need no more than these. Anything else (arithmetic, ``tolist``, a write, pickling) raises ConfigError. ``data`` and
``detach`` return withheld tensors. Parameters that never had memory (``init_empty_weights``) are withheld, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import AbsentError, ConfigError

_NOTE = "_merak_withheld"
_REMEDY = "Call trainer.gather_model() on every rank, then use the model on the first one"
_REMEDY_OF_WRITES = (
    "Write weights before the trainer is first used; or call trainer.gather_model() on every rank, write on the first "
    "one, and make a new MerakTrainer with the model"
)
_MADE_OF_VALUES = frozenset("T H mT mH real imag".split())  # properties
_SETTABLE = frozenset("requires_grad grad _grad".split())
_METADATA = frozenset(  # functions that read no value
    """size dim ndimension numel nelement element_size stride storage_offset is_contiguous dim_order is_floating_point
    is_complex is_signed is_conj is_neg is_inference is_same_size get_device result_type requires_grad_ retain_grad
    register_hook register_post_accumulate_grad_hook _has_compatible_shallow_copy_type has_names __len__
    __dir__""".split()
)
_MOVES = frozenset("to cpu cuda xpu type float double half bfloat16".split())
_LIKE_ANOTHER = frozenset("to type_as view_as reshape_as expand_as".split())  # need no value of their second argument
_MADE_ALIKE = frozenset(
    """empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full
    new_tensor new_empty_strided""".split()
)


@dataclass(frozen=True)
class _Note:
    """What a withheld tensor remembers.

    name:  of the parameter.
    ranks: over how many its values are sharded.
    kind:  the class that it had.
    """

    name: str
    ranks: int
    kind: type[Tensor]


def elsewhere(what: str, value: object, ranks: int, remedy: str = _REMEDY) -> ConfigError:
    """The error for using a model whose trained weights are sharded over ``ranks`` ranks."""
    reason = f"the trained weights are sharded over {ranks} ranks, and this model does not have them"
    return ConfigError(what, value, reason, remedy)


class Withheld:
    """The mixin of all classes of withheld tensors."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        owner = getattr(func, "__self__", None)
        if name in ("__get__", "__set__"):
            attribute = getattr(owner, "__name__", "(a property)")
            return _get(func, args[0], attribute) if name == "__get__" else _set(func, args[0], args[1], attribute)
        own = any(map(is_withheld, tree_leaves(args[:1])))
        with torch._C.DisableTorchFunctionSubclass():
            if name in _METADATA or (name == "type" and len(args) == 1 and not kwargs):
                return func(*args, **kwargs)
            if name == "detach":
                return _withheld_like(args[0], func(*args))
            if name in _MOVES and own:
                return _moved(func, *args, **kwargs)
            if name in _LIKE_ANOTHER and not own:
                return func(*args, **kwargs)
            if name in _MADE_ALIKE:
                kwargs.setdefault("device", _withheld_of((args, kwargs)).device)
                args, kwargs = tree_map_only(Withheld, _meta, (args, kwargs))
                return func(*args, **kwargs)
        raise _refusal(name, (args, kwargs), own and _writes(name))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        note: _Note = vars(self)[_NOTE]
        metadata = f"{tuple(self.shape)}, {self.dtype}, device={str(self.device)!r}"  # type: ignore[attr-defined]
        return f"{note.name}: {metadata}, its values sharded over {note.ranks} ranks"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _refusal("pickled", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        trained: bool = self.requires_grad  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            bare = Tensor.detach(self)  # type: ignore[arg-type]
            copied = bare if isinstance(bare, FakeTensor) else _empty(bare, bare.dtype, bare.device)
            copied = nn.Parameter(copied, trained) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = copied
        return _withheld_like(self, copied)  # type: ignore[return-value, arg-type]


class _Parameter(Withheld, nn.Parameter):  # type: ignore[misc]  # torch leaves __repr__ untyped
    """A parameter of a module."""


class _Tensor(Withheld, Tensor):  # type: ignore[misc]
    """What ``data`` and ``detach`` of a withheld parameter return."""


class _Fake(Withheld, FakeTensor):  # type: ignore[misc]
    """A parameter that never had memory."""


_KINDS = MappingProxyType({nn.Parameter: _Parameter, Tensor: _Tensor, FakeTensor: _Fake})


def withhold(model: nn.Module, ranks: int) -> dict[str, nn.Parameter]:
    """Withhold the parameters of ``model``, and free their memory; return them by name.

    ranks: over how many the trained values are sharded.

    Parameters of subclasses of ``nn.Parameter`` keep their memory.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_withheld(parameter):
            continue
        if type(parameter) is nn.Parameter:
            meta = _meta(parameter)
            device = parameter.device
            parameter.data = parameter.data.new_empty(0)  # frees its memory before more is allocated
            parameter.data = _empty(meta, meta.dtype, device)
        _hide(parameter, _Note(name, ranks, type(parameter)))
    return parameters


def is_withheld(tensor: object) -> bool:
    """Whether reading a value of ``tensor`` raises ConfigError."""
    return isinstance(tensor, Withheld)


def restore(parameter: nn.Parameter, values: Tensor | None) -> None:
    """Give a parameter, withheld or not, ``values``, and its own class. values: None if it never had memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if values is not None:
            parameter.data = values
    if is_withheld(parameter):
        parameter.__class__ = vars(parameter).pop(_NOTE).kind


def name_of(tensor: Tensor) -> str:
    """The name of the parameter that a withheld tensor is, or was made from."""
    return vars(tensor)[_NOTE].name


def check_values(model: nn.Module) -> None:
    """Raise ConfigError if a parameter of ``model`` is withheld."""
    for parameter in model.parameters():
        if is_withheld(parameter):
            raise _refusal("read", parameter)


def _withheld_of(arguments: Any) -> Tensor:
    return next(filter(is_withheld, tree_leaves(arguments)))


def _refusal(use: str, arguments: Any, writes: bool = False) -> ConfigError:
    note: _Note = vars(_withheld_of(arguments))[_NOTE]
    return elsewhere(f"model.{note.name}", f"({use})", note.ranks, _REMEDY_OF_WRITES if writes else _REMEDY)


def _writes(name: str) -> bool:
    """Whether a function of that name writes to its first argument."""
    if name.startswith("__"):
        return name.startswith(("__i", "__setitem__")) and name not in ("__int__", "__index__", "__invert__")
    return name.endswith("_")


def _get(func: Callable, tensor: Tensor, attribute: str) -> Any:
    if attribute in _MADE_OF_VALUES or attribute == "(a property)":
        error = _refusal(attribute, tensor)
        raise AbsentError(error.what, error.value, error.reason, error.remedy)
    with torch._C.DisableTorchFunctionSubclass():
        value = func(tensor)
        return _withheld_like(tensor, value) if attribute == "data" else value


def _set(func: Callable, tensor: Tensor, value: Any, attribute: str) -> None:
    moved = attribute == "data" and is_withheld(value)  # as model.to(device) does
    if not moved and attribute not in _SETTABLE:
        raise _refusal(f"{attribute} set", tensor, writes=True)
    with torch._C.DisableTorchFunctionSubclass():
        func(tensor, value)


def _withheld_like(tensor: Tensor, result: Tensor) -> Tensor:
    """Withhold ``result``, which has no memory of its own, like ``tensor``."""
    return _hide(result, replace(vars(tensor)[_NOTE], kind=type(result)))


def _hide(tensor: Tensor, note: _Note) -> Tensor:
    vars(tensor)[_NOTE] = note
    kind = _KINDS.get(note.kind) or type(note.kind.__name__, (Withheld, note.kind), {})
    tensor.__class__ = kind
    return tensor


def _empty(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor with the shape and strides of ``like`` whose memory is freed: it must not be read."""
    result = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)
    result.untyped_storage().resize_(0)
    return result


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _moved(func: Callable, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The result of ``to``, ``cuda``, ``half`` and so on: a withheld tensor of another dtype or device."""
    if isinstance(tensor, FakeTensor):
        fake = func(tensor, *args, **kwargs)
        return tensor if fake is tensor else _withheld_like(tensor, fake)
    kwargs.pop("memory_format", None)
    scalar = torch.empty((), dtype=tensor.dtype, device=tensor.device)
    moved = func(scalar, *args, **kwargs)
    return tensor if moved is scalar else _withheld_like(tensor, _empty(tensor, moved.dtype, moved.device))


def _sent(tensor: Tensor) -> tuple[Callable, tuple]:
    """Let withheld tensors be sent to worker processes of a DataLoader, with a collator's model; not to files."""
    note: _Note = vars(tensor)[_NOTE]
    with torch._C.DisableTorchFunctionSubclass():
        return _received, (note, _meta(tensor), tensor.device, tensor.requires_grad)


def _received(note: _Note, meta: Tensor, device: torch.device, trained: bool) -> Tensor:
    tensor = _empty(meta, meta.dtype, device)
    return _hide(nn.Parameter(tensor, trained) if note.kind is nn.Parameter else tensor, note)


ForkingPickler.register(_Parameter, _sent)
ForkingPickler.register(_Tensor, _sent)

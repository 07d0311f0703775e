"""Withheld parameters: their trained values are sharded over ranks, so they have none to read.

What a parameter is (shape, strides, dtype, device, ``requires_grad``, hooks) can be asked without
its values, and torch answers from the tensor's metadata. What needs values is an operator, and
every operator of a tensor subclass reaches its ``__torch_dispatch__``. A withheld parameter is such
a subclass, without memory: its dispatch hands out withheld tensors (``detach``, ``data``, moves)
and new ones of its shape (``zeros_like``), and refuses everything else.

Why not parameters on "meta": they are silent. Sums, comparisons, copies into them and files of them
are made of nothing; ``p.norm()``, ``p.data.copy_(x)`` and ``torch.save`` raise no error, and others
raise one without the remedy.

Why the objects stay the same: a script holds parameters elsewhere (an optimizer, a callback that
logs a norm). If the module got new ones, these would go on reading the initial weights.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import AbsentError, ConfigError
from ..graph.capture.empty import fake_parameter, is_fake

_NOTE = "_merak_withheld"
_REMEDY = "Call trainer.gather_model() on every rank, then use the model on the first one"
_REMEDY_OF_WRITES = (
    "Write weights before the trainer is first used; or call trainer.gather_model() on every "
    "rank, write on the first "
    "one, and make a new MerakTrainer with the model"
)


@dataclass
class _Note:
    """What a withheld tensor remembers.

    name:     of the parameter.
    ranks:    over how many its values are sharded.
    original: the parameter that it was, with its memory freed; None in a worker process.
    """

    name: str
    ranks: int
    original: Any = None


def elsewhere(what: str, value: object, ranks: int, remedy: str = _REMEDY) -> ConfigError:
    """The error for using a model whose trained weights are sharded over ``ranks`` ranks."""
    reason = (
        f"the trained weights are sharded over {ranks} ranks, and this model does not have them"
    )
    return ConfigError(what, value, reason, remedy)


class Withheld(Tensor):
    """A tensor with the metadata of ``like`` and no memory: what needs values raises
    ConfigError.
    """

    @staticmethod
    def __new__(
        cls,
        like: Tensor,
        note: _Note,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Self:
        made = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=dtype or like.dtype,
            device=device or like.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # without it, C++ code reads address 0
        vars(made)[_NOTE] = note
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``; an error for want of values names it."""
        if func == Tensor.data.__set__ and not is_withheld(args[1]):  # type: ignore[attr-defined]
            raise _refusal("data set", args[0], _REMEDY_OF_WRITES)  # it is no operator
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        # an operator's, or torch's where it needs memory
        except (ConfigError, RuntimeError) as error:
            withheld = _first(args, kwargs)
            if withheld is None:
                raise
            writes = func is Tensor.__setitem__
            remedy = _REMEDY_OF_WRITES if writes else getattr(error, "remedy", _REMEDY)
            if func.__name__ != "__get__":
                raise _refusal(func.__name__, withheld, remedy) from None
            name = getattr(getattr(func, "__self__", None), "__name__", "a property")
            refusal = _refusal(name, withheld, remedy)
            raise AbsentError(*refusal.args) from None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as an attribute
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in ("detach", "alias"):
            return cls(args[0], _note(args[0]))
        if name == "_to_copy":
            return cls(args[0], _note(args[0]), kwargs.get("dtype"), kwargs.get("device"))
        withheld = _first(args, kwargs)
        assert withheld is not None, "torch dispatches to the class of an argument"
        if name.startswith("new_") or name.endswith("_like"):
            kwargs["device"] = kwargs.get("device") or withheld.device
            args, kwargs = tree_map_only(Withheld, _meta, (args, kwargs))
            return func(*args, **kwargs)
        raise _refusal(name, withheld, _REMEDY_OF_WRITES if func._schema.is_mutable else _REMEDY)

    def untyped_storage(self) -> Any:
        """Refuse what reads memory past all operators: storages, shared memory, files."""
        raise _refusal("storage", self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        metadata = f"{tuple(self.shape)}, {self.dtype}, device={str(self.device)!r}"
        return f"{_note(self).name}: {metadata}, its values sharded over {_note(self).ranks} ranks"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _refusal("pickled", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Withheld":
        own = _note(self).original
        fake: Any = own if isinstance(own, FakeTensor) else None
        original = copy.deepcopy(own) if fake is None else fake_parameter(fake, fake.fake_mode)
        copied = _twin(self, replace(_note(self), original=original))
        memo[id(self)] = copied
        return copied


def withhold(model: nn.Module, ranks: int) -> dict[str, nn.Parameter]:
    """Withhold the parameters of ``model``, and free their memory; return them by name.

    ranks: over how many the trained values are sharded.

    Parameters of subclasses of ``nn.Parameter`` keep their memory, but for those in 4 bits.
    """
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_withheld(parameter):
            continue
        note = _Note(name, ranks)
        other = _twin(parameter, note)
        _exchange(parameter, other)
        note.original = other
        plain = type(other) is nn.Parameter or hasattr(other, "quant_state")  # in 4 bits
        if plain and not is_fake(other):
            # Emptied, as an output of the model may keep the tensor for its backward.
            other.data = other.data.new_empty(0)
    return parameters


def is_withheld(tensor: object) -> bool:
    """Whether reading a value of ``tensor`` raises ConfigError."""
    return isinstance(tensor, Withheld)


def has_memory(parameter: nn.Parameter) -> bool:
    """Whether a parameter has memory, or had before it was withheld."""
    return not is_fake(_original(parameter))


def version(tensor: Tensor) -> int:
    """How often a tensor was written; a withheld one cannot be, and keeps the number it had."""
    return _original(tensor)._version


def restore(parameter: nn.Parameter, values: Tensor | None) -> None:
    """Give a parameter, withheld or not, ``values``, and its own class. values: None if it never
    had memory.
    """
    own = _original(parameter)
    if values is not None:
        own.data = values
    if own is not parameter:
        _carry(parameter, own)
        _exchange(parameter, own)


def name_of(tensor: Tensor) -> str:
    """The name of the parameter that a withheld tensor is, or was made from."""
    return _note(tensor).name


def check_values(model: nn.Module) -> None:
    """Raise ConfigError if a parameter of ``model`` is withheld."""
    for parameter in model.parameters():
        if is_withheld(parameter):
            raise _refusal("read", parameter)


def _note(tensor: Tensor) -> _Note:
    return vars(tensor)[_NOTE]


def _original(tensor: Tensor) -> Tensor:
    """The parameter that a withheld one was; any other tensor itself."""
    return _note(tensor).original if is_withheld(tensor) else tensor


def _first(*arguments: Any) -> Tensor | None:
    """The first withheld tensor among arguments of a function."""
    return next(filter(is_withheld, tree_leaves(arguments)), None)


def _refusal(use: str, tensor: Tensor, remedy: str = _REMEDY) -> ConfigError:
    note = _note(tensor)
    return elsewhere(f"model.{note.name}", f"({use})", note.ranks, remedy)


def _twin(like: Tensor, note: _Note) -> Withheld:
    """A withheld tensor, a parameter if ``like`` is one, with its attributes
    (``_no_weight_decay``).
    """
    made = Withheld(like, note)
    _carry(like, made)
    if isinstance(like, nn.Parameter):
        vars(made)["_is_param"] = True  # what makes a tensor of any class an nn.Parameter
    return made


def _carry(one: Tensor, other: Tensor) -> None:
    """Give ``other`` the attributes of ``one``, its gradient and ``requires_grad``."""
    vars(other).update(
        {name: value for name, value in vars(one).items() if name not in (_NOTE, "_is_param")}
    )
    other.requires_grad_(one.requires_grad)
    if one.is_leaf:
        other.grad = one.grad


def _exchange(one: Tensor, other: Tensor) -> None:
    """Make each of two tensors the other: what refers to one sees the class and values of the
    other.

    This is ``torch.utils.swap_tensors``, which refuses a parameter that an earlier output of the
    model keeps for its backward, or that has a weak reference (of torch.compile).
    """
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _sent(tensor: Tensor) -> tuple[Callable, tuple]:
    """Let withheld tensors be sent to worker processes of a DataLoader, with a collator's model;
    not to files.
    """
    note = replace(_note(tensor), original=None)
    return _received, (
        note,
        _meta(tensor),
        tensor.device,
        tensor.requires_grad,
        isinstance(tensor, nn.Parameter),
    )


def _received(
    note: _Note, meta: Tensor, device: torch.device, trained: bool, is_parameter: bool
) -> Tensor:
    made = Withheld(meta, note, device=device).requires_grad_(trained)
    if is_parameter:
        vars(made)["_is_param"] = True
    return made


ForkingPickler.register(Withheld, _sent)

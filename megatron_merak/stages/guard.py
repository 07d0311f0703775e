"""Methods that raise when they are called, for models whose trained weights are sharded
over ranks.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from .withheld import check_values, elsewhere

GUARDED = ("forward", "generate", "save_pretrained", "state_dict", "load_state_dict")


class Guard:
    """Replaces a method of a model whose weights are sharded over ranks: raises ConfigError. Copied
    with the model.

    kind:  the class of the model.
    name:  of the method.
    ranks: over how many the weights are sharded.
    own:   the function that the user had set in place of the method, if any.
    """

    def __init__(self, kind: type[nn.Module], name: str, ranks: int, own: Callable | None):
        self.kind = kind
        self.name = name
        self.ranks = ranks
        self.own = own

    @property
    def __signature__(self) -> inspect.Signature:
        if self.own is not None or not hasattr(self.kind, self.name):
            return inspect.signature(self.own or (lambda *args, **kwargs: None))
        signature = inspect.signature(getattr(self.kind, self.name))
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: object, **kwargs: object) -> None:
        what = f"{self.kind.__name__}.{self.name}"
        if self.name == "load_state_dict":
            remedy = (
                "Load weights before the trainer is first used, or into a new model for a "
                "new MerakTrainer"
            )
            raise elsewhere(what, "(called)", self.ranks, remedy)
        raise elsewhere(what, "(called)", self.ranks)


@contextmanager
def unguarded(model: nn.Module) -> Iterator[None]:
    """Remove the guards inside, for code that needs the structure of a model, not its weights."""
    guards = unguard(model)
    try:
        yield
    finally:
        vars(model).update(guards)


def guard(model: nn.Module, ranks: int) -> None:
    """Make the methods ``GUARDED`` raise ConfigError. ranks: over how many the trained weights are
    sharded.
    """
    for name in GUARDED:
        if hasattr(model, name) and not isinstance(vars(model).get(name), Guard):
            own = vars(model).get(name)  # set by the user in place of the method
            vars(model)[name] = Guard(type(model), name, ranks, own)


def guard_of(model: nn.Module) -> Guard | None:
    """The guard of a model's forward, if any; a new object each time that `guard` is called."""
    forward = vars(model).get("forward")
    return forward if isinstance(forward, Guard) else None


def check_weights(model: nn.Module) -> None:
    """Raise ConfigError if this rank's model lacks its trained weights, or some of them."""
    if (forward := guard_of(model)) is not None:
        forward()
    check_values(model)


def unguard(model: nn.Module) -> dict[str, Guard]:
    """Remove the guards of a model, and return them by method name."""
    guards = {name: value for name, value in vars(model).items() if isinstance(value, Guard)}
    for name, method in guards.items():
        if method.own is None:
            del vars(model)[name]
        else:
            vars(model)[name] = method.own
    return guards

"""Methods of a model whose trained weights are elsewhere: each says so when it is called."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from .withheld import check_values, elsewhere

GUARDED = ("forward", "generate", "save_pretrained", "state_dict", "load_state_dict")


class Guard:
    """In the place of a method of a model whose weights are elsewhere: raises ConfigError. Copied with the model."""

    def __init__(self, kind: type[nn.Module], name: str, ranks: int, own: Callable | None):
        self.kind, self.name, self.ranks, self.own = kind, name, ranks, own

    @property
    def __signature__(self) -> inspect.Signature:
        if self.own is not None or not hasattr(self.kind, self.name):
            return inspect.signature(self.own or (lambda *args, **kwargs: None))
        signature = inspect.signature(getattr(self.kind, self.name))
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(self, *args: object, **kwargs: object) -> None:
        what = f"{self.kind.__name__}.{self.name}"
        if self.name == "load_state_dict":
            remedy = "Load weights before the trainer is first used, or into a new model for a new MerakTrainer"
            raise elsewhere(what, "(called)", self.ranks, remedy)
        raise elsewhere(what, "(called)", self.ranks)


@contextmanager
def unguarded(model: nn.Module) -> Iterator[None]:
    """Without guards inside: for what needs a model's structure, not its weights."""
    guards = unguard(model)
    try:
        yield
    finally:
        vars(model).update(guards)


def guard(model: nn.Module, ranks: int) -> None:
    """Let the methods ``GUARDED`` raise ConfigError. ranks: over how many the trained weights are divided."""
    for name in GUARDED:
        if hasattr(model, name) and not isinstance(vars(model).get(name), Guard):
            own = vars(model).get(name)  # what the user put in the method's place
            vars(model)[name] = Guard(type(model), name, ranks, own)


def guard_of(model: nn.Module) -> Guard | None:
    """What stands in the place of a model's forward; another one each time that it is guarded."""
    held = vars(model).get("forward")
    return held if isinstance(held, Guard) else None


def check_weights(model: nn.Module) -> None:
    """Raises ConfigError where a model's trained weights, or those of a part of it, are elsewhere."""
    if (held := guard_of(model)) is not None:
        held()
    check_values(model)


def unguard(model: nn.Module) -> dict[str, Guard]:
    """Take the guards away; returns them."""
    guards = {name: value for name, value in vars(model).items() if isinstance(value, Guard)}
    for name, each in guards.items():
        if each.own is None:
            del vars(model)[name]
        else:
            vars(model)[name] = each.own
    return guards

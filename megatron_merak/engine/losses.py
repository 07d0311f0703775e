"""Loss functions of a model's outputs and a batch, traced once as part of the last stage.

A function is traced with the values that its closure, defaults and globals have at that time. It is
traced again if these change, or if it is another function; what changes at every step belongs in
the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from ..errors import ConfigError, TraceError
from ..graph.capture.fake_model import forward_parameters
from ..hf_trainer.surroundings import Picture, Surroundings, surroundings
from ..stages.traced import OwnLoss

LossFn = Callable[[Any, dict[str, Tensor]], Any]
LOGPROBS = "logprobs"
MOST = 16  # times that one function, or others of the same code, are traced
_IGNORED = -100
# whose picture is not that of their attributes
_KNOWN = (Tensor, nn.Module, Mapping, list, tuple, set, type)


def token_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each label given the tokens before it: [rows, length] fp32.

    logits: [rows, length, vocabulary], any float dtype; divided by ``temperature``.
    labels: [rows, length] int64, the tokens themselves. The result is 0 at the first position of a
            row and where a label is -100.

    With tensor parallelism the vocabulary stays sharded: only a few statistics per token are
    communicated.
    """
    scores = logits[:, :-1].float()
    scores = scores if temperature == 1.0 else scores / temperature
    losses = F.cross_entropy(
        scores.flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=_IGNORED
    )
    return F.pad(-losses.view(labels.shape[0], labels.shape[1] - 1), (1, 0))


def loss_of_model(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the model's own forward returns."""
    loss = (
        outputs.get("loss")
        if isinstance(outputs, Mapping)
        else outputs
        if isinstance(outputs, Tensor)
        else outputs[0]
    )
    if loss is None:
        reason = f"the model returns none for a batch of {', '.join(batch)}"
        raise TraceError(
            "loss_fn", "(the model's loss)", reason, "Put labels into the batch, or give a loss_fn"
        )
    return loss


@dataclass
class Losses:
    """The traced loss functions of an engine.

    mixed: whether the model computes in 16 bits; functions then get its outputs in fp32.
    """

    model: nn.Module
    mixed: bool
    _known: dict[Any, list[tuple[Any, dict, OwnLoss]]] = field(default_factory=dict)
    _logprobs: dict[float, OwnLoss] = field(default_factory=dict)

    def of(self, function: LossFn) -> OwnLoss:
        """Return what traces ``function``; the same object as long as the values it reads are the
        same. Raises ConfigError.
        """
        if not callable(function):
            raise ConfigError(
                "loss_fn",
                repr(function),
                "it cannot be called",
                "Give a function of (outputs, batch)",
            )
        plain = isinstance(function, FunctionType)
        plain = plain and not (
            function.__closure__ or function.__defaults__ or function.__kwdefaults__
        )
        holders = {"model": self.model, "model.config": getattr(self.model, "config", None)}
        read = surroundings((function,), holders)
        picture = _picture(function, read)
        known = self._known.setdefault(getattr(function, "__code__", function), [])
        for objects, seen, loss in known:
            if seen == picture and (plain or _same(objects[0], function)):
                return loss
        if len(known) == MOST:
            name = getattr(function, "__qualname__", type(function).__name__)
            reason = (
                f"it, or what it reads, was another one at each of {MOST} calls, and each "
                "was traced anew"
            )
            raise ConfigError(
                "loss_fn",
                name,
                reason,
                "Define it once, and put what changes into the batch, as tensors",
            )
        # so that no other object gets the identity of one of these
        objects = (function, read.values)
        known.append(
            (objects, picture, OwnLoss(self._traced(function), adds_up=True, reports=("*",)))
        )
        return known[-1][2]

    def logprobs(self, temperature: float) -> OwnLoss:
        """Return what computes ``LOGPROBS``, [rows, length] fp32, of a batch's labels, or tokens if
        it has none.
        """
        if getattr(getattr(self.model, "config", None), "is_encoder_decoder", False):
            reason = "the labels of a decoder with an encoder are not its own tokens, one place on"
            raise ConfigError(
                "logprobs", type(self.model).__name__, reason, "Report them from a loss_fn"
            )
        if not temperature > 0:
            raise ConfigError(
                "temperature", temperature, "logits are divided by it", "Give a number above 0"
            )

        def compute(model: nn.Module, batch: dict[str, Any]) -> tuple[None, dict[str, Tensor]]:
            outputs = self._forward(
                model, {name: x for name, x in batch.items() if name != "labels"}
            )
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
            return None, {LOGPROBS: token_logprobs(logits, _labels(batch), temperature)}

        return self._logprobs.setdefault(temperature, OwnLoss(compute))

    def _forward(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """Return the model's outputs for the entries that its forward names."""
        named, _ = forward_parameters(model)
        outputs = model(**{name: value for name, value in batch.items() if name in named})
        return tree_map(_in_fp32, outputs) if self.mixed else outputs

    def _traced(self, function: LossFn) -> Callable:
        def compute(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
            result = function(self._forward(model, batch), dict(batch))
            loss, reports = (
                result if isinstance(result, tuple) and len(result) == 2 else (result, {})
            )
            _check(loss, reports)
            return loss, {name: value.detach() for name, value in reports.items()}

        return compute


def _same(one: LossFn, other: LossFn) -> bool:
    """Whether two functions are the same; looking up a method creates a new object each time."""
    return one == other if isinstance(one, MethodType) else one is other


def _picture(function: LossFn, read: Surroundings) -> dict[str, Any]:
    """Return a fingerprint of the values that a function reads; of objects, the attributes that it
    names.
    """
    names = read.names
    owner = getattr(function, "__self__", None)
    picture = {}
    for name, value in read.values.items():
        holder, _, attribute = name.rpartition(".")
        if owner is not None and holder == type(owner).__name__ and attribute not in names:
            continue
        if isinstance(value, _KNOWN) or not hasattr(value, "__dict__"):
            picture[name] = Picture().of(value)
            continue
        picture[name] = id(value)
        picture |= {
            f"{name}.{key}": Picture().of(each) for key, each in vars(value).items() if key in names
        }
    return picture


def _in_fp32(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x


def _labels(batch: dict[str, Any]) -> Tensor:
    if "labels" in batch:
        return batch["labels"]
    mask = batch.get("attention_mask")
    return (
        batch["input_ids"] if mask is None else batch["input_ids"].masked_fill(mask == 0, _IGNORED)
    )


def _check(loss: Any, reports: Any) -> None:
    """Raise TraceError for what a loss function may not return."""
    remedy = "Return the loss, a tensor of one value, or (loss, {name: tensor})"
    if not (isinstance(loss, Tensor) and loss.numel() == 1):
        shown = (
            f"a tensor of {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        raise TraceError("loss_fn", "(its loss)", f"it is {shown}", remedy)
    if not isinstance(reports, Mapping):
        raise TraceError("loss_fn", "(its reports)", f"they are a {type(reports).__name__}", remedy)
    for name, value in reports.items():
        if not (isinstance(name, str) and name.isidentifier()) or name == "loss":
            raise TraceError(
                "loss_fn", f"(report {name!r})", "it has to be a word other than loss", remedy
            )
        if not isinstance(value, Tensor):
            raise TraceError(
                "loss_fn", f"(report {name!r})", f"it is a {type(value).__name__}", remedy
            )

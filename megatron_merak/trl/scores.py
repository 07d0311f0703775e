"""What TRL's fused LM head returns for each token, computed from the logits of the model's own
forward.

TRL multiplies hidden states by the head's weight itself, tile by tile, in an autograd function. A
captured graph can shard the head, and fuse the operations after it, only if it sees them.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

from ..errors import ConfigError
from .unread import Unread

IGNORED = -100
# what a loss reads; the rest is for metrics
TRAINED = ("log_probs", "log_sum_sq_probs", "label_mask", "aux_loss")

Scores = dict[str, Tensor]  # field -> values of a forward


def scores(logits: Tensor, labels: Tensor, fields: Sequence[str]) -> Scores:
    """Return per token, [b, s - 1], its log-probability and the other requested fields; 0 where the
    next token is no target.

    logits: [b, s, v].
    labels: [b, s] int64.
    fields: names of ``FusedCausalLMOutput``. entropy, mean_logits, log_sum_sq_probs and is_top1
            have no gradient.
    """
    logits = logits[:, :-1].float()
    labels = labels[:, 1:]
    mask = labels != IGNORED
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    computed = {"log_probs": -losses.view_as(labels), "label_mask": mask}
    logits = logits.detach()
    if "entropy" in fields or "log_sum_sq_probs" in fields:
        logs = F.log_softmax(logits, dim=-1)
        if "entropy" in fields:
            computed["entropy"] = -(logs.exp() * logs).sum(-1)
        if "log_sum_sq_probs" in fields:
            computed["log_sum_sq_probs"] = torch.logsumexp(2 * logs, dim=-1)
    if "mean_logits" in fields:
        computed["mean_logits"] = logits.mean(-1)
    if "is_top1" in fields:
        computed["is_top1"] = logits.argmax(-1) == labels
    return {
        name: value if name == "log_probs" else value.masked_fill(~mask, 0)
        for name, value in computed.items()
    }


def at_tokens(computed: Scores) -> Scores:
    """Return scores [b, s - 1] at the tokens that they are of, [b, s], so that they can be padded
    like their batch.
    """
    return {
        name: torch.cat((x.new_zeros(len(x), 1), x), 1) if x.dim() == 2 else x
        for name, x in computed.items()
    }


def of_tokens(computed: Scores) -> Scores:
    """Undo ``at_tokens``."""
    return {name: x[:, 1:] if x.dim() == 2 else x for name, x in computed.items()}


def take_head(model: nn.Module) -> tuple[str, ...]:
    """Restore the forward that ``model`` had before TRL's ``add_fused_lm_head``; return the fields
    TRL computed.
    """
    forward = getattr(model.forward, "__func__", model.forward)
    if "fused_lm_head" not in getattr(getattr(forward, "__code__", None), "co_varnames", ()):
        return ()
    known = inspect.getclosurevars(forward).nonlocals
    if known.get("temperature", 1.0) != 1.0 or known.get("cast_lm_head_to_fp32", False):
        remedy = "Leave temperature and cast_lm_head_to_fp32 as they are"
        raise ConfigError(
            "add_fused_lm_head",
            "(its arguments)",
            "logits are those of the model's forward",
            remedy,
        )
    original = known["original_forward"]
    if getattr(original, "__func__", None) is type(model).forward:
        del model.forward
    else:
        model.forward = original
    return ("log_probs", *(name for name in known["outputs"] if name != "log_probs"))


@contextmanager
def head(model: nn.Module, fields: Sequence[str], computed: list[Scores]) -> Iterator[None]:
    """Let ``model`` accept ``fused_lm_head=True`` while its loss is captured.

    fields:   what to compute; ("logits",) alone: the model's outputs, without a fused head.
    computed: takes what each forward computes, in order.

    Where TRL runs two forwards of one input, logits are computed once. Outputs that only metrics
    read are ``Unread``.
    """
    own = vars(model).get("forward")
    forward = _once(model, model.forward)

    @functools.wraps(forward)
    def answer(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, Unread)}
        if not fused_lm_head:
            outputs = (
                forward(*args, **kwargs)
                if labels is None
                else forward(*args, labels=labels, **kwargs)
            )
            if fields == ("logits",):
                computed.append({"logits": outputs.logits.detach()})
            return outputs
        outputs = forward(*args, **kwargs)
        fused = scores(outputs.logits, labels, fields)
        if getattr(outputs, "aux_loss", None) is not None and kwargs.get("output_router_logits"):
            fused["aux_loss"] = outputs.aux_loss
        computed.append({name: value.detach() for name, value in at_tokens(fused).items()})
        seen: dict[str, Any] = {name: Unread() for name in fused if name not in TRAINED}
        return FusedCausalLMOutput(
            **{name: fused[name] for name in fused if name in TRAINED}, **seen
        )

    model.forward = answer
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def _once(model: nn.Module, forward: Callable) -> Callable:
    """Return ``forward`` with its results cached for equal tensors, arguments and weights.

    A result without gradients is reused only where gradients are off.
    """
    known: list[tuple[list[Any], bool, Any]] = []

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = [
            *args,
            *(part for pair in sorted(kwargs.items()) for part in pair),
            _adapters(model),
        ]
        for others, differentiable, outputs in known:
            if (differentiable or not torch.is_grad_enabled()) and len(arguments) == len(others):
                if all(map(_same, arguments, others)):
                    return outputs
        known.append((arguments, torch.is_grad_enabled(), forward(*args, **kwargs)))
        return known[-1][2]

    return run


def _same(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) or isinstance(other, Tensor)
    return one is other or (not tensors and one == other)


def _adapters(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return, for each layer with peft adapters, whether they are disabled and which are active."""
    layers = [each for each in model.modules() if hasattr(each, "_disable_adapters")]
    return [(each._disable_adapters, getattr(each, "_active_adapter", None)) for each in layers]

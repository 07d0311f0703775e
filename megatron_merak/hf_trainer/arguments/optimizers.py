"""The optimizer that a script requests: by name, by class, or created by itself."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import get_parameter_names

from ...errors import ConfigError
from ...optimizer.chained import Chained
from ...optimizer.lion import Lion
from ...optimizer.recipe import Recipe

NO_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
MUON = "muon"  # a name that transformers does not have
_LIONS = ("lion_32bit", "paged_lion_32bit")
_SHARE = "shard the state instead: use_distributed_optimizer=True"
_EIGHT = (
    "its state is quantised, and state is kept in fp32",
    f"Take adamw_torch, adafactor or lion_32bit; or {_SHARE}",
)
_PAGED = ("its state is paged by CUDA", f"Take adamw_torch, and {_SHARE}")
_LOW_RANK = ("it projects gradients to a low rank", f"Take adafactor or muon; or {_SHARE}")
_FUSED = ("it updates weights inside of the backward", "Take sgd or adafactor")
_FREE = (
    "its weights in an evaluation are others than in training",
    "Take adamw_torch with lr_scheduler_type",
)
_DEVICE = ("it is for other devices", "Take adamw_torch_fused")
_OTHER = ("it is one of bitsandbytes alone", "Take adamw_torch, rmsprop, lion_32bit or muon")
# Beginnings of names -> (why, what to do); for all others with 8bit or 4bit in them, see _EIGHT.
_REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{
            "galore_": _LOW_RANK,
            "apollo_": _LOW_RANK,
            "lomo": _FUSED,
            "adalomo": _FUSED,
            "schedule_free_": _FREE,
        },
        **{
            "adamw_torch_xla": _DEVICE,
            "adamw_torch_npu": _DEVICE,
            "paged_adam": _PAGED,
            "paged_ademamix": _PAGED,
        },
        **{"ademamix": _OTHER, "rmsprop_bnb": _OTHER, "adamw_bnb": _EIGHT},
    }
)
# The optim_args that transformers reads, and Muon's; weight_decay is that of the groups in any
# case.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{"sgd": ("momentum", "dampening", "nesterov"), "adagrad": ("lr_decay", "eps")},
        "rmsprop": ("momentum", "alpha", "eps", "centered"),
        MUON: ("momentum", "nesterov", "ns_steps", "eps", "adjust_lr_fn", "adamw_lr"),
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adafactor", *_LIONS), ()),
    }
)
# output layers, where a model does not say
_HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs")


def class_and_arguments(
    args: TrainingArguments, model: nn.Module | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return what ``Trainer.get_optimizer_cls_and_kwargs`` returns for ``args.optim``: class and
    arguments, or a factory.

    Raises ConfigError for unsupported values.
    """
    name = getattr(args.optim, "value", args.optim)
    parsed = _parsed(args, name)
    refused = next((why for start, why in _REFUSED.items() if name.startswith(start)), None)
    if any(bits in name for bits in ("8bit", "4bit")):
        refused = _EIGHT
    if refused is not None:
        raise ConfigError("optim", name, *refused)
    betas = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
    if name in _LIONS:
        return Lion, betas
    if name == MUON:
        return lambda: muon, {
            **betas,
            "adam_eps": args.adam_epsilon,
            "weight_decay": args.weight_decay,
            **parsed,
        }
    try:
        # GaLore and its like name modules of a transformers model; others do not read it
        hf: Any = model
        return Trainer.get_optimizer_cls_and_kwargs(args, hf)
    except (ImportError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError("optim", name, reason, "Install it, or take adamw_torch") from error


def _parsed(args: TrainingArguments, name: str) -> dict[str, Any]:
    """Return ``optim_args``, split as transformers does. Raises ConfigError for those without
    effect.
    """
    pairs = [
        part.partition("=") for part in (args.optim_args or "").replace(" ", "").split(",") if part
    ]
    known = _ARGUMENTS.get(name)
    for key, equals, value in pairs:
        if not equals or (known is not None and key not in known):
            reason = (
                f"{name} takes {', '.join(known) if known else 'none'}"
                if equals
                else "it is not key=value"
            )
            remedy = (
                "Set weight_decay"
                if key == "weight_decay"
                else "Leave it out; others are arguments by themselves"
            )
            raise ConfigError("optim_args", f"{key}{equals}{value}", reason, remedy)
    if name != MUON:
        return {}
    try:
        return {key: _MUON_TYPES.get(key, float)(value) for key, _, value in pairs}
    except ValueError as error:
        raise ConfigError(
            "optim_args", args.optim_args, str(error), "Give numbers, or nesterov=true"
        ) from error


_YES = ("true", "1", "yes")
_MUON_TYPES: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {"ns_steps": int, "adjust_lr_fn": str, "nesterov": lambda text: text.lower() in _YES}
)


def muon(
    model: nn.Module,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    adam_eps: float = 1e-8,
    weight_decay: float = 0.0,
    adjust_lr_fn: str = "match_rms_adamw",
    adamw_lr: float | None = None,
    decayed: Iterable[str] | None = None,
    **options: Any,
) -> Chained:
    """Return torch.optim.Muon for the hidden matrices of ``model``, and AdamW for everything else.

    Embeddings, output layers, norms and biases use AdamW
    (https://kellerjordan.github.io/posts/muon/).

    adjust_lr_fn: by default Muon's updates are scaled to the size of AdamW's, so that both can have
                  one learning rate (https://arxiv.org/abs/2502.16982).
    adamw_lr:     of AdamW; by default ``lr``.
    decayed:      names of the parameters with weight decay, by default as in transformers.
    options:      momentum, nesterov, ns_steps, eps of Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            "optim", MUON, f"torch {torch.__version__} has none", "Install torch 2.9 or newer"
        )
    chosen = {*(decayed_parameters(model) if decayed is None else decayed)}
    outer = _outer(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = {name for name, p in trained if p.dim() == 2 and id(p) not in outer}

    def groups(names: Iterable[str]) -> list[dict[str, Any]]:
        named = dict(trained)
        parts = [[n for n in names if n in chosen], [n for n in names if n not in chosen]]
        decays = (weight_decay, 0.0)
        return [
            {"params": [named[n] for n in part], "weight_decay": decay}
            for part, decay in zip(parts, decays, strict=True)
            if part
        ]

    matrices = groups([name for name, _ in trained if name in hidden])
    others = groups([name for name, _ in trained if name not in hidden])
    if not matrices:
        reason = f"{type(model).__name__} has no hidden matrix to train"
        raise ConfigError("optim", MUON, reason, "Take adamw_torch")
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=lr, adjust_lr_fn=adjust_lr_fn, **options)
    ]
    if others:
        optimizers.append(
            torch.optim.AdamW(
                others, lr=lr if adamw_lr is None else adamw_lr, betas=betas, eps=adam_eps
            )
        )
    return Chained(optimizers)


def _outer(model: Any) -> set[int]:
    """Return the parameters of embeddings and output layers."""
    modules = [
        m
        for n, m in model.named_modules()
        if isinstance(m, nn.Embedding) or n.rpartition(".")[2] in _HEADS
    ]
    if hasattr(model, "get_output_embeddings"):
        modules.append(model.get_output_embeddings() or nn.Module())
    return {id(p) for module in modules for p in module.parameters()}


def make(
    model: nn.Module,
    weight_decay: float,
    decayed: Collection[str],
    chosen: tuple[Any, Mapping[str, Any]],
) -> torch.optim.Optimizer:
    """Return what ``Trainer.create_optimizer`` creates: two parameter groups, with and without
    weight decay.

    decayed: names of the parameters with weight decay.
    chosen:  the result of ``class_and_arguments``.
    """
    (kind, arguments), decayed = chosen, {*decayed}
    arguments = dict(arguments)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    try:
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            factory = kind()
            return factory(model, **arguments, **({"decayed": decayed} if factory is muon else {}))
        return kind(arguments.pop("params", groups), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            "optimizer", getattr(kind, "__name__", kind), reason, "Correct its arguments"
        ) from error


def adam_of(recipe: Recipe) -> dict[str, float] | None:
    """Return the settings of the fused AdamW that equals ``recipe``; None if none does."""
    if [type(each) for each in recipe.prototypes] != [torch.optim.AdamW]:
        return None
    kinds = {(*group.options["betas"], group.options["eps"]) for group in recipe.groups}
    plain = not any(
        group.options.get(name) for group in recipe.groups for name in ("amsgrad", "maximize")
    )
    if (
        len(kinds) > 1
        or not plain
        or any(isinstance(each, torch.Tensor) for kind in kinds for each in kind)
    ):
        return None
    return dict(zip(("adam_beta1", "adam_beta2", "adam_eps"), kinds.pop(), strict=True))


def decayed_parameters(model: nn.Module) -> list[str]:
    """Return the parameters with weight decay, as ``transformers.Trainer`` chooses them: no biases,
    no norms.
    """
    return get_parameter_names(model, [nn.LayerNorm], list(NO_DECAY))

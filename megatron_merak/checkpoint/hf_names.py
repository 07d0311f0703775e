"""Names of a model against names in its files: what transformers renames, merges and splits when it
loads and saves.

Works on tensors that are not in memory (`hf_patchwork`), so that each tensor is later made from
just what it needs. The tables and operations are transformers' own; only its walk over the names is
repeated here, because that one would fill a model.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron_merak.checkpoint.hf_patchwork import Patchwork
from megatron_merak.errors import CheckpointError


def is_hf(model: nn.Module) -> bool:
    """Whether transformers has rules for this model's files."""
    return hasattr(model, "all_tied_weights_keys") and hasattr(model, "base_model_prefix")


def aliases(model: nn.Module) -> dict[str, str]:
    """Return further names of tied parameters and buffers -> the first name of each, in the order
    of the state dict.
    """
    first: dict[int, str] = {}
    canonical_names = {}
    for name, tensor in _tensors(model).items():
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            canonical_names[name] = canonical
    return canonical_names


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by every name of the state dict, not detached: tied
    ones are one object.
    """
    tensors = _tensors(model)
    return {name: tensors[name] for name in model.state_dict() if name in tensors}


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return `expected` without what the model excludes, and tied tensors under the name that
    transformers keeps.
    """
    groups: dict[str, list[str]] = {}
    for alias, canonical in aliases(model).items():
        groups.setdefault(canonical, [canonical]).append(alias)
    patterns = [re.compile(pattern) for pattern in _tied_patterns(model)]
    dropped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for names in groups.values():
        tied = [name for name in sorted(names) if any(pattern.search(name) for pattern in patterns)]
        dropped |= set(tied[: len(names) - 1]) if is_hf(model) else set(names[1:])
    return {name: tensor for name, tensor in expected(model).items() if name not in dropped}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def to_model(
    model: nn.Module, files: Mapping[str, Patchwork]
) -> tuple[dict[str, Patchwork], list[str]]:
    """Return what is stored, under the model's names; and the names without a place in the model.

    Repeats ``convert_and_load_state_dict_in_model`` of transformers up to the point where it would
    set a parameter. Records in the model which conversions were used, as transformers does, so that
    a save reverses just these.
    """
    expected_names = expected(model)
    if not is_hf(model):
        return {k: v for k, v in files.items() if k in expected_names}, [
            k for k in files if k not in expected_names
        ]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    hf: Any = model
    rules = get_model_conversion_mapping(hf)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = hf.base_model_prefix
    conversions: dict[str, Any] = {}
    renamed: dict[str, Patchwork] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected_names)
        if name not in expected_names and key in expected_names:
            name, pattern = rename_source_key(key, [], [], prefix, expected_names)
        if name not in expected_names:
            renamed[name] = files[key]
            continue
        if name not in conversions:
            conversions[name] = (
                WeightRenaming(key, name) if pattern is None else copy.deepcopy(by_pattern[pattern])
            )
        conversions[name].add_tensor(name, key, key if pattern is None else pattern, files[key])
    for name, rule in conversions.items():
        for target, value in _convert(rule, name, model).items():
            renamed[target] = value[0] if isinstance(value, list) else value
    hf._weight_conversions = [rule for rule in rules if rule.was_used()]
    return {k: v for k, v in renamed.items() if k in expected_names}, [
        k for k in renamed if k not in expected_names
    ]


def to_files(model: nn.Module, tensors: Mapping[str, Patchwork]) -> dict[str, Patchwork]:
    """Return what transformers would write if ``tensors`` are those of `saved`: names, order and
    values.
    """
    if not is_hf(model):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    hf: Any = model
    try:
        return revert_weight_conversion(hf, dict(tensors))
    except Exception as error:
        reason = (
            "transformers cannot reverse the conversion that it applied to the weights on "
            f"loading ({error})"
        )
        raise CheckpointError(
            "model", type(model).__name__, reason, "Report this with the model's config"
        ) from error


def ignored(model: nn.Module, kind: str) -> re.Pattern:
    """Return the names that transformers lets be missing, or unexpected, without a message."""
    patterns = sorted(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    if kind == "unexpected" and is_hf(model):  # buffers that used to be saved
        buffers = [name for name, _ in model.named_buffers()]
        patterns += (
            [r"rotary_emb\.inv_freq"]
            if any(name.endswith("rotary_emb.inv_freq") for name in buffers)
            else []
        )
        patterns += (
            [r"(^|\.)position_ids$"]
            if any(name.endswith("position_ids") for name in buffers)
            else []
        )
    return re.compile("|".join(f"({pattern})" for pattern in patterns) if patterns else r"(?!)")


def _convert(rule, name: str, model: nn.Module) -> dict:
    try:
        return rule.convert(name, model=model, config=model.config)
    except Exception as error:
        reason = f"the tensors that it is built from do not match ({error})"
        remedy = "Copy the model directory again; the config may also belong to another model"
        raise CheckpointError("tensor", name, reason, remedy) from error


def _tied_patterns(model: nn.Module) -> list[str]:
    patterns = []
    for prefix, module in model.named_modules():
        for name in getattr(module, "_tied_weights_keys", None) or ():
            patterns.append(f"{prefix}.{name}" if prefix else name)
    return patterns

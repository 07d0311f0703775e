"""The configuration of a model, as checkpoints have it: which differences make another model.

A run that resumes compares its model with the one that was saved. Of the entries of a configuration
some say where a model comes from, some are choices that a run may change, such as a rate of
dropout, and all others are what it computes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

# Entries, at any depth, that say where a model comes from, ...
ORIGIN = frozenset(
    "transformers_version _name_or_path name_or_path _commit_hash architectures dtype "
    "torch_dtype".split()
)
# ... and further ones that say nothing of what is trained
_FREE = ORIGIN | {"tokenizer_class", "id2label", "label2id", "use_cache", "initializer_range"}
# Parts of the names of choices: they change what training does, and may change during a run.
_CHOICES = ("drop", "initializer", "init_std", "checkpointing", "_implementation", "_coef")
# ids that causal language models do not read; others may, as CLIP pools at the last token
_ENDS = ("bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class ConfigDifference:
    """An entry of two configurations; None where one does not have it.

    name: with the names of what it is in, as in ``text_config.hidden_size``.
    """

    name: str
    now: Any
    saved: Any


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the whole configuration of a model of transformers, as JSON has it; None for other
    models.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return None
    return json.loads(config.to_json_string(use_diff=False))


def differences(
    now: Mapping[str, Any] | None,
    saved: Mapping[str, Any] | None,
    causal: bool,
    whole: bool = True,
) -> tuple[list[ConfigDifference], list[ConfigDifference]]:
    """Return the differences that make another model, and those that are choices, by name.

    now, saved: results of ``config_of``; where one is None there is nothing to compare.
    causal:     whether both are causal language models.
    whole:      whether ``saved`` has all entries. A config.json that was converted may lack those
                that have their defaults, so that what only one of them has is not compared.

    Another version of transformers may have other entries: those that only one of them has are
    choices then.
    """
    if now is None or saved is None:
        return [], []
    here = dict(_flat(now))
    there = dict(_flat(saved))
    same_version = here.get("transformers_version") == there.get("transformers_version")
    others: list[ConfigDifference] = []
    choices: list[ConfigDifference] = []
    for name in sorted({*here, *there}):
        difference = ConfigDifference(name, here.get(name), there.get(name))
        if difference.now == difference.saved or not _FREE.isdisjoint(name.split(".")):
            continue
        in_both = name in here and name in there
        if not (whole or in_both):
            continue
        last = name.rpartition(".")[2]
        is_choice = any(part in last for part in _CHOICES) or causal and last in _ENDS
        if is_choice or not (same_version or in_both):
            choices.append(difference)
        else:
            others.append(difference)
    return others, choices


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value

"""What a checkpoint says of the run that wrote it, in words. Any program may have written it: what
is not understood is left out.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError

if TYPE_CHECKING:
    from ..checkpoint.found import FoundCheckpoint
    from ..plan import Plan

TRAINER = "MerakTrainer"
_ARGUMENTS = "training_args.json"
_CONFIG = "config.json"
Settings = Mapping[str, Mapping[str, Any]]
_UNNAMED = ("transformers_version", "_name_or_path")  # of a config.json: no settings


@dataclass(frozen=True)
class InspectedRun:
    """The run of a checkpoint.

    program: that wrote it; "" if it cannot be told.
    model:   its class or shape; "" if it cannot be told.
    samples: that the run had consumed; None if it does not say so.
    epoch:   the epoch of these samples, counted from 0; None: they are those of the whole run.
    plan:    under which it was written; None if there is none that this version reads.
    """

    program: str
    model: str
    samples: int | None
    epoch: int | None
    plan: "Plan | None"


def inspected_run(meta: Mapping[str, Any]) -> InspectedRun:
    """Return what the meta of a manifest says of its run."""
    if "config" in meta:
        config = _section(meta, "config")
        program = _program(config)
        model = _model_of(_section(config, "model"), meta.get("model"))
        return InspectedRun(program, model, _count(meta.get("consumed_samples")), None, _plan(meta))
    extra = _section(meta, "extra")
    if not extra:
        return InspectedRun("Engine" if "extra" in meta else "", "", None, None, plan=_plan(meta))
    model = _text(_section(extra, "model").get("class"))
    position = extra.get("position")
    if not isinstance(position, list) or len(position) != 2:
        return InspectedRun(TRAINER, model, None, None, plan=_plan(meta))
    epoch, samples = map(_count, position)
    return InspectedRun(TRAINER, model, samples, epoch, plan=_plan(meta))


def settings(found: "FoundCheckpoint") -> dict[str, dict[str, Any]]:
    """Return the settings of a checkpoint's run: by section flags of the training commands, entries
    of config.json, arguments of MerakTrainer.
    """
    from ..config import flag_name

    meta = found.manifest.meta
    sections: dict[str, dict[str, Any]] = {}
    for section, values in _section(meta, "config").items():
        if isinstance(values, dict):
            sections[section] = {flag_name(name): value for name, value in values.items()}
    configuration = meta.get("model")
    if not isinstance(configuration, dict):
        configuration = _json(found, _CONFIG)
    sections[_CONFIG] = {
        f"{_CONFIG} {name}": value for name, value in configuration.items() if name not in _UNNAMED
    }
    sections[_ARGUMENTS] = _json(found, _ARGUMENTS)
    return {section: values for section, values in sections.items() if values}


def changed(one: Settings, other: Settings) -> Iterator[tuple[str, Any, Any]]:
    """Yield name and both values of settings that differ, in sections that both runs have; None
    for one that is not there.
    """
    for section in one:
        if section not in other:
            continue
        ours = one[section]
        theirs = other[section]
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            if ours.get(name) != theirs.get(name):
                yield name, ours.get(name), theirs.get(name)


def of_one(one: Settings, other: Settings) -> list[str]:
    """Return the sections of settings that only one of two runs has."""
    ours = [section for section in one if section not in other]
    return ours + [section for section in other if section not in one]


def _program(config: Mapping[str, Any]) -> str:
    if config.get("train") == {}:
        return "merak-convert"
    return "merak-pretrain-hf" if "model" in _section(config, "model") else "merak-pretrain"


def _model_of(shape: Mapping[str, Any], configuration: Any) -> str:
    """Return the model of a training command: its flags say the shape or where it is from."""
    if isinstance(configuration, dict):
        classes = configuration.get("architectures")
        if isinstance(classes, list) and classes:
            return _text(classes[0])
        return _text(configuration.get("model_type"))
    layers = _count(shape.get("num_layers"))
    hidden = _count(shape.get("hidden_size"))
    if layers is None or hidden is None:
        return _text(shape.get("model"))
    return f"GPT of {layers} layers and hidden size {hidden}"


def _plan(meta: Mapping[str, Any]) -> "Plan | None":
    from ..plan import Plan

    stored = meta.get("plan")
    if not isinstance(stored, dict):
        return None
    try:
        return Plan.from_dict(stored)
    except PlanError:  # of another version
        return None


def _json(found: "FoundCheckpoint", name: str) -> dict[str, Any]:
    """Return the object in a file of a checkpoint; {} if there is none."""
    if name not in found.files:
        return {}
    try:
        value = json.loads(Path(found.path, name).read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _section(of: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""

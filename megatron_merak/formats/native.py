"""Settings of the GPT of flags and the config.json of the model of transformers that computes the same."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import ConfigError
from ..models.hf_config import RENAMED, hf_config, settings_of

# Keys of a config.json without influence on what a model computes in training without dropout.
_FREE = frozenset(
    """transformers_version _name_or_path architectures dtype torch_dtype use_cache initializer_range pretraining_tp
    max_window_layers bos_token_id eos_token_id pad_token_id attn_pdrop resid_pdrop embd_pdrop attention_dropout
    hidden_dropout residual_dropout embedding_dropout reorder_and_upcast_attn n_ctx router_aux_loss_coef
    output_router_logits router_jitter_noise""".split()
)
_DROPOUTS = (  # settings of --hidden-dropout, which is one here
    ("resid_pdrop", "embd_pdrop"),
    ("residual_dropout", "embedding_dropout"),
)
_ATTENTION = "attention_dropout"
_BESIDE = (
    "summary_",
    "task_specific_params",
    "tokenizer_class",
    "id2label",
    "label2id",
    "chunk_size_feed_forward",
)

Say = Callable[[str], object]


def config_of_native(native: ModelConfig, say: Say) -> dict[str, Any]:
    """Return the config.json of a GPT of flags. Raises ConfigError if transformers has no such model.

    say: called with a line on what it does not have.
    """
    config = hf_config(native)
    if native.hidden_dropout and not any(
        "dropout" in key or "pdrop" in key for key in config.keys() - {_ATTENTION}
    ):
        text = (
            f"--hidden-dropout {native.hidden_dropout} has no counterpart in {config['model_type']}"
        )
        say(f"{text}: further training of it by transformers has none.")
    if native.moe_expert_capacity_factor is not None:
        text = f"--moe-expert-capacity-factor {native.moe_expert_capacity_factor}"
        say(
            f"{text} has no counterpart in {config['model_type']}: its experts compute all of "
            "their tokens."
        )
    return config


def native_of_saved(settings: Mapping[str, Any]) -> ModelConfig:
    """Return the GPT of flags of settings that another version may have saved."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    return ModelConfig.from_dict({name: value for name, value in settings.items() if name in known})


def native_of_config(config: Any, where: Path | str, say: Say) -> ModelConfig:
    """Return the GPT of flags that computes what a model of transformers does.

    config: the model's, of transformers.
    where:  names it in errors.
    say:    called with a line on settings that are one here.

    Raises ConfigError for what the GPT of flags does not have.
    """
    theirs = json.loads(config.to_json_string(use_diff=False))
    native = native_of_saved(settings_of(theirs))
    for one, other in _DROPOUTS:
        if one in theirs and theirs[one] != theirs.get(other, theirs[one]):
            say(
                f"config.json {other} {theirs[other]}: --hidden-dropout is one value, that of {one}"
            )
    ours = json.loads(type(config)(**hf_config(native)).to_json_string(use_diff=False))
    if theirs["model_type"] == "gpt2":
        theirs["n_inner"] = theirs["n_inner"] or 4 * theirs["n_embd"]
    for key in sorted(theirs.keys() & ours.keys() - _FREE):
        if _same(theirs[key]) != _same(ours[key]) and not key.startswith(_BESIDE):
            remedy = "Train it with merak-pretrain-hf, which runs the model's own code"
            reason = f"{where}: the GPT of flags has {ours[key]}"
            raise ConfigError(f"config.json {key}", theirs[key], reason, remedy)
    return native


def native_name(name: str, model_type: str) -> str:
    """Return what the GPT of flags calls a tensor of transformers."""
    return _replaced(name, [(theirs, ours) for ours, theirs in RENAMED.get(model_type, ())])


def hf_name(name: str, model_type: str) -> str:
    """Return what transformers calls a tensor of the GPT of flags."""
    return _replaced(name, RENAMED.get(model_type, ()))


def _replaced(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def _same(value: Any) -> Any:
    """A value of a config.json without the former name of one of its entries."""
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if name != "type"}

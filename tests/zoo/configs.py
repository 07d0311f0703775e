"""A tiny configuration of any model type, from the fields of its configuration class alone.

Fields are told apart by name and default: sizes become small, pairs that must fit each other get
values that fit. Two layers as a rule; a model whose layers differ in kind gets one of each kind.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from .overrides import CONFIGS

HIDDEN, HEADS, KV_HEADS, VOCABULARY, LENGTH, IMAGE = 64, 4, 2, 256, 32, 32

# (what the whole field name matches, the largest value it may have); the first row that matches
# counts.
LIMITS = (
    (r"(\w+_)?vocab_size(_\w+)?|encoder_hash_byte_group_vocab", VOCABULARY),
    (r"(\w+_)?(key_value|kv)_heads|linear_num_key_heads", KV_HEADS),
    (r"mamba_n(um)?_heads|mamba_num_heads", 8),
    (r"(\w+_)?(heads|n_head|attn_heads)|heads_\w+", HEADS),
    (r"(max_window|num_dense|num_mtp|num_nextn_predict|num_kv_shared)_layers|first_k_dense_replace", 1),
    (r"(\w+_)?(layers?|n_layer|depth|blocks)|num_hidden_layers", 2),
    (r"qk_rope_head_dim|rotary_dim|(\w+_)?rope_dim", 8),
    (r"(\w+_)?(head_dim|d_head|d_kv|dim_head|kv_channels|d_state|state_size|head_size)|d_qk", 16),
    (r"(\w+_)?(rank|r_dim)|(\w+_)?lowrank", 16),
    (r"moe_(topk|k)|(\w+_)?(experts_per_tok(en)?|top_k(_experts)?|experts_topk|k_experts)", 2),
    (r"(\w+_)?tokens_per_image|(\w+_)?image_seq_len(gth)?", 4),
    (r"n_group|topk_group|num_expert_groups?|num_limited_groups", 1),
    (r"(\w+_)?shared_experts", 1),
    (r"(\w+_)?(experts?|experts_\w*num|expert_num)|(\w+_)?num_\w*experts", 4),
    (r"(moe|expert|shared_expert)\w*_(intermediate|hidden|ffn)_size|moe_intermediate_size", 64),
    (r"(\w+_)?(intermediate|ffn_hidden|feed_forward|ffn)_size(_\w+)?", 128),
    (r"(\w+_)?(ffn_dim|d_ff|n_inner|dff|d_inner|dim_ff|mlp_dim)", 128),
    (r"max_source_positions", LENGTH),
    (r"n_window", 16),
    (r"n_window_infer", 64),
    (r"(max|n)_(\w+_)?(position(s|_embeddings)?|ctx|seq_len(gth)?)|(\w+_)?(positions|context_length)|n_ctx", 128),
    (r"(\w+_)?max_position_embeddings|max_(\w+_)?(length|len)", 128),
    (r"(\w+_)?(sliding_window|window_size|index_topk|attention_window|window_len)(_size|_length)?", 8),
    (r"(\w+_)?(chunk_size|chunk_length)", 8),
    (r"(\w+_)?image_size|img_size|input_size|resolution", IMAGE),
    (r"(\w+_)?patch_size", 8),
    (r"num_mel_bins|(\w+_)?num_mel\w*|feature_size|n_mels", 16),
    (r"(\w+_)?(hidden_size|embedding_size|d_model|n_embd|dim|width|channels|size)(_\w+)?", HIDDEN),
)  # fmt: skip
# Fields whose default None means "derived" or "not given", and models that cannot do without.
UNSET = {
    "num_key_value_heads": KV_HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
KEPT = re.compile(
    r"(\w+_)?(kernel_size|type_vocab_size|merge_size|pooling\w*|num_channels|temporal_patch_size)|chunk_size_\w+"
)
TOKEN = re.compile(r"(\w+_)?token_(id|index)")
SPECIAL = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 2,
}
WIDTHS = re.compile(
    r"(\w+_)?(hidden_sizes?|embed_dims?|channels|dims?|widths?|sizes|conv_dim|hidden_channels)(_list)?"
)
Recipe = tuple[str, ...]
RECIPES = {  # options of the heuristics, in the order in which they are tried
    "kinds": ("kinds", "unset"),
    "own head size": ("kinds", "unset", "own head size"),
    "nothing unset": ("kinds",),
    "plain": ("unset",),
    "plain, own head size": ("own head size",),
}


def tiny_config(model_type: str, recipe: str = next(iter(RECIPES))) -> PreTrainedConfig:
    """Raises whatever the configuration class raises when the heuristics do not suit it."""
    config = build(CONFIG_MAPPING[model_type], RECIPES[recipe], CONFIGS.get(model_type, {}))
    for each in walk(config):
        _quiet(each)
        if each.is_encoder_decoder:
            for name in ("decoder_start_token_id", "pad_token_id"):
                if getattr(each, name, None) is None:
                    setattr(each, name, SPECIAL[name])
    return config


def build(
    kind: type[PreTrainedConfig],
    recipe: Recipe,
    override: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """``given``: what a composite configuration sets in this part of it, instead of the defaults of
    its class.

    ``override`` wins over every rule; a value that is a mapping overrides a sub-configuration's
    fields.
    """
    values = {field.name: default(field) for field in dataclasses.fields(kind)}
    own = dict(values)
    values |= {
        name: value for name, value in (given or {}).items() if not isinstance(value, Mapping)
    }
    subs = {}
    for key, (sub_kind, set_by_parent, optional) in parts(kind).items():
        wish = override.get(key, CONFIGS.get(getattr(sub_kind, "model_type", ""), {}))
        if wish is None or sub_kind is None or (optional and key not in override):
            continue
        subs[key] = build(sub_kind, recipe, wish, set_by_parent)
    small = {
        name: tiny(name, value, "unset" in recipe)
        for name, value in values.items()
        if name not in subs
    }
    small = {
        name: value
        for name, value in small.items()
        if value is not own.get(name) and not frozen(kind, name)
    }
    if "own head size" in recipe:
        small.pop("head_dim", None)
    if values.get("kv_lora_rank") is not None and "num_key_value_heads" in small:
        small["num_key_value_heads"] = HEADS  # latent attention has a key for every head
    if "kinds" in recipe:
        small |= one_of_each_kind(kind, small, given or {})
    small |= {key: value for key, value in override.items() if key not in subs}
    return kind(**small, **subs)


def default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def parts(
    kind: type[PreTrainedConfig],
) -> dict[str, tuple[type[PreTrainedConfig] | None, Mapping[str, Any], bool]]:
    """The class of each sub-configuration, what ``kind`` sets in it, and whether it may be
    missing.
    """
    if not hasattr(kind, "sub_configs_defaults"):  # transformers before 5.20
        subs = {key: sub for key, sub in kind.sub_configs.items() if getattr(sub, "model_type", "")}
        return {key: (sub, {}, False) for key, sub in subs.items()}
    specs = kind.sub_configs_defaults
    return {key: (sub_class(spec), spec.init_kwargs, spec.optional) for key, spec in specs.items()}


def sub_class(spec: Any) -> type[PreTrainedConfig] | None:
    if inspect.isclass(spec.config_class) and issubclass(spec.config_class, PreTrainedConfig):
        return spec.config_class
    return CONFIG_MAPPING[spec.model_type] if spec.model_type in CONFIG_MAPPING else None


def frozen(kind: type, name: str) -> bool:
    found = inspect.getattr_static(kind, name, None)
    return isinstance(found, property) and found.fset is None


def tiny(name: str, value: Any, unset: bool) -> Any:
    """A small value for a field, or ``value`` itself."""
    if value is None:
        return UNSET.get(name) if unset else None
    if isinstance(value, bool | str | float | dict):
        return value
    if TOKEN.fullmatch(name):
        return token(name, value)
    if isinstance(value, tuple | list):
        return tiny_list(name, value)
    if KEPT.fullmatch(name):
        return value
    limit = next((limit for pattern, limit in LIMITS if re.fullmatch(pattern, name)), None)
    return (
        value
        if limit is None or not isinstance(value, int)
        else min(value, limit)
        if value > limit
        else value
    )


def token(name: str, value: Any) -> Any:
    """Special tokens keep away from the ids of the text, which are 8 to 239."""
    if name in SPECIAL:
        return SPECIAL[name]
    if not isinstance(value, int) or value < 8:
        return value
    return 240 + sum(map(ord, name)) % 16


def tiny_list(name: str, value: Any) -> Any:
    if not value or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if re.fullmatch(r"(\w+_)?(depths?|layers|num_blocks|layer_repeats)(_list)?", name):
        small = [1] * len(value)
    elif re.fullmatch(r"(\w+_)?heads(_list)?", name):
        small = [min(item, HEADS) for item in value]
    elif re.fullmatch(r"(\w+_)?(image_size|img_size|input_size|resolution)", name):
        small = [IMAGE if item > IMAGE else item for item in value]
    elif WIDTHS.fullmatch(name):
        small = [min(item, 32) for item in value]
    else:
        return value
    return type(value)(small)


def one_of_each_kind(
    kind: type[PreTrainedConfig], small: Mapping[str, Any], given: Mapping
) -> dict[str, Any]:
    """Per-layer lists of the model's own default, cut down to layers that show every kind that
    occurs in them.
    """
    try:
        own = kind(**given)
    except Exception:
        return {}
    count = getattr(own, "num_hidden_layers", None)
    fields = {field.name for field in dataclasses.fields(kind)}
    lists = {
        name: value
        for name, value in vars(own).items()
        if name in fields
        and isinstance(value, tuple | list)
        and len(value) == count
        and isinstance(value[0], str | int)
    }
    if not lists or "num_hidden_layers" not in small:
        return {}
    shown: dict[tuple, int] = {}
    for index, layer in enumerate(zip(*lists.values(), strict=True)):
        shown.setdefault(layer, index)
    chosen = sorted(shown.values())[:4]
    chosen = chosen if len(chosen) > 1 else [0, 1]
    picked = {name: type(value)(value[i] for i in chosen) for name, value in lists.items()}
    return {**picked, "num_hidden_layers": len(chosen)}


def walk(config: PreTrainedConfig):
    """The configuration and everything below it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from walk(value)


def _quiet(config: PreTrainedConfig) -> None:
    """No dropout, no noise, no cache, no optional kernels."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and re.search(
            r"drop|jitter_noise|mask_(time|feature)_prob|stochastic", name
        ):
            setattr(config, name, 0.0)
        elif (
            isinstance(value, tuple | list)
            and "drop" in name
            and value
            and isinstance(value[0], float)
        ):
            setattr(config, name, type(value)(0.0 for _ in value))
        elif isinstance(value, bool) and name in (
            "use_cache",
            "use_mamba_kernels",
            "apply_spec_augment",
        ):
            setattr(config, name, False)

"""How Megatron-LM calls its tensors within one rank, where layers and experts have numbers of their own.

megatron-core's modules, of Transformer Engine (fused norms) and local ones, with experts one by one or
grouped, and those before megatron-core, which are renamed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .megatron_names import LAYERS, MegatronTensor

OUTPUT = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"
ENDS = ("decoder.final_layernorm.", "output_layer.")  # of the last stage

_LAYER = re.compile(re.escape(LAYERS) + r"(\d+)\.")
_EXPERTS = "mlp.experts."
_FUSED = "layer_norm_"
# experts in one tensor, transposed, whichever of the two products it is of
_PACKED = (("linear_fc1", "weight1"), ("linear_fc2", "weight2"))
_OLD = "language_model."
_OLD_NAMES = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"^language_model\.", ""),
        (r"^(encoder|transformer)\.", "decoder."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.final_norm\.", ".final_layernorm."),
    )
)
# no weights: states of fp8, and the frequencies of rotary embeddings
_IGNORED = re.compile(r"(^|\.)(_extra_state\d*|inv_freq)$")


def is_old(names: Mapping[str, Any]) -> bool:
    """Whether names are from before megatron-core."""
    return any(name.startswith(_OLD) for name in names)


def flattened(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what nested dictionaries have, with the names of all of them, but for what is no weight."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{before}{name}.")
        elif not _IGNORED.search(f"{before}{name}"):
            yield f"{before}{name}", value


def core_name(old: str) -> str:
    """Return megatron-core's name of a tensor from before it."""
    for pattern, new in _OLD_NAMES:
        old = pattern.sub(new, old)
    return old


def layers_in(names: Mapping[str, Any]) -> int:
    """Return one more than the highest number of a layer."""
    found = (_LAYER.match(name) for name in names)
    return max((int(match[1]) + 1 for match in found if match), default=0)


def rank_names(tensor: MegatronTensor, layer: int, expert: int) -> list[str]:
    """Return what a tensor may be called in a rank.

    layer:  the number of its layer there.
    expert: the number of its expert there.
    """
    place = f"{LAYERS}{layer}."
    names = [key.replace(LAYERS, place) for key in (tensor.key, *tensor.others)]
    if tensor.expert is None:
        return names
    product = next(product for product, _ in _PACKED if product in tensor.key)
    before = place + _EXPERTS
    return [f"{before}local_experts.{expert}.{product}.weight", f"{before}{product}.weight{expert}"]


def packed_names(tensor: MegatronTensor, layer: int) -> list[str]:
    """Return what the tensor of all experts of a rank is called, in which each of them has consecutive
    rows of its transpose; nothing for a tensor of no expert.
    """
    if tensor.expert is None:
        return []
    packed = next(packed for product, packed in _PACKED if product in tensor.key)
    return [f"{LAYERS}{layer}.{_EXPERTS}{packed}"]


def written_name(tensor: MegatronTensor, layer: int, expert: int, fused: bool) -> str:
    """Return what a tensor is called in a rank whose experts are one by one.

    fused: whether products have the norm before them in their module, as those of Transformer Engine.
    """
    names = rank_names(tensor, layer, expert)
    if fused or tensor.expert is not None:
        return names[0]
    return next(name for name in names if _FUSED not in name)

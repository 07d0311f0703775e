"""Megatron-LM's tensors as rows of HuggingFace's: one table for both directions.

Megatron keeps queries, keys and values of a layer in one tensor, group by group, the gate of a gated MLP above its
other half, the rows of the vocabulary padded, and every matrix with its outputs first. So each of its tensors is a
concatenation of rows of HuggingFace's (of their transposes, for GPT-2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError

LAYERS = "decoder.layers."
# who has which part of a tensor under tensor parallelism
COLUMN = "column"  # its rows, evenly
GATED = "gated"  # the rows of each half, evenly
ROW = "row"  # its second dimension
WHOLE = "whole"  # every rank all of it


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a tensor; of its transpose if ``transposed``; of its part for one expert
    if ``expert`` is its number.
    """

    name: str
    start: int
    stop: int
    transposed: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class MegatronTensor:
    """One tensor of a layer, an expert or the model.

    key:    Megatron's name, without the number of the layer.
    layer:  the number of its layer; None outside of layers.
    expert: the number of its expert; None if it has none.
    rows:   what it consists of; rows of zeros follow up to ``shape``.
    shape:  padded.
    split:  how tensor-parallel ranks divide it.
    others: further names that it may have.
    """

    key: str
    layer: int | None
    rows: tuple[Rows, ...]
    shape: tuple[int, ...]
    split: str = WHOLE
    expert: int | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Names:
    """A family's names of what every decoder has; ``{}`` is the number of a layer."""

    embedding: str
    positions: str
    layer: str
    attention_norm: str
    queries: tuple[str, ...]
    attention_output: str
    mlp_norm: str
    mlp: tuple[str, ...]
    mlp_output: str
    final_norm: str
    head: str
    transposed: bool = False


_LLAMA = _Names(
    embedding="model.embed_tokens.weight",
    positions="",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    queries=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    mlp=("mlp.gate_proj", "mlp.up_proj"),
    mlp_output="mlp.down_proj",
    final_norm="model.norm",
    head="lm_head.weight",
)
_GPT2 = _Names(
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    layer="transformer.h.{}.",
    attention_norm="ln_1",
    queries=("attn.c_attn",),
    attention_output="attn.c_proj",
    mlp_norm="ln_2",
    mlp=("mlp.c_fc",),
    mlp_output="mlp.c_proj",
    final_norm="transformer.ln_f",
    head="lm_head.weight",
    transposed=True,
)
FAMILIES: Mapping[str, _Names] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen2": _LLAMA,
        "qwen3": _LLAMA,
        "mixtral": _LLAMA,
        "qwen3_moe": _LLAMA,
    }
)
# a layer's tensors of LayerNorm and RMSNorm, by where they stand: the names of fused layers, which
# Megatron saves under either way, and those of layers that are not
_ATTENTION_NORM = ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
_MLP_NORM = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


class MegatronTable:
    """The tensors of one model.

    config:  the model's config of transformers.
    shapes:  the shape of each of its tensors.
    divisor: the rows of the vocabulary are padded to a multiple of it.

    Raises ConfigError for a model type that Megatron's names are not known of, and for a tensor of
    the model without a counterpart.
    """

    def __init__(self, config: Any, shapes: Mapping[str, tuple[int, ...]], divisor: int = 1):
        kind = config.model_type
        if kind not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            reason = "its tensors' names in Megatron-LM are not known here"
            raise ConfigError("model type", kind, reason, f"Convert one of {known}")
        self._names = FAMILIES[kind]
        self.shapes = shapes
        self._heads = config.num_attention_heads
        self._groups = getattr(config, "num_key_value_heads", None) or self._heads
        self._divisor = divisor
        self.num_layers: int = config.num_hidden_layers
        self.tensors = tuple(self._model())
        self.by_name = _by_name(self.tensors)
        for name in shapes.keys() - self.by_name.keys():
            if name != self._names.head:  # tied to the embedding
                reason = "it has no counterpart in Megatron-LM"
                raise ConfigError("tensor", name, reason, "Convert a model without it")
        self._check_biases()

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return len(self._names.mlp) == 2

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 without."""
        return max((t.expert + 1 for t in self.tensors if t.expert is not None), default=0)

    def _model(self) -> Iterator[MegatronTensor]:
        names = self._names
        yield self._padded("embedding.word_embeddings.weight", names.embedding)
        if names.positions:
            yield self._alone("embedding.position_embeddings.weight", None, names.positions)
        for layer in range(self.num_layers):
            yield from self._layer(layer, names.layer.format(layer))
        for end in ("weight", "bias"):
            if f"{names.final_norm}.{end}" in self.shapes:
                name = f"{names.final_norm}.{end}"
                yield self._alone(f"decoder.final_layernorm.{end}", None, name)
        if names.head in self.shapes:
            yield self._padded("output_layer.weight", names.head)

    def _layer(self, layer: int, prefix: str) -> Iterator[MegatronTensor]:
        names = self._names
        routed = prefix + "mlp.gate.weight" in self.shapes
        attention = prefix + names.attention_norm
        yield from self._norm(layer, attention, _ATTENTION_NORM)
        yield from self._queries(layer, prefix)
        for ours, theirs in (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")):
            name = f"{prefix}self_attn.{ours}.weight"
            if name in self.shapes:
                yield self._alone(f"self_attention.{theirs}.weight", layer, name)
        output = prefix + names.attention_output
        yield from self._linear(layer, "self_attention.linear_proj", [output], ROW)
        # the norm before a router is that of no product
        order = _MLP_NORM[::-1] if routed else _MLP_NORM
        yield from self._norm(layer, prefix + names.mlp_norm, order)
        if routed:
            yield from self._experts(layer, prefix + "mlp.")
            return
        inner = [prefix + each for each in names.mlp]
        split = GATED if self.gated else COLUMN
        yield from self._linear(layer, "mlp.linear_fc1", inner, split)
        yield from self._linear(layer, "mlp.linear_fc2", [prefix + names.mlp_output], ROW)

    def _queries(self, layer: int, prefix: str) -> Iterator[MegatronTensor]:
        """Group by group, the queries of a group before its key and its value."""
        names = [prefix + each for each in self._names.queries]
        for end in ("weight", "bias"):
            if f"{names[0]}.{end}" not in self.shapes:
                continue
            all_rows = [self._rows(f"{name}.{end}") for name in names]
            if len(all_rows) == 1:  # one tensor of three blocks
                third = (all_rows[0].stop - all_rows[0].start) // 3
                all_rows = [
                    replace(all_rows[0], start=at * third, stop=(at + 1) * third) for at in range(3)
                ]
            rows = []
            for group in range(self._groups):
                for block in all_rows:
                    size = (block.stop - block.start) // self._groups
                    start = block.start + group * size
                    rows.append(replace(block, start=start, stop=start + size))
            yield self._tensor(f"self_attention.linear_qkv.{end}", layer, rows, COLUMN)

    def _experts(self, layer: int, prefix: str) -> Iterator[MegatronTensor]:
        yield self._alone("mlp.router.weight", layer, f"{prefix}gate.weight")
        parts = (
            ("linear_fc1", "gate_up_proj", GATED),
            ("linear_fc2", "down_proj", ROW),
        )
        for theirs, ours, split in parts:
            name = f"{prefix}experts.{ours}"
            for expert in range(self.shapes[name][0]):
                rows = Rows(name, 0, self.shapes[name][1], expert=expert)
                key = f"mlp.experts.experts.{theirs}.weight"
                tensor = self._tensor(key, layer, [rows], split)
                yield replace(tensor, expert=expert)

    def _norm(self, layer: int, name: str, keys: Sequence[str]) -> Iterator[MegatronTensor]:
        for end in ("weight", "bias"):
            if f"{name}.{end}" in self.shapes:
                tensor = self._alone(keys[0] + end, layer, f"{name}.{end}")
                yield replace(tensor, others=(LAYERS + keys[1] + end,))

    def _linear(
        self, layer: int, key: str, names: Sequence[str], split: str
    ) -> Iterator[MegatronTensor]:
        for end in ("weight", "bias"):
            if f"{names[0]}.{end}" in self.shapes:
                rows = [self._rows(f"{name}.{end}") for name in names]
                # every rank has the bias of a row-parallel product
                whole = end == "bias" and split == ROW
                yield self._tensor(f"{key}.{end}", layer, rows, WHOLE if whole else split)

    def _alone(self, key: str, layer: int | None, name: str) -> MegatronTensor:
        rows = Rows(name, 0, self.shapes[name][0])
        return self._tensor(key, layer, [rows], WHOLE)

    def _padded(self, key: str, name: str) -> MegatronTensor:
        rows = Rows(name, 0, self.shapes[name][0])
        tensor = self._tensor(key, None, [rows], COLUMN)
        padded = -(-tensor.shape[0] // self._divisor) * self._divisor
        return replace(tensor, shape=(padded, *tensor.shape[1:]))

    def _rows(self, name: str) -> Rows:
        shape = self.shapes[name]
        transposed = self._names.transposed and len(shape) == 2
        return Rows(name, 0, shape[-1 if transposed else 0], transposed)

    def _tensor(
        self, key: str, layer: int | None, rows: Sequence[Rows], split: str
    ) -> MegatronTensor:
        first = rows[0]
        shape = self.shapes[first.name]
        columns = shape[:1] if first.transposed else shape[1:]
        if first.expert is not None:
            columns = shape[2:]
        count = sum(each.stop - each.start for each in rows)
        key = key if layer is None else LAYERS + key
        return MegatronTensor(key, layer, tuple(rows), (count, *columns), split=split)

    def _check_biases(self) -> None:
        """Raise ConfigError for biases that no flag of Megatron-LM asks for."""
        has = {tensor.key for tensor in self.tensors if tensor.key.endswith(".bias")}
        products = ("self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
        some = [f"{LAYERS}{each}.bias" in has for each in products if not self.experts]
        if any(some) and not all(some):
            reason = "some products of its layers have biases and some do not"
            remedy = "Megatron-LM has --disable-bias-linear for all of them or for none"
            raise ConfigError("model type", self._names.layer, reason, remedy)


def _by_name(
    tensors: Sequence[MegatronTensor],
) -> Mapping[str, tuple[tuple[MegatronTensor, int, Rows], ...]]:
    """Return, for each tensor of HuggingFace's, where its rows are: (tensor, first row there, rows)."""
    places: dict[str, list[tuple[MegatronTensor, int, Rows]]] = {}
    for tensor in tensors:
        at = 0
        for rows in tensor.rows:
            places.setdefault(rows.name, []).append((tensor, at, rows))
            at += rows.stop - rows.start
    return {name: tuple(found) for name, found in places.items()}

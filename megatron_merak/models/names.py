"""HuggingFace tensor names and layouts of the native GPT: GPT-2's where the shape is GPT-2's,
Llama's (and Qwen's) else.
"""

import math

from ..config import ModelConfig
from ..plan import TensorSharding
from ..tensor_parallel.layout import Init, ParameterLayout, Piece


def is_gpt2_style(config: ModelConfig) -> bool:
    """Whether HuggingFace's GPT-2 can hold this model, so that its tensor names are used."""
    return (
        config.position_embedding_type == "learned_absolute"
        and config.normalization == "LayerNorm"
        and not (config.swiglu or config.disable_bias_linear or config.qk_layernorm)
        and config.query_groups == config.num_attention_heads
        and config.head_dim * config.num_attention_heads == config.hidden_size
    )


class Names:
    """Layouts by role; subclasses say how their family names and stores them."""

    def __init__(self, config: ModelConfig, tp: int):
        self.config = config
        self.tp = tp
        self.inner = Init("normal", config.init_method_std)
        self.outer = Init("normal", config.init_method_std / math.sqrt(2 * config.num_layers))

    def _one(
        self, name: str, shape: tuple[int, ...], dim: int | None, init: Init, **more
    ) -> ParameterLayout:
        transposed = more.pop("transposed", False)
        return ParameterLayout((Piece(TensorSharding(name, shape, dim, **more), init, transposed),))

    def _vocabulary(self, name: str) -> ParameterLayout:
        c = self.config
        padded = c.padded_vocab_size(self.tp)  # raises where the size is not known yet
        return self._one(name, (c.vocab_size or 0, c.hidden_size), 0, self.inner, padded=padded)

    def norm(self, name: str, size: int) -> dict[str, ParameterLayout]:
        layouts = {"weight": self._one(f"{name}.weight", (size,), None, Init("ones"))}
        if self.config.normalization == "LayerNorm":
            layouts["bias"] = self._one(f"{name}.bias", (size,), None, Init("zeros"))
        return layouts


class GPT2Names(Names):
    """transformer.h.N.attn.c_attn and friends: [in, out] matrices, q, k and v fused in three
    blocks.
    """

    def embedding(self) -> ParameterLayout:
        return self._vocabulary("transformer.wte.weight")

    def positions(self) -> ParameterLayout:
        c = self.config
        return self._one(
            "transformer.wpe.weight", (c.max_positions, c.hidden_size), None, self.inner
        )

    def head(self) -> ParameterLayout:
        return self._vocabulary(
            "lm_head.weight"
            if self.config.untie_embeddings_and_output_weights
            else "transformer.wte.weight"
        )

    def final_norm(self) -> dict[str, ParameterLayout]:
        return self.norm("transformer.ln_f", self.config.hidden_size)

    def _conv1d(
        self, name: str, rows: int, columns: int, dim: int, init: Init, blocks: int = 1
    ) -> dict[str, ParameterLayout]:
        bias = 0 if dim == 1 else None
        return {
            "weight": self._one(
                f"{name}.weight", (rows, columns), dim, init, blocks=blocks, transposed=True
            ),
            "bias": self._one(f"{name}.bias", (columns,), bias, Init("zeros"), blocks=blocks),
        }

    def layer(self, index: int) -> dict[str, dict[str, ParameterLayout]]:
        h = self.config.hidden_size
        f = self.config.ffn_size
        base = f"transformer.h.{index}"
        return {
            "input_norm": self.norm(f"{base}.ln_1", h),
            "qkv": self._conv1d(f"{base}.attn.c_attn", h, 3 * h, 1, self.inner, blocks=3),
            "proj": self._conv1d(f"{base}.attn.c_proj", h, h, 0, self.outer),
            "post_norm": self.norm(f"{base}.ln_2", h),
            "fc1": self._conv1d(f"{base}.mlp.c_fc", h, f, 1, self.inner),
            "fc2": self._conv1d(f"{base}.mlp.c_proj", f, h, 0, self.outer),
        }


class LlamaNames(Names):
    """model.layers.N.self_attn.q_proj and friends: [out, in] matrices, q, k, v and gate, up as
    tensors of their own.
    """

    def embedding(self) -> ParameterLayout:
        return self._vocabulary("model.embed_tokens.weight")

    def positions(self) -> ParameterLayout:
        c = self.config
        return self._one(
            "model.embed_positions.weight", (c.max_positions, c.hidden_size), None, self.inner
        )

    def head(self) -> ParameterLayout:
        tied = not self.config.untie_embeddings_and_output_weights
        return self._vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight")

    def final_norm(self) -> dict[str, ParameterLayout]:
        return self.norm("model.norm", self.config.hidden_size)

    def _column(
        self, names: list[tuple[str, int]], columns: int, bias: bool
    ) -> dict[str, ParameterLayout]:
        weights = [
            self._one(f"{n}.weight", (rows, columns), 0, self.inner).pieces[0] for n, rows in names
        ]
        layouts = {"weight": ParameterLayout(tuple(weights))}
        if bias:
            biases = [
                self._one(f"{n}.bias", (rows,), 0, Init("zeros")).pieces[0] for n, rows in names
            ]
            layouts["bias"] = ParameterLayout(tuple(biases))
        return layouts

    def _row(self, name: str, rows: int, columns: int) -> dict[str, ParameterLayout]:
        layouts = {"weight": self._one(f"{name}.weight", (rows, columns), 1, self.outer)}
        if not self.config.disable_bias_linear:
            layouts["bias"] = self._one(f"{name}.bias", (rows,), None, Init("zeros"))
        return layouts

    def layer(self, index: int) -> dict[str, dict[str, ParameterLayout]]:
        c = self.config
        base = f"model.layers.{index}"
        h = c.hidden_size
        f = c.ffn_size
        bias = not c.disable_bias_linear
        heads = c.num_attention_heads * c.head_dim
        groups = c.query_groups * c.head_dim
        attention = f"{base}.self_attn"
        mlp = f"{base}.mlp"
        qkv = [
            (f"{attention}.q_proj", heads),
            (f"{attention}.k_proj", groups),
            (f"{attention}.v_proj", groups),
        ]
        fc1 = (
            [(f"{mlp}.gate_proj", f), (f"{mlp}.up_proj", f)]
            if c.swiglu
            else [(f"{mlp}.up_proj", f)]
        )
        layouts = {
            "input_norm": self.norm(f"{base}.input_layernorm", h),
            "qkv": self._column(qkv, h, bias or c.add_qkv_bias),
            "proj": self._row(f"{attention}.o_proj", h, heads),
            "post_norm": self.norm(f"{base}.post_attention_layernorm", h),
            "fc1": self._column(fc1, h, bias),
            "fc2": self._row(f"{mlp}.down_proj", h, f),
        }
        if c.qk_layernorm:
            layouts |= {f"{x}_norm": self.norm(f"{attention}.{x}_norm", c.head_dim) for x in "qk"}
        return layouts


def outer_names(config: ModelConfig) -> set[str]:
    """The weights of the word embedding and of the output layer."""
    names = names_for(config, 1)
    return {layout.pieces[0].sharding.name for layout in (names.embedding(), names.head())}


def names_for(config: ModelConfig, tp: int) -> GPT2Names | LlamaNames:
    return (GPT2Names if is_gpt2_style(config) else LlamaNames)(config, tp)


def tensor_table(config: ModelConfig, tp: int) -> tuple[TensorSharding, ...]:
    """Return how each tensor of the model is sharded over ``tp`` ranks, in the model's order, tied
    ones once.
    """
    names = names_for(config, tp)
    layouts = [names.embedding()]
    if config.position_embedding_type == "learned_absolute":
        layouts.append(names.positions())
    for index in range(config.num_layers):
        layouts += [layout for role in names.layer(index).values() for layout in role.values()]
    layouts += [*names.final_norm().values(), names.head()]
    return tuple(dict.fromkeys(piece.sharding for layout in layouts for piece in layout.pieces))

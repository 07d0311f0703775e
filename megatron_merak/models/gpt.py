"""The native GPT, in the shapes of GPT-2 and of Llama, as an ordered list of units.

A unit names its tensors as HuggingFace does (``layouts``) and lists its work as segments. It knows
nothing of pipelines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..config import ModelConfig
from ..segment import Collective, Common, In, Out, Segment, run_serial
from ..tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    group_rank,
    own_part,
    scatter_to_sequence_parallel_region,
)
from ..tensor_parallel.layout import ParameterLayout
from ..tensor_parallel.mappings import stack_over_tensor_model_parallel_region
from .layers import FeedForward, Norm, Placement, SelfAttention
from .names import names_for


class GPTUnit(nn.Module):
    """One link of the chain. ``index``: its place in the model; it reads ``hidden.{index - 1}``,
    makes ``hidden.{index}``.
    """

    def __init__(self, name: str, index: int, config: ModelConfig, place: Placement):
        super().__init__()
        self.name = name
        self.index = index
        self.config = config
        self.place = place
        self.source = f"hidden.{index - 1}"
        self.target = f"hidden.{index}"
        self.layouts: dict[str, ParameterLayout] = {}

    def border_shape(self, samples: int, length: int) -> tuple[int, int, int]:
        """The shape on each rank of the hidden state of ``samples`` sequences of ``length``."""
        return self.place.border_shape(samples, length, self.config.hidden_size)

    def segments(self) -> list[Segment]:
        """This unit's work in order; numbered, and without edges where the layers call their own
        collectives.
        """
        chain = [replace(segment, index=index) for index, segment in enumerate(self.chain())]
        return chain if self.place.edges else [_without_edges(segment) for segment in chain]

    def chain(self) -> list[Segment]:
        """The segments of a unit that is split over ranks."""
        raise NotImplementedError

    def _segment(
        self,
        fn: Callable[..., tuple[Tensor, ...]],
        reads: Sequence[In],
        makes: Sequence[Out],
        holds: Sequence[nn.Module | nn.Parameter | None] = (),
        *,
        sharded: bool = False,
        random: bool = False,
    ) -> Segment:
        """``holds``: modules and parameters that ``fn`` uses; None is skipped."""
        parts = (
            (m,) if isinstance(m, nn.Parameter) else m.parameters() for m in holds if m is not None
        )
        parameters = tuple(parameter for part in parts for parameter in part)
        return Segment(
            self.index,
            0,
            fn,
            tuple(reads),
            outs=tuple(makes),
            parameters=parameters,
            sharded=sharded,
            random=random,
        )

    def _value(self, name: str) -> str:
        return f"{name}.{self.index}"


def _without_edges(segment: Segment) -> Segment:
    ins = tuple(replace(i, collective=Collective.NONE, regather=False) for i in segment.ins)
    return replace(
        segment, ins=ins, outs=tuple(replace(o, collective=Collective.NONE) for o in segment.outs)
    )


class Embedding(GPTUnit):
    """Token and, where learned, position embedding, then dropout."""

    def __init__(self, index: int, config: ModelConfig, place: Placement):
        super().__init__("embedding", index, config, place)
        names = names_for(config, place.tp)
        self.tokens = VocabParallelEmbedding(
            config.padded_vocab_size(place.tp), config.hidden_size, **place.kwargs()
        )
        self.layouts["tokens.weight"] = names.embedding()
        self.positions = None
        if config.position_embedding_type == "learned_absolute":
            alone = place.kwargs() | {"group": None}
            self.positions = VocabParallelEmbedding(
                config.max_positions, config.hidden_size, **alone
            )
            self.layouts["positions.weight"] = names.positions()

    def chain(self) -> list[Segment]:
        looked_up = self._value("tokens")
        random = self.config.hidden_dropout > 0
        place = self.place
        return [
            self._segment(
                self._lookup,
                [],
                [Out(looked_up, place.sums, inplace=True)],
                [self.tokens],
                sharded=True,
            ),
            self._segment(
                self._embed,
                [In(looked_up, place.joins)],
                [Out(self.target)],
                [self.positions],
                sharded=place.on_parts,
                random=random,
            ),
        ]

    def _lookup(self, common: Common) -> tuple[Tensor]:
        return (self.tokens(common["tokens"]),)

    def _embed(self, common: Common, x: Tensor) -> tuple[Tensor]:
        if self.positions is not None:
            x = x + self._positions(self.positions, common["position_ids"])
        x = x.to(self.place.stream)
        with self.place.own_stream():
            return (ops.bias_dropout_add(x, None, None, self.config.hidden_dropout, self.training),)

    def _positions(self, table: nn.Module, ids: Tensor) -> Tensor:
        if self.place.group is not None and self.place.on_parts and self.place.edges:
            return table(own_part(ids, self.place.group))
        embedded = table(ids)
        return (
            scatter_to_sequence_parallel_region(embedded, self.place.group)
            if self.place.on_parts
            else embedded
        )


class TransformerLayer(GPTUnit):
    """Pre-norm attention and feed-forward, each followed by bias, dropout and residual add."""

    def __init__(self, index: int, config: ModelConfig, place: Placement):
        super().__init__(f"layer.{index - 1}", index, config, place)
        self.input_norm = Norm(config.hidden_size, config, place, partial=place.on_parts)
        self.attention = SelfAttention(config, place)
        self.post_norm = Norm(config.hidden_size, config, place, partial=place.on_parts)
        self.mlp = FeedForward(config, place)
        places = {"attention": ("qkv", "proj", "q_norm", "k_norm"), "mlp": ("fc1", "fc2")}
        owner = {role: f"{module}." for module, roles in places.items() for role in roles}
        for role, layouts in names_for(config, place.tp).layer(index - 1).items():
            self.layouts |= {
                f"{owner.get(role, '')}{role}.{name}": layout for name, layout in layouts.items()
            }

    def chain(self) -> list[Segment]:
        normed, context, residual, again, fed = (
            self._value(name) for name in ("normed", "context", "residual", "again", "fed")
        )
        attention = self.attention
        mlp = self.mlp
        dropout = self.config.hidden_dropout > 0
        inner = [attention.qkv, attention.q_norm, attention.k_norm, attention.proj.weight]
        sums = self.place.sums
        joins = self.place.joins
        parts = self.place.on_parts
        return [
            self._segment(
                self._enter,
                [In(self.source)],
                [Out(normed, joins)],
                [self.input_norm],
                sharded=parts,
            ),
            self._segment(
                self._attend,
                [In(normed, sums, regather=parts)],
                [Out(context, sums, inplace=True)],
                inner,
                sharded=True,
                random=self.config.attention_dropout > 0,
            ),
            self._segment(
                self._middle,
                [In(self.source), In(context, joins)],
                [Out(residual), Out(again, joins)],
                [attention.proj.bias, self.post_norm],
                sharded=parts,
                random=dropout,
            ),
            self._segment(
                self._feed,
                [In(again, sums, regather=parts)],
                [Out(fed, sums, inplace=True)],
                [mlp.fc1, mlp.fc2.weight],
                sharded=True,
            ),
            self._segment(
                self._leave,
                [In(residual), In(fed, joins)],
                [Out(self.target)],
                [mlp.fc2.bias],
                sharded=parts,
                random=dropout,
            ),
        ]

    def _add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        bias = None if bias is None else self.place.whole_gradient(bias).to(residual.dtype)
        with self.place.own_stream():
            return ops.bias_dropout_add(
                x.to(residual.dtype), bias, residual, self.config.hidden_dropout, self.training
            )

    def _enter(self, common: Common, x: Tensor) -> tuple[Tensor]:
        return (self.input_norm(x),)

    def _attend(self, common: Common, normed: Tensor) -> tuple[Tensor]:
        angles = (
            (common["cos"], common["sin"])
            if self.config.position_embedding_type == "rope"
            else None
        )
        return (self.attention(normed, angles),)

    def _middle(self, common: Common, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        if self.attention.proj.bias is None and not (
            self.training and self.config.hidden_dropout > 0
        ):
            normed, residual = self.post_norm.of_sum(context, x)
            return residual, normed
        residual = self._add(context, self.attention.proj.bias, x)
        return residual, self.post_norm(residual)

    def _feed(self, common: Common, normed: Tensor) -> tuple[Tensor]:
        return (self.mlp(normed),)

    def _leave(self, common: Common, residual: Tensor, fed: Tensor) -> tuple[Tensor]:
        return (self._add(fed, self.mlp.fc2.bias, residual),)


class Head(GPTUnit):
    """Final norm, output layer and ``loss``: the sum over tokens of loss_mask times cross entropy,
    an fp32 scalar.
    """

    def __init__(self, index: int, config: ModelConfig, place: Placement):
        super().__init__("head", index, config, place)
        names = names_for(config, place.tp)
        self.norm = Norm(config.hidden_size, config, place, partial=place.on_parts)
        padded = config.padded_vocab_size(place.tp)
        self.output = ColumnParallelLinear(config.hidden_size, padded, bias=False, **place.kwargs())
        self.layouts |= {f"norm.{name}": layout for name, layout in names.final_norm().items()}
        self.layouts["output.weight"] = names.head()
        rows = padded // place.tp
        self.start = rows * group_rank(place.group)
        self.valid = min(max((config.vocab_size or 0) - self.start, 0), rows)

    def chain(self) -> list[Segment]:
        if not self.place.edges:
            return [
                self._segment(
                    self._serial, [In(self.source)], [Out("loss")], [self.norm, self.output]
                )
            ]
        normed = self._value("normed")
        stats = self._value("stats")
        place = self.place
        return [
            self._segment(
                self._enter,
                [In(self.source)],
                [Out(normed, place.joins)],
                [self.norm],
                sharded=place.on_parts,
            ),
            self._segment(
                self._project,
                [In(normed, place.sums)],
                [Out(stats, Collective.STACK)],
                [self.output],
                sharded=True,
            ),
            self._segment(self._loss, [In(stats)], [Out("loss")]),
        ]

    def _enter(self, common: Common, x: Tensor) -> tuple[Tensor]:
        return (self.norm(x),)

    def stats(self, normed: Tensor, labels: Tensor) -> Tensor:
        """What this rank's classes, padding left out, add to the loss: [b, s, h], int64 [b, s] ->
        fp32 [b, s, 3].
        """
        output = self.output
        chunk = self.config.cross_entropy_chunk_size
        if chunk:
            entering = output.entering(normed)
            return ops.linear_cross_entropy_stats(
                entering,
                output.weight,
                labels,
                start=self.start,
                classes=self.valid,
                chunk=chunk,
                sink=output.sink,
            )
        return ops.cross_entropy_stats(output(normed), labels, self.start, self.valid, owned=True)

    def _project(self, common: Common, normed: Tensor) -> tuple[Tensor]:
        return (self.stats(normed, common["labels"]),)

    def _loss(self, common: Common, stats: Tensor) -> tuple[Tensor]:
        return ((ops.loss_of_stats(stats) * common["loss_mask"]).sum(),)

    def _serial(self, common: Common, x: Tensor) -> tuple[Tensor]:
        normed = self.norm(x)
        labels = common["labels"]
        if self.place.tp > 1:
            stats = stack_over_tensor_model_parallel_region(
                self.stats(normed, labels), self.place.group
            )
            return self._loss(common, stats)
        per_token = ops.linear_cross_entropy(
            normed.flatten(0, 1),
            self.output.weight,
            labels.flatten(),
            self.valid,
            self.output.sink,
            self.config.cross_entropy_chunk_size,
        )
        return ((per_token.view_as(labels) * common["loss_mask"]).sum(),)


def build_unit(index: int, config: ModelConfig, place: Placement) -> GPTUnit:
    """Unit ``index`` of the chain: 0 is the embedding, 1 .. L the layers, L + 1 the head."""
    kind = Embedding if index == 0 else Head if index == config.num_layers + 1 else TransformerLayer
    return kind(index, config, place)


class GPTPrelude:
    """What every stage takes from its own batch and never receives: tokens, labels, mask,
    positions, angles.
    """

    def __init__(self, config: ModelConfig, device: torch.device):
        self.config = config
        self.device = device

    @cached_property
    def angles(self) -> dict[str, Tensor]:
        c = self.config
        if c.position_embedding_type != "rope":
            return {}
        scaling = c.rope_scaling_factor if c.use_rope_scaling else None
        cos, sin = ops.rotary_angles(c.max_positions, c.rotary_dim, c.rotary_base, scaling)
        return {"cos": cos.to(self.device), "sin": sin.to(self.device)}

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        moved = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        length = moved["tokens"].shape[1]
        return moved | {name: value[:length] for name, value in self.angles.items()}


class GPT(nn.Module):
    """The full chain as one stand-alone module whose layers call their own collectives."""

    def __init__(self, config: ModelConfig, place: Placement):
        super().__init__()
        units = [build_unit(i, config, place) for i in range(config.num_layers + 2)]
        self.units = nn.ModuleList(units)
        self.prelude = GPTPrelude(config, torch.device(place.device))
        if not config.untie_embeddings_and_output_weights:
            head: Any = units[-1]
            embedding: Any = units[0]
            head.output.weight = embedding.tokens.weight

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Sum of the loss over the batch's unmasked tokens, fp32 scalar."""
        units: Any = self.units
        segments = [s for unit in units for s in unit.segments()]
        return run_serial(segments, Common(self.prelude(batch)))["loss"]

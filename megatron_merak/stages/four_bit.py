"""Weights in 4 bits on a rank: how they are filled from the user's model, and how that shares
them.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.hf import ModuleSource
from ..checkpoint.shard import Intervals, Shard
from ..errors import ConfigError
from ..graph.capture.four_bit import four_bit_layers
from ..graph.fusion.four_bit import stored_as
from ..ops.four_bit import (
    NESTED_OFFSET,
    NESTED_SCALES,
    NESTED_TABLE,
    PACKED,
    SCALES,
    FourBit,
    nested_scales,
    places,
)
from ..plan import TensorSharding


class FourBitSource(ModuleSource):
    """The values of a module in memory: a weight in 4 bits as what it is made of, see ``places``,
    under its name and names that begin with it.

    formats: how each weight in 4 bits is stored by ranks but for its shape, see ``whole_formats``.
    """

    def __init__(self, model: nn.Module, formats: Mapping[str, FourBit]):
        super().__init__(model)
        own = dict(self._tensors)
        for name, how in formats.items():
            if name in own:
                del own[name]
                for part, tensor in _parts(model.get_parameter(name), how).items():
                    own[part_name(name, part)] = tensor
        self._tensors = own


def part_name(name: str, part: str) -> str:
    """Return the name of a part of a weight, see ``places``; the packed values have its own."""
    return f"{name}.{part}" if part != PACKED else name


def _parts(weight: Any, how: FourBit) -> dict[str, Tensor]:
    """Return what a weight of bitsandbytes is made of, in the shapes of ``places``."""
    state = weight.quant_state
    found = {PACKED: weight.detach().contiguous().view(-1).view(torch.uint8), SCALES: state.absmax}
    if how.nested:
        found[NESTED_SCALES] = state.state2.absmax
        found[NESTED_TABLE] = state.state2.code
        found[NESTED_OFFSET] = state.offset
    elif state.nested:
        outer = state.state2
        found[SCALES] = nested_scales(state.absmax, outer.absmax, outer.code, state.offset)
    shapes = places(how)
    return {name: tensor.detach().view(shapes[name].shape) for name, tensor in found.items()}


def whole_formats(
    weights: Mapping[str, FourBit], tensors: Mapping[str, TensorSharding], tp: int
) -> dict[str, FourBit]:
    """Return how weights in 4 bits are stored by all ranks together, of which each has a shard."""
    found = {}
    for name, how in weights.items():
        own = stored_as(how, tensors[name].stored_shape(tp))
        found[name] = how._replace(nested=own.nested)
    return found


def shards_of(
    tensor: TensorSharding, how: FourBit, stored: Tensor, rank: int, ranks: int, owner: bool
) -> Iterator[Shard]:
    """Yield what a rank's memory of a weight in 4 bits has, each under its ``part_name``, the packed
    values first.

    tensor: how the weight is sharded.
    how:    how it is stored by all ranks together, see ``whole_formats``.
    stored: of this rank, uint8 [bytes].
    """
    own = places(stored_as(how, tensor.stored_shape(ranks)))
    divides = {PACKED: 2, SCALES: how.block}
    intervals = tensor.intervals(rank, ranks)
    for part, place in places(how).items():
        dim = tensor.dim
        cut: Intervals = intervals
        if dim == 1:
            per = divides[part]
            cut = tuple((start // per, stop // per) for start, stop in intervals)
        if dim is None or prod(own[part].shape) == prod(place.shape):
            dim = None
            cut = ()
        name = part_name(tensor.name, part)
        yield Shard(name, place.shape, dim, cut, own[part].of(stored), owner)


def as_given(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """Return the packed values of a weight in 4 bits as the user's model has them; any other value
    as it is.
    """
    if values.dtype != torch.uint8 or values.shape == parameter.shape:
        return values
    return values.reshape(-1).view(parameter.dtype).view(parameter.shape)


def follow(shard: Shard, own: Tensor) -> None:
    """Copy what the user has set a weight to into the trained one.

    Raises ConfigError for a weight in 4 bits: its scales would be others.
    """
    if getattr(own, "quant_state", None) is not None:
        reason = "it is in 4 bits, and its packed values were replaced"
        remedy = "Make a new trainer with the model"
        raise ConfigError("parameter", shard.name, reason, remedy)
    shard.tensor.copy_(own)


def move_scales(model: nn.Module) -> None:
    """Let the scales of weights in 4 bits be where the packed values are."""
    for module in four_bit_layers(model).values():
        module.weight.quant_state.to(module.weight.device)


def keep_packing(model: nn.Module) -> None:
    """Let layers in 4 bits stay as they are packed in evaluations of the model itself.

    On some CPUs bitsandbytes packs a weight anew there, for a faster product, and rounds its scales
    for good: the model would no longer have the weights that are trained with.
    """
    for module in four_bit_layers(model).values():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False

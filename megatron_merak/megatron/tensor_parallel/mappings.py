"""The conjugate pairs between replicated and sharded regions, with the sequence first: what each
does forward, its partner does backward.

Sources: see ``megatron_merak.tensor_parallel.mappings``; along the sequence, Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ... import tensor_parallel as plain
from ...tensor_parallel.mappings import paired
from ...tensor_parallel.sequence import gather_single, reduce_scatter_single
from .utils import divided, group_of

Sizes = Sequence[int] | None


def copy_to_tensor_model_parallel_region(
    input_: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Identity; backward sums the gradient over the group."""
    return plain.copy_to_tensor_model_parallel_region(input_, group_of(group))


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Sum over the group; backward is the identity."""
    return plain.reduce_from_tensor_model_parallel_region(input_, group_of(group))


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's slice [..., h / n] of the last dimension; backward gathers."""
    group = group_of(group)
    divided("last dimension", input_.shape[-1], group.size())
    return plain.scatter_to_tensor_model_parallel_region(input_, group)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """All slices [..., h / n] side by side; backward takes this rank's slice."""
    return plain.gather_from_tensor_model_parallel_region(input_, group_of(group))


def scatter_to_sequence_parallel_region(
    input_: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's part [s / n, ...] of the first dimension; backward gathers."""
    group = group_of(group)
    divided("first dimension", input_.shape[0], group.size())
    return paired(input_, group, _own_part, _gathered)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: dist.ProcessGroup | None = None,
    output_split_sizes: Sizes = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """All parts [s / n, ...] of the first dimension joined, [s, ...].

    tensor_parallel_output_grad: whether what follows is sharded, so that backward sums the
                                 gradient and takes this rank's part; else it takes the part only.
    output_split_sizes:          extent of each rank's part; None: they are equal.
    use_global_buffer:           no effect: memory is allocated anew.
    """
    group = group_of(group)
    if not tensor_parallel_output_grad:
        assert output_split_sizes is None, "parts of a replicated region are equal"
        return paired(input_, group, _gathered, _own_part)
    gather = partial(_gathered, sizes=output_split_sizes)
    reduce = partial(_reduce_scattered, sizes=output_split_sizes)
    return paired(input_, group, gather, reduce)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: dist.ProcessGroup | None = None,
    input_split_sizes: Sizes = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """This rank's part [s / n, ...] of the sum over the group of [s, ...]; backward gathers.

    input_split_sizes: extent of each rank's part; None: they are equal.
    use_global_buffer: no effect: memory is allocated anew.
    """
    group = group_of(group)
    if input_split_sizes is None:
        divided("first dimension", input_.shape[0], group.size())
    reduce = partial(_reduce_scattered, sizes=input_split_sizes)
    gather = partial(_gathered, sizes=input_split_sizes)
    return paired(input_, group, reduce, gather)


def all_gather_last_dim_from_tensor_parallel_region(
    input_: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """All slices [..., h / n] side by side; backward sums and takes this rank's slice."""
    return paired(input_, group_of(group), _gathered_last, _reduce_scattered_last)


def reduce_scatter_last_dim_to_tensor_parallel_region(
    input_: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """This rank's slice [..., h / n] of the sum over the group; backward gathers."""
    group = group_of(group)
    divided("last dimension", input_.shape[-1], group.size())
    return paired(input_, group, _reduce_scattered_last, _gathered_last)


def all_to_all(
    group: dist.ProcessGroup,
    input_: Tensor,
    output_split_sizes_: Sizes = None,
    input_split_sizes: Sizes = None,
) -> Tensor:
    """Send each rank a part of the first dimension; backward sends the gradients back.

    output_split_sizes_: extent of what each rank sends to this one; None: as this one sends.
    input_split_sizes:   extent of what this rank sends to each; None: they are equal.
    """
    there = partial(_exchanged, received=output_split_sizes_, sent=input_split_sizes)
    back = partial(_exchanged, received=input_split_sizes, sent=output_split_sizes_)
    return paired(input_, group, there, back)


def all_to_all_sp2hp(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All tokens with a slice of their features, [t, h / n], of some with all, [t / n, h]."""
    group = group_of(group)
    rows = input_.reshape(-1, input_.shape[-1])
    size = divided("last dimension", rows.shape[-1], group.size())
    return all_to_all(group, torch.cat(rows.split(size, dim=1), dim=0))


def all_to_all_hp2sp(input_: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Some tokens with all their features, [t / n, h], of all with a slice of them, [t, h / n]."""
    group = group_of(group)
    rows = all_to_all(group, input_.reshape(-1, input_.shape[-1]))
    size = divided("number of tokens", rows.shape[0], group.size())
    return torch.cat(rows.split(size, dim=0), dim=-1)


def _own_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), 0)[group.rank()].contiguous()


def _gathered(x: Tensor, group: dist.ProcessGroup, sizes: Sizes = None) -> Tensor:
    ranks = group.size()
    if sizes is None:
        whole = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        gather_single(whole, x.contiguous(), group=group)
        return whole
    # Backends differ in what they make of unequal parts, so these are made equal for the way.
    longest = max(sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: x.shape[0]] = x
    parts = x.new_empty(ranks * longest, *x.shape[1:])
    gather_single(parts, padded, group=group)
    pairs = zip(parts.split(longest), sizes, strict=True)
    return torch.cat([part[:size] for part, size in pairs])


def _reduce_scattered(x: Tensor, group: dist.ProcessGroup, sizes: Sizes = None) -> Tensor:
    ranks = group.size()
    if sizes is None:
        out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
        reduce_scatter_single(out, x.contiguous(), group=group)
        return out
    longest = max(sizes)
    padded = x.new_zeros(ranks, longest, *x.shape[1:])
    for part, into, size in zip(x.split(list(sizes)), padded, sizes, strict=True):
        into[:size] = part
    out = x.new_empty(longest, *x.shape[1:])
    reduce_scatter_single(out, padded.flatten(0, 1), group=group)
    return out[: sizes[group.rank()]].contiguous()


def _gathered_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return torch.cat(_gathered(x, group).chunk(group.size(), 0), dim=-1)


def _reduce_scattered_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _reduce_scattered(torch.cat(x.chunk(group.size(), -1), dim=0), group)


def _exchanged(
    x: Tensor, group: dist.ProcessGroup, received: Sizes = None, sent: Sizes = None
) -> Tensor:
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(
        out,
        x.contiguous(),
        output_split_sizes=None if received is None else list(received),
        input_split_sizes=None if sent is None else list(sent),
        group=group,
    )
    return out

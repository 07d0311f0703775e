"""Megatron-LM's tensors read as HuggingFace's, and the other way round, a tensor or a layer at a time."""

from collections.abc import Callable

import torch

from ..checkpoint.hf import Source
from ..checkpoint.shard import Intervals
from .megatron_names import MegatronTable, MegatronTensor, Rows


class RowsSource(Source):
    """Tensors under HuggingFace's names, made of rows of Megatron's.

    table:    what they consist of.
    dtype_of: the dtype of one of Megatron's.
    """

    def __init__(self, table: MegatronTable, dtype_of: Callable[[MegatronTensor], torch.dtype]):
        self._table = table
        self._tensors = {
            name: torch.empty(table.shapes[name], dtype=dtype_of(parts[0][0]), device="meta")
            for name, parts in table.by_name.items()
        }

    def read(self, name: str, dim: int | None = None, intervals: Intervals = ()) -> torch.Tensor:
        """See `Source.read`; reads all of the tensor's layer."""
        result = torch.empty(self.shape(name), dtype=self.dtype(name))
        for tensor, at, rows in self._table.by_name[name]:
            values = self._whole(tensor)[at : at + rows.stop - rows.start]
            put_rows(result, rows, values)
        if dim is None:
            return result
        return torch.cat([result.narrow(dim, a, b - a) for a, b in intervals], dim)

    def _whole(self, tensor: MegatronTensor) -> torch.Tensor:
        """Return one of Megatron's tensors, of all ranks; it may have further rows of padding."""
        raise NotImplementedError


def put_rows(result: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    """Copy rows of one of Megatron's tensors to where they are in HuggingFace's."""
    target = result if rows.expert is None else result[rows.expert]
    if rows.transposed:
        target[:, rows.start : rows.stop] = values.T
    else:
        target[rows.start : rows.stop] = values


def rows_of(source: Source, tensor: MegatronTensor) -> torch.Tensor:
    """Return one of Megatron's tensors, padded, from HuggingFace's."""
    parts = []
    for rows in tensor.rows:
        if rows.expert is not None:
            values = source.read(rows.name, 0, ((rows.expert, rows.expert + 1),))[0]
            parts.append(values[rows.start : rows.stop])
        elif rows.transposed:
            parts.append(source.read(rows.name, 1, ((rows.start, rows.stop),)).T)
        else:
            parts.append(source.read(rows.name, 0, ((rows.start, rows.stop),)))
    missing = tensor.shape[0] - sum(len(part) for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing, *tensor.shape[1:]))
    return torch.cat(parts)

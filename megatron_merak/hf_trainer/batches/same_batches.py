"""Whether all ranks of a replica compute with the same samples."""

import zlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DataError, MerakError
from ...parallel.agree import raise_together
from ...parallel.mesh import Mesh


def checksum(batches: Sequence[Mapping[str, object]]) -> int:
    """Return a 32-bit checksum of a batch: names, shapes, types and values of its entries, in
    order.
    """
    code = 0
    for batch in batches:
        for name, value in sorted(batch.items()):
            if not isinstance(value, Tensor):
                code = zlib.crc32(f"{name} {value!r}".encode(), code)
                continue
            code = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), code)
            flat = value.detach().cpu().contiguous().flatten()
            code = zlib.crc32(flat.view(torch.uint8).numpy().data, code)
    return code


def differ_here(batches: Sequence[Mapping[str, object]], mesh: Mesh) -> bool:
    """Whether ranks of this replica have different batches. Collective over them."""
    if mesh.model is None:
        return False
    code = checksum(batches)
    extent = torch.tensor([code, -code], device=mesh.device)
    dist.all_reduce(extent, dist.ReduceOp.MAX, group=mesh.model)
    most, least = extent.tolist()
    return most != -least


def different(count: int | None = None) -> DataError:
    """Return the error for ranks of a replica with different samples.

    count: number of batches left on this rank, if ranks differ in it.
    """
    reason = "ranks of one replica of the model received different samples"
    if count is not None:
        reason = f"it ends earlier on some ranks than on others; this rank received {count} batches"
    remedy = (
        "Make it depend only on its seed and the epoch, not on the rank, the time or an "
        "unseeded generator"
    )
    return DataError("dataset", "(of this step)", reason, remedy)


def check_everywhere(
    batches: Sequence[Mapping[str, object]],
    count: int,
    mesh: Mesh,
    failure: MerakError | None = None,
) -> None:
    """Raise DataError on every rank unless ranks of a replica have the same batches, and all ranks
    the same ``count``; and ``failure`` of any rank.

    Collective over all ranks.
    """
    if mesh.control is None:
        raise_together(failure, None, "cpu")
        return
    extremes = torch.tensor(
        [count, -count, int(differ_here(batches, mesh)), int(failure is not None)]
    )
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.control)
    most, least, differ, failed = extremes.tolist()
    if most != -least:
        raise different(count)
    if differ:
        raise different()
    if failed:
        raise_together(failure, mesh.control, "cpu")

"""How tensor parallelism shards one tensor of a model."""

from dataclasses import dataclass

from megatron_merak.counting import counted
from megatron_merak.errors import PlanError


@dataclass(frozen=True)
class TensorSharding:
    """How one tensor of the model, under its HuggingFace name, is sharded over the tensor-parallel
    ranks.

    name:   of the tensor.
    shape:  full shape, without padding.
    dim:    the sharded dimension; None for a replicated tensor.
    blocks: number of fused blocks along ``dim`` (3 in a fused query-key-value), each sharded evenly
            by itself; or their extents, if they differ (fewer key-value heads).
    padded: extent of ``dim`` with padding (a vocabulary), which is sharded evenly.
    experts: whether the ranks that divide experts shard it, of several copies of a layer, in place of
             the tensor-parallel ones.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    blocks: int | tuple[int, ...] = 1
    padded: int | None = None
    experts: bool = False

    def __post_init__(self):
        if self.experts and (self.dim != 0 or self.blocks != 1 or self.padded is not None):
            reason = "ranks have whole experts, which its first dimension counts"
            raise PlanError(
                f"sharding of {self.name}", self.describe(), reason, "Let dim be 0 and blocks 1"
            )
        if self.dim is None:
            return
        if not 0 <= self.dim < len(self.shape):
            raise PlanError(
                f"dim of {self.name}",
                self.dim,
                f"its shape is {self.shape}",
                "Name one of its dimensions",
            )
        if self.padded is not None and (self.blocks != 1 or self.padded < self.shape[self.dim]):
            reason = (
                f"padding extends one block of {self.shape[self.dim]}, and there are "
                f"{self.blocks} blocks"
            )
            raise PlanError(
                f"padded extent of {self.name}", self.padded, reason, "Pad one block upwards"
            )
        if isinstance(self.blocks, tuple) and sum(self.blocks) != self.shape[self.dim]:
            reason = f"dimension {self.dim} of {self.shape} does not consist of them"
            raise PlanError(f"blocks of {self.name}", self.blocks, reason, "Let them add up to it")

    def describe(self) -> str:
        """Return how it is sharded, as text for a message."""
        if self.dim is None:
            return "replicated"
        blocks = (
            f" in {self.blocks} blocks" if isinstance(self.blocks, int) and self.blocks > 1 else ""
        )
        blocks = (
            f" in blocks of {', '.join(map(str, self.blocks))}"
            if isinstance(self.blocks, tuple)
            else blocks
        )
        if self.experts:
            return "divided by experts"
        padded = f", padded to {self.padded}" if self.padded else ""
        return f"sharded along dimension {self.dim}{blocks}{padded}"

    def intervals(self, rank: int, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return the index ranges [start, stop) along ``dim`` of a rank, ascending, in the order of
        its storage.

        ``()`` means the full tensor (``dim`` is None). Padding is excluded; a rank with padding
        only gets one empty range.
        """
        if self.dim is None:
            return ()
        extent = self.shape[self.dim]
        ranges: list[tuple[int, int]] = []
        begin = 0
        for block in self._block_extents(self.dim, ranks):
            start = begin + rank * (block // ranks)
            start, stop = min(start, extent), min(start + block // ranks, extent)
            begin += block
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return tuple(ranges)

    def _block_extents(self, dim: int, ranks: int) -> tuple[int, ...]:
        extent = self.shape[dim] if self.padded is None else self.padded
        blocks = self.blocks
        if isinstance(blocks, int) and extent % blocks == 0:
            blocks = (extent // blocks,) * blocks
        if isinstance(blocks, int) or any(block % ranks for block in blocks):
            parts = (
                counted(blocks, "block")
                if isinstance(blocks, int)
                else f"blocks of {', '.join(map(str, blocks))}"
            )
            reason = f"{parts} cannot be divided evenly over {ranks} ranks"
            raise PlanError(
                f"extent of {self.name}",
                extent,
                reason,
                "Use a number of ranks that divides it",
            )
        return blocks

    def local_shape(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard, without padding."""
        if self.dim is None:
            return self.shape
        extent = sum(stop - start for start, stop in self.intervals(rank, ranks))
        return self.shape[: self.dim] + (extent,) + self.shape[self.dim + 1 :]

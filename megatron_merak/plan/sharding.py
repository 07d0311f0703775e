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
    shards:  number of neighbours among these ranks that have the same experts, and a part of each.
    within:  the dimension along which they shard each expert; None for one.
    within_blocks: number of fused blocks along ``within``.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    blocks: int | tuple[int, ...] = 1
    padded: int | None = None
    experts: bool = False
    shards: int = 1
    within: int | None = None
    within_blocks: int = 1

    def __post_init__(self):
        self._check_shards()
        if self.experts and (self.dim is None or self.padded is not None):
            reason = "ranks have whole experts, which one of its dimensions counts"
            raise PlanError(
                f"sharding of {self.name}", self.describe(), reason, "Let dim be 0, and padded null"
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

    def _check_shards(self) -> None:
        if self.shards == 1 and self.within is None:
            return
        where = f"sharding of {self.name}"
        if self.shards < 2 or self.within is None or not self.experts:
            reason = "only several ranks with the same experts shard each, along one dimension"
            raise PlanError(where, self.shards, reason, "Let shards be 1, and within null")
        if not 0 <= self.within < len(self.shape) or self.within == self.dim:
            reason = f"its shape is {self.shape}, of which dimension {self.dim} counts experts"
            raise PlanError(where, self.within, reason, "Let within be another dimension")
        extent = self.shape[self.within]
        if self.within_blocks < 1 or extent % (self.within_blocks * self.shards):
            reason = f"{extent} features in {counted(self.within_blocks, 'block')} do not divide so"
            raise PlanError(where, self.shards, reason, "Use a number that divides each block")

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
        if self.experts and self.within is not None:
            return f"divided by experts, each of them over {counted(self.shards, 'rank')}"
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
        divided = ranks // self.shards
        blocks = self._block_extents(self.dim, divided)
        return _shares(blocks, self.shape[self.dim], rank // self.shards, divided)

    def features(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the index ranges [start, stop) along ``within`` of a rank; ``()`` where each expert
        is whole.
        """
        if self.within is None:
            return ()
        extent = self.shape[self.within]
        blocks = (extent // self.within_blocks,) * self.within_blocks
        return _shares(blocks, extent, rank % self.shards, self.shards)

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
        shape = list(self.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.intervals(rank, ranks))
        if self.within is not None:
            shape[self.within] //= self.shards
        return tuple(shape)

    def stored_shape(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of the shard of one of ``ranks`` ranks, padding included."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        extent = shape[self.dim] if self.padded is None else self.padded
        shape[self.dim] = extent // (ranks // self.shards)
        if self.within is not None:
            shape[self.within] //= self.shards
        return tuple(shape)


def _shares(
    blocks: tuple[int, ...], extent: int, rank: int, ranks: int
) -> tuple[tuple[int, int], ...]:
    """Return the index ranges of a rank's even share of each block, joined where they touch."""
    ranges: list[tuple[int, int]] = []
    begin = 0
    for block in blocks:
        start = begin + rank * (block // ranks)
        start, stop = min(start, extent), min(start + block // ranks, extent)
        begin += block
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return tuple(ranges)

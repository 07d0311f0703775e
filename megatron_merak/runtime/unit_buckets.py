"""Which buckets of sharded gradients the units of a rank read."""

from collections.abc import Collection, Mapping

from ..parallel.buffers import Bucket, ParameterBuffer


class UnitBuckets:
    """Buckets by number, in the order of the forward, which is also the index of a bucket's piece
    and of this rank's shard of it.

    buffer: has the shards of this rank.
    reads:  unit -> the trainable parameters that it reads.

    numbered    the buckets
    readers     number -> the units that read the bucket
    """

    def __init__(self, buffer: ParameterBuffer, reads: Mapping[int, Collection[str]]):
        self.numbered: tuple[Bucket, ...] = buffer.buckets[::-1]
        number_of = {
            name: number for number, bucket in enumerate(self.numbered) for name in bucket.names
        }
        self._read = {
            unit: sorted({number_of[name] for name in names}, reverse=True)
            for unit, names in reads.items()
        }
        self.readers = {
            number: {unit for unit, read in self._read.items() if number in read}
            for number in range(len(self.numbered))
        }

    def of_unit(self, unit: int) -> list[int]:
        """Return the numbers of the buckets that a unit reads, the last first."""
        return self._read.get(unit, [])

"""Sharded optimizer state on the replica with the largest shard, where the state per parameter
varies.

For example, with a bucket over three replicas:

    a bucket    | matrices, 4 bytes each          | embeddings, 8 bytes each |
    shards      | rank 0          | rank 1                | rank 2           |
"""

from collections.abc import Sequence

from megatron_merak.plan import Unit, optimizer_state, trained_tied

Part = tuple[int, float]  # number of parameters, state bytes of each


def shared_state(units: Sequence[Unit], default: float, shards: int, bucket_size: int) -> float:
    """Return the bytes of the optimizer state of units: the number of shards times the largest one.

    default:     state bytes of a parameter whose unit does not specify them.
    shards:      number of replicas that the state is sharded over.
    bucket_size: parameters of a bucket, which is split into equal shards, with the parameters of
                 one group of the optimizer adjacent; 0: all shards have the same size.
    """
    if shards == 1 or not bucket_size or all(unit.state_bytes is None for unit in units):
        return optimizer_state(units, default)
    shares = [0.0] * shards
    for bucket in _buckets(units, default, bucket_size):
        length = sum(values for values, _ in bucket) / shards
        offset = 0.0
        for values, kept in sorted(bucket, key=lambda part: part[1]):
            begin = offset
            offset = offset + values
            for shard in range(int(begin / length), min(shards, int(offset / length) + 1)):
                within = min(offset, (shard + 1) * length) - max(begin, shard * length)
                shares[shard] += kept * max(0.0, within)
    return shards * max(shares)


def _buckets(units: Sequence[Unit], default: float, bucket_size: int) -> list[list[Part]]:
    """Return the buckets, filled from the last unit to the first; a tied tensor has a bucket of its
    own.
    """
    buckets: list[list[Part]] = [[]]
    tied: dict[str, Part] = {}
    for unit in reversed(units):
        tied |= {
            name: (values, dict(unit.tied_state_bytes).get(name, default))
            for name, values in trained_tied(unit)
        }
        if sum(values for values, _ in buckets[-1]) >= bucket_size:
            buckets.append([])
        if own := unit.parameters - unit.frozen:
            buckets[-1].append((own, default if unit.state_bytes is None else unit.state_bytes))
    return [bucket for bucket in (*buckets, *([part] for part in tied.values())) if bucket]

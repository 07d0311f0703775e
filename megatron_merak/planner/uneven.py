"""What the optimizer keeps for the replica that keeps most, where replicas share its state and it keeps more of some
parameters than of others.

    a bucket    | matrices, 4 bytes each          | embeddings, 8 bytes each |
    shards      | rank 0          | rank 1                | rank 2           |
"""

from collections.abc import Sequence

from megatron_merak.plan import Unit, optimizer_state, trained_tied

Part = tuple[int, float]  # values, and bytes that are kept of each


def shared_state(units: Sequence[Unit], usual: float, shards: int, bucket_size: int) -> float:
    """Bytes of the state of some units that replicas share, as if each had as much as the one that has most.

    usual: of a value of which its unit says nothing. shards: how many replicas share. bucket_size: values of a bucket,
    which is cut into equal shards, parameters of one group of the optimizer side by side; 0: shards are alike.
    """
    if shards == 1 or not bucket_size or all(unit.state_bytes is None for unit in units):
        return optimizer_state(units, usual)
    shares = [0.0] * shards
    for bucket in _buckets(units, usual, bucket_size):
        length, place = sum(values for values, _ in bucket) / shards, 0.0
        for values, kept in sorted(bucket, key=lambda part: part[1]):
            begin, place = place, place + values
            for shard in range(int(begin / length), min(shards, int(place / length) + 1)):
                within = min(place, (shard + 1) * length) - max(begin, shard * length)
                shares[shard] += kept * max(0.0, within)
    return shards * max(shares)


def _buckets(units: Sequence[Unit], usual: float, bucket_size: int) -> list[list[Part]]:
    """They fill from the last unit on; a tied tensor has one of its own."""
    found: list[list[Part]] = [[]]
    tied: dict[str, Part] = {}
    for unit in reversed(units):
        tied |= {name: (values, dict(unit.tied_state_bytes).get(name, usual)) for name, values in trained_tied(unit)}
        if sum(values for values, _ in found[-1]) >= bucket_size:
            found.append([])
        if own := unit.parameters - unit.frozen:
            found[-1].append((own, usual if unit.state_bytes is None else unit.state_bytes))
    return [bucket for bucket in (*found, *([part] for part in tied.values())) if bucket]

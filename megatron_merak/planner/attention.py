"""What attention computes beyond the FLOPs that count for utilisation, by the kernels of ``ops.attention``."""

# Longest sequence whose attention a CPU computes in whole rows, keeping no statistics; beside a mask; rows at a time.
SHORT = 512
SHORT_MASKED = 256
BLOCK = 128


def causal_more(flops: int, length: int, fused: bool, dropout: bool) -> tuple[int, int]:
    """FLOPs of the (forward, backward) of causal attention beyond ``flops`` and twice ``flops``.

    flops: of its forward, for half of the scores. length: of the sequence. fused: see ``cluster.Device``. One kernel
    computes the scores again in its backward. A CPU with dropout computes all scores, and keeps them; in whole rows it
    computes those of a block up to its last key.
    """
    if dropout and not fused:
        return flops, 2 * flops
    if fused or length > SHORT:
        return 0, flops // 2
    starts = range(0, length, BLOCK)
    scores = sum((min(start + BLOCK, length) - start) * min(start + BLOCK, length) for start in starts)
    computed = 2 * flops * scores // length**2
    return computed - flops, 5 * computed // 2 - 2 * flops


def masked_more(flops: int, length: int, fused: bool, dropout: bool) -> tuple[int, int]:
    """The same of attention to every key, ``flops`` counting all scores. length: of the queries."""
    keeps_scores = not fused and (dropout or length <= SHORT_MASKED)
    return 0, 0 if keeps_scores else flops // 2

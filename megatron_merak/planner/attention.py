"""FLOPs that the kernels of ``ops.attention`` compute beyond those that count for utilisation
(MFU).
"""

# A CPU computes attention of sequences up to SHORT (with a mask: SHORT_MASKED) in full rows of
# scores, BLOCK rows at a time, and keeps no softmax statistics.
SHORT = 512
SHORT_MASKED = 256
BLOCK = 128


def causal_more(flops: int, length: int, fused: bool, dropout: bool) -> tuple[int, int]:
    """Return the extra FLOPs of causal attention: (forward beyond ``flops``, backward beyond 2 *
    ``flops``).

    A fused kernel recomputes the scores in its backward. A CPU with dropout computes and keeps all
    scores; in full rows it computes, for a block of rows, the scores up to the block's last key.

    flops:  of the forward, for the causal half of the scores.
    length: of the sequence.
    fused:  see ``cluster.Device``.
    """
    if dropout and not fused:
        return flops, 2 * flops
    if fused or length > SHORT:
        return 0, flops // 2
    starts = range(0, length, BLOCK)
    scores = sum(
        (min(start + BLOCK, length) - start) * min(start + BLOCK, length) for start in starts
    )
    computed = 2 * flops * scores // length**2
    return computed - flops, 5 * computed // 2 - 2 * flops


def masked_more(flops: int, length: int, fused: bool, dropout: bool) -> tuple[int, int]:
    """As `causal_more`, for attention to every key: ``flops`` counts all scores. length: number of
    queries.
    """
    keeps_scores = not fused and (dropout or length <= SHORT_MASKED)
    return 0, 0 if keeps_scores else flops // 2

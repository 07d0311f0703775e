"""Zero bubble: the weight gradient is an op of its own (W), which waits for no other stage and so
fills the gaps.

Qi et al., Zero Bubble Pipeline Parallelism (2023). In the figures F, B (the input gradient) and W
take 1 unit each.
"""

from megatron_merak.pipeline_parallel.builders.assemble import alternate, one_stage_per_rank
from megatron_merak.pipeline_parallel.ops import Kind, Op, Schedule


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with W apart. Time m (F + B + W) + (S - 1) max(F, B, F + B - W), m >= S.

    With three equal ops its bubble is a third of that of 1F1B. Stage s runs the W of a micro-batch
    s backwards later. Every stage holds min(S, m) micro-batches until their W, as many as the first
    stage of 1F1B.

    rank 0 | F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
    rank 1 | .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    rank 2 | .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    orders = []
    for stage in range(stages):
        order = []
        for kind, k in alternate(microbatches, stages - stage):
            order.append((kind, k))
            if kind is Kind.B and k >= stage:
                order.append((Kind.W, k - stage))
        order += [(Kind.W, k) for k in range(max(microbatches - stage, 0), microbatches)]
        orders.append(order)
    return one_stage_per_rank("zb-h1", microbatches, orders)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages per rank, which go down the ranks and up again. Time (6m + S - 1) F where F = B =
    W and m >= 2S - 1.

    The authors' handcrafted order: with three equal ops a rank waits only for the first forward to
    arrive and, early ranks, for the last one to end. Rank r has the stages r and 2S - 1 - r and
    holds 2S micro-batches of one or the
    other: as much as the first rank of 1F1B, whose stages are twice the size. Fewer micro-batches
    run the start of that
    order. In the figure small letters are the second stage of a rank.

    rank 0 | F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3 .
    rank 1 | .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3
    """
    enough = max(microbatches, 2 * ranks - 1)
    programs = []
    for rank in range(ranks):
        stages = (rank, 2 * ranks - 1 - rank)
        after = ranks - rank
        steady = "F0 B0 W0 F1 B1 W1 "
        order = "F0 " * (2 * after - 1) + "F1 F0 " * rank + "F1 B1 W1 " * after
        order += steady * (enough - order.count("F0"))
        order += steady[3:] * (enough - order.count("F1"))
        order += "B0 B1 " * rank + "B0 W0 " * after
        order += "W1 " * (enough - order.count("W1"))
        order += "W0 " * (enough - order.count("W0"))
        done = dict.fromkeys(steady.split(), 0)
        program = []
        for step in order.split():
            program.append(Op(stages[int(step[1])], Kind(step[0]), done[step]))
            done[step] += 1
        programs.append(tuple(op for op in program if op.microbatch < microbatches))
    return Schedule(
        "zb-v",
        2 * ranks,
        microbatches,
        tuple(programs),
        placement=(*range(ranks), *reversed(range(ranks))),
    )

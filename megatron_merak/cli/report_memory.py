"""Show what fills the memory of the ranks of a plan: a table per stage and rank, and a picture. Needs no GPU.

Give a stored plan, or copy the flags of your pretrain_gpt.py command; with --model, a HuggingFace directory or
config.json, those of your pretrain_hf.py command. All numbers are modelled:

  weights      parameters in the compute dtype; tied ones count once per rank
  gradients    the fp32 buffer in which trained weights accumulate gradients over micro-batches
  optimizer    optimizer state, such as both fp32 moments of AdamW, and an fp32 copy of 16-bit weights
  activations  what the micro-batches in flight store for their backwards, at the rank's peak, under the plan's schedule
               and recomputation: inputs of recomputed layers, saved tensors of others, operands of deferred W ops
  working      what the largest unit needs only while it runs, such as logits and their gradient; if replicas shard
               weights or gradients, also the unsharded ones of two units
  transfers    activations and gradients that are being sent between stages

examples:
  # 20B parameters on 24 GB GPUs, recomputing no more than necessary
  merak-memory --world-size 64 --device "RTX 3090" --num-layers 44 --hidden-size 6144 \\
      --num-attention-heads 64 --seq-length 1024 --vocab-size 50257 --micro-batch-size 2 --global-batch-size 256 \\
      --bf16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 16 --recompute-granularity full \\
      --recompute-method capacity --device-memory-gb 22 --picture memory.png

  merak-memory --plan plan.json --picture memory.png
  merak-memory --classic
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..arguments import expanded
from ..config.command_line import CommandParser, mistake
from ..counting import counted
from ..errors import ConfigError, MerakError
from ..megatron_flags import without_effect
from ..training.planned import Maker, configured, kind_of, parser
from .door import command
from .words import described, error_text, program

if TYPE_CHECKING:
    from ..plan import Plan
    from ..planner.remedies import Remake

NAME = "merak-memory"
USAGE = """merak-memory --world-size N [--device NAME] [--picture FILE.png] TRAINING FLAGS
       merak-memory --plan PLAN.json [--picture FILE.png]
       merak-memory --classic"""
GIB = 2**30
MIB = 2**20
GB = 10**9


def looked_at(plan: "Plan", limit: float, remake: "Remake | None" = None) -> str:
    """Return the report: tables, the rank with the highest peak, and what does not fit.

    limit:  bytes that a rank may use, 0 if that is not known.
    remake: see ``misfits``.
    """
    from ..plan import host_text, limits_of, prediction, sharding_text
    from ..planner.memory import rank_memory
    from ..planner.remedies import misfits
    from ..planner.tables import memory_table

    peaks = [memory.total for memory in rank_memory(plan)]
    limits = limits_of(plan.cluster, plan.grid, limit)
    rank = max(range(len(peaks)), key=lambda each: peaks[each] / (limits[each] or 1))
    which = "fullest" if plan.cluster.nodes else "largest"
    recomputed = [f"{len(stage.recompute)}/{len(stage.units)}" for stage in plan.stages]
    offloaded = [f"{len(stage.offload)}/{len(stage.units)}" for stage in plan.stages]
    batches = f"{counted(plan.num_microbatches, 'micro-batch')} of {plan.micro_batch_size:,}"
    lines = [
        f"{counted(plan.grid.size, 'rank')}, {plan.schedule.name}, {batches}, {plan.dtype}; "
        "every number is modelled, per rank",
        f"recomputed units per stage: {' '.join(recomputed)}",
        *([f"offloaded units per stage: {' '.join(offloaded)}"] if plan.offloads else []),
        *filter(None, [host_text(plan), sharding_text(plan), prediction(plan)]),
        "",
        memory_table(plan),
        "",
        f"{which}: pipeline rank {rank} with {peaks[rank] / GIB:.2f} GiB"
        + (f" of {limits[rank] / GIB:.2f}" if limits[rank] else ""),
    ]
    return "\n".join([*lines, *misfits(plan, limit, remake)])


def classic() -> str:
    """Return well-known figures for checking a memory model."""
    from ..planner.memory import StageMemory, Values
    from ..planner.tables import align

    table = 64000 * 5120
    giant = 175 * GB
    rows = [["", "fp32", "fp16"]]
    sizes = [
        [
            StageMemory.of(Values(count, 8 * count), dtype, 0, 0, 0)
            for dtype in ("float32", "float16")
        ]
        for count in (table, giant)
    ]
    rows.append(
        ["64000 x 5120 embedding", *(f"{memory.weights / MIB:.0f} MB" for memory in sizes[0])]
    )
    rows.append(["its fp32 gradient", *(f"{memory.gradients / MIB:.0f} MB" for memory in sizes[0])])
    rows.append(
        ["its optimizer state", *(f"{memory.optimizer / MIB:.0f} MB" for memory in sizes[0])]
    )
    rows.append(["175B parameters", *(f"{memory.weights / GB:.0f} GB" for memory in sizes[1])])
    rows.append(
        ["with gradients and optimizer", *(f"{memory.total / GB:.0f} GB" for memory in sizes[1])]
    )
    return "\n".join(
        [
            *align(rows),
            "",
            "MB is 2^20 bytes and GB 10^9 bytes, as these figures are usually quoted.",
        ]
    )


def show(arguments: Sequence[str]) -> None:
    arguments = expanded(arguments)
    flags, own = parser(described(__doc__, NAME), described(USAGE, NAME), kind_of(arguments))
    own.add_argument(
        "--picture",
        metavar="FILE",
        default=None,
        help="draw one bar per rank into this PNG file [unset]",
    )
    own.add_argument("--classic", action="store_true", help="print well-known figures and exit")
    alone = CommandParser(add_help=False)
    alone.add_argument("--plan")
    alone.add_argument("--picture")
    alone.add_argument("--classic", action="store_true")
    try:
        options, rest = alone.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise mistake(error.argument_name, error.message) from None
    if options.classic or options.plan is not None:
        if rest:
            reason = "training flags have no effect with it"
            raise ConfigError(
                "--classic" if options.classic else "--plan",
                " ".join(rest),
                reason,
                "Leave them out",
            )
    if options.classic:
        print(classic())
        return
    if options.picture is not None:
        check_picture(options.picture)
    if options.plan is not None:
        from ..training.plan_file import stored

        plan = stored(options.plan)
        limit: float = plan.cluster.most_usable
        parts = [looked_at(plan, limit, None)]
    else:
        config, values = configured(flags, arguments)
        maker = Maker(config, values)
        plan = maker.plan
        limit = maker.limit
        notes = (*without_effect(arguments)[1], *maker.notes())
        parts = [looked_at(plan, limit, maker.remade), "\n".join(notes)]
    print("\n\n".join(part for part in parts if part))
    if options.picture is not None:
        from ..planner.memory_picture import draw_memory

        draw_memory(plan, options.picture, limit)
        print(f"wrote {options.picture}", file=sys.stderr)


def check_picture(path: str) -> None:
    if not path.endswith(".png"):
        raise ConfigError("--picture", path, "it is not a PNG file", "Use a name that ends in .png")
    from ..pipeline_parallel.pictures.library import check_drawing
    from ..training.outputs import check_file

    check_file("--picture", path)
    check_drawing("--picture", path)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    try:
        show(sys.argv[1:] if arguments is None else arguments)
    except MerakError as error:
        raise SystemExit(f"{program()}: {error_text(error)}") from None

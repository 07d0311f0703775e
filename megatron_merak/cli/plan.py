"""Show how a training command would run: rank grid, stages, memory, schedule, predicted time. Needs
no GPU.

merak-plan search finds the degrees and the other settings with which a step takes least time:
merak-plan search --help.

Copy the flags of your pretrain_gpt.py (merak-pretrain) command; data and learning rate may be left
out. With --model, a HuggingFace directory or config.json, use the flags of pretrain_hf.py; the
output then shows which weights are sharded, and why. A stored plan is shown without being made
again.

examples:
  # a small GPT on 8 CPU ranks
  merak-plan show --world-size 8 --num-layers 6 --hidden-size 256 --num-attention-heads 8 \\
      --seq-length 256 --vocab-size 8000 --micro-batch-size 4 --global-batch-size 64 \\
      --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

  # GPT-3 on 1,024 GPUs, with the plan as JSON and its timeline as a picture
  merak-plan show --world-size 1024 --device H100 --num-layers 96 --hidden-size 12288 \\
      --num-attention-heads 96 --seq-length 2048 --vocab-size 50257 --micro-batch-size 1 --bf16 \\
      --global-batch-size 1536 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \\
      --save plan.json --timeline plan.png

  # what 300 billion tokens of that cost, at 2 an hour
  merak-plan show --world-size 1024 --device H100 ... --tokens 300B --price-per-gpu-hour 2

  # an unmodified HuggingFace model of that size; then the difference to another stored plan
  merak-plan show --model examples/shapes/bloom-176b.json --world-size 384 --device A100 \\
      --seq-length 2048 --micro-batch-size 2 --global-batch-size 2048 --bf16 \\
      --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 \\
      --recompute-granularity full --save bloom.json
  merak-plan show bloom.json
  merak-plan diff bloom.json other.json

  # predicted steps beside those of runs with --run-dir, and a factor for each device
  merak-plan calibrate runs/first runs/second
  # the factor into a profile of merak-probe, for plans with --device-profile
  merak-plan calibrate runs/first runs/second --into here.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import expanded
from ..config import RunConfig
from ..errors import ConfigError, MerakError
from ..megatron_flags import without_effect
from ..training.planned import Maker, configured, kind_of
from ..training.planned import parser as planned_parser
from .door import command
from .words import described, error_text, program

if TYPE_CHECKING:
    from ..plan import Plan
    from ..planner.remedies import Remake

NAME = "merak-plan"
USAGE = """merak-plan show --world-size N [--device NAME] [--save FILE.json] TRAINING FLAGS
       merak-plan show PLAN.json
       merak-plan search --cluster NAME --gpus N TRAINING FLAGS
       merak-plan diff PLAN.json OTHER.json
       merak-plan calibrate RUN_DIR... [--into PROFILE.json]"""


def parser(kind: type[RunConfig]) -> argparse.ArgumentParser:
    flags, own = planned_parser(described(__doc__, NAME), described(USAGE, NAME), kind)
    flags.add_argument(
        "command",
        choices=("show", "search", "diff", "calibrate"),
        help="print a plan, find one, print the differences between two, or what runs said of some",
    )
    own.add_argument(
        "--json",
        metavar="FILE",
        default=None,
        help="write the plan to FILE, as --save FILE.json does [unset]",
    )
    own.add_argument(
        "--tokens",
        metavar="N",
        default=None,
        help="tokens of the whole run, such as 1.4T: print its steps, days and GPU hours [unset]",
    )
    own.add_argument(
        "--price-per-gpu-hour",
        metavar="PRICE",
        default=None,
        help="print what --tokens cost, too [unset]",
    )
    return flags


def shown(
    plan: "Plan", limit: float, notes: Sequence[str] = (), remake: "Remake | None" = None
) -> str:
    """A plan, what was noted about it, its tables, and where it does not fit what would (see
    ``misfits``).

    limit: bytes that a rank may use.
    """
    from ..plan import plan_table
    from ..planner.remedies import misfits
    from ..planner.tables import memory_table, tensor_table

    parts = [plan_table(plan), "\n".join(notes), memory_table(plan)]
    parts += [tensor_table(plan)] if plan.reasons else []
    parts += ["\n".join(misfits(plan, limit, remake))]
    return "\n\n".join(part for part in parts if part)


def show(arguments: Sequence[str]) -> None:
    """Print the plan that flags describe."""
    arguments = expanded(arguments)
    config, own = configured(parser(kind_of(arguments)), arguments)
    from ..pipeline_parallel.pictures.files import check_suffix, write
    from ..planner.budget import Budget, budget_text
    from ..planner.picture import view
    from ..training.outputs import check_file

    save = config.checkpoint.save
    picture = config.logging.timeline
    # else a run's directory
    copies = {"--json": own.json, "--save": save if save and save.endswith(".json") else None}
    for flag, path in {**copies, "--timeline": picture}.items():
        if path is not None:
            check_file(flag, path)
    if picture is not None:
        check_suffix("--timeline", picture)
    budget = Budget.of(own.tokens, own.price_per_gpu_hour)
    maker = Maker(config, own)
    plan = maker.plan
    whole = (budget_text(plan, budget),) if budget else ()
    notes = (*whole, *without_effect(arguments)[1], *maker.notes())
    print(shown(plan, maker.limit, notes, maker.remade))
    for path in copies.values():
        if path is not None:
            Path(path).write_text(plan.to_json(), encoding="utf-8")
            print(f"wrote {path}", file=sys.stderr)
    if picture is not None:
        write([view(plan)], picture)
        print(f"wrote {picture}", file=sys.stderr)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    files = [argument for argument in arguments[1:3] if not argument.startswith("-")]
    try:
        if arguments[:1] == ["diff"]:
            if len(files) != 2 or len(arguments) != 3:
                raise ConfigError(
                    "diff",
                    " ".join(arguments[1:]),
                    "it compares two stored plans",
                    "Give two files",
                )
            from ..planner.tables import difference
            from ..training.plan_file import stored

            print(difference(*map(stored, files)) or "the plans are equal")
        elif arguments[:1] == ["show"] and len(arguments) == 2 and files:
            from ..training.plan_file import stored

            plan = stored(files[0])
            print(shown(plan, plan.cluster.most_usable))
        elif arguments[:1] == ["calibrate"]:
            from .plan_calibrate import calibrate

            calibrate(arguments[1:])
        elif arguments[:1] == ["search"]:
            from .plan_search import search

            search(arguments)
        else:
            show(arguments)
    except MerakError as error:
        raise SystemExit(f"{program()}: {error_text(error)}") from None

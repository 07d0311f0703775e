"""Shows how a training command would run: rank grid, stages, schedule, predicted time and memory. Needs no GPU.

Takes every flag of pretrain_gpt.py, so a command line can be copied as it is; data and learning rate may be missing.

examples:
  # a small GPT on 8 CPU ranks
  python tools/plan.py show --world-size 8 --num-layers 6 --hidden-size 256 --num-attention-heads 8 --seq-length 256 \\
      --vocab-size 8000 --micro-batch-size 4 --global-batch-size 64 --tensor-model-parallel-size 2 \\
      --pipeline-model-parallel-size 2

  # GPT-3 on 1,024 GPUs; the plan as JSON and its timeline as a picture
  python tools/plan.py show --world-size 1024 --device H100 --num-layers 96 --hidden-size 12288 \\
      --num-attention-heads 96 --seq-length 2048 --vocab-size 50257 --micro-batch-size 1 --bf16 \\
      --global-batch-size 1536 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \\
      --json plan.json --timeline plan.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_merak.arguments import build_parser, read
from megatron_merak.cluster import DEVICES, find_cluster
from megatron_merak.errors import ConfigError, MerakError
from megatron_merak.pipeline_parallel.draw import draw
from megatron_merak.plan import Plan
from megatron_merak.planner import plan
from megatron_merak.planner.memory import overflowing_stages
from megatron_merak.planner.predict import timeline


def parser() -> argparse.ArgumentParser:
    flags = build_parser(__doc__)
    flags.usage = "python tools/plan.py show --world-size N [--device NAME] [--json FILE] TRAINING FLAGS"
    flags.add_argument("command", choices=("show",), help="print the plan")
    own = flags.add_argument_group("plan")
    own.add_argument("--world-size", metavar="N", default=None, help="number of ranks [required]")
    own.add_argument("--device", metavar="NAME", default="cpu", help=f"one of {', '.join(DEVICES)} [cpu]")
    own.add_argument("--json", metavar="FILE", type=Path, default=None, help="also store the plan [unset]")
    return flags


def world_size(text: str | None) -> int:
    if text is None or not text.isdecimal() or int(text) < 1:
        raise ConfigError("--world-size", text or "(missing)", "it is a number of ranks", "Give it, 1 or more")
    return int(text)


def verdict(made: Plan) -> str:
    """A warning for each stage that does not fit into its device."""
    device = find_cluster(made.device).device
    full = f"{device.memory / 2**30:.0f} GiB of {device.name}"
    return "".join(f"\nstage {stage} does not fit into the {full}" for stage in overflowing_stages(made, device))


def main(arguments: Sequence[str]) -> None:
    try:
        config, own = read(parser(), arguments)
        made = plan(config, world_size(own.world_size), own.device)
        print(f"{made}{verdict(made)}")
        if own.json:
            own.json.write_text(made.to_json())
        if config.logging.timeline:
            draw(timeline(made, find_cluster(made.device)), config.logging.timeline)
    except (MerakError, OSError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        raise SystemExit(f"plan.py: {error}{notes}") from None


if __name__ == "__main__":
    main(sys.argv[1:])

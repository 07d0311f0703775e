"""Plans of models that others published times of, divided along experts and sequences: modelled.

python -m benchmarks targets    # prints the table; --into docs/evidence/targets.md
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks import ROOT
from benchmarks.runs import add_into, show
from megatron_merak.cli import plan as tool
from megatron_merak.cluster import GIB
from megatron_merak.plan import Plan
from megatron_merak.planner.memory import predicted_peaks

BEGIN = "<!-- written by: python -m benchmarks targets -->"
END = "<!-- end of targets -->"
COMMON = "--device dgx-h100 --bf16"
CAPACITY = "--recompute-granularity full --recompute-method capacity"


class Target(NamedTuple):
    """A model on H100s.

    shape:  of examples/shapes.
    flags:  of the layout.
    beside: what others published of it.
    label:  behind the name, of a row beside another one of the model.
    again:  what is recomputed.
    micro:  samples of a micro-batch.
    """

    model: str
    shape: str
    gpus: int
    length: int
    samples: int
    flags: str
    beside: str
    label: str = ""
    again: str = CAPACITY
    micro: int = 1

    @property
    def command(self) -> str:
        return (
            f"merak-plan show --model examples/shapes/{self.shape}.json --world-size {self.gpus} "
            f"{COMMON} --micro-batch-size {self.micro} {self.again} --seq-length {self.length} "
            f"--global-batch-size {self.samples} {self.flags}"
        )


MOMENTS = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
OPTIM = "--data-parallel-sharding-strategy optim"
TARGETS = [
    Target(
        "DeepSeek-V3",
        "deepseek-v3",
        gpus=256,
        length=4096,
        samples=2048,
        flags=f"--pipeline-model-parallel-size 16 --expert-model-parallel-size 16 {OPTIM}",
        beside="AutoModel: 1,002 (ep64 pp4)",
    ),
    Target(
        "DeepSeek-V3",
        "deepseek-v3",
        gpus=256,
        length=4096,
        samples=2048,
        flags=f"--pipeline-model-parallel-size 32 --expert-model-parallel-size 8 {OPTIM} {MOMENTS} "
        "--cpu-offloading --pipeline-schedule early-recompute",
        beside="",
        label=", moments in bf16",
        again="--recompute-granularity selective --recompute-method capacity",
    ),
    Target(
        "DeepSeek-V3",
        "deepseek-v3",
        gpus=2048,
        length=4096,
        samples=8192,
        flags=f"--pipeline-model-parallel-size 16 --expert-model-parallel-size 8 {OPTIM} --cpu-offloading "
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 4",
        beside="AutoModel: 865 (1,024 GPUs, ep64 pp4)",
        again="--recompute-granularity selective --recompute-method capacity",
    ),
    Target(
        "Qwen3-30B-A3B",
        "qwen3-30b-a3b",
        gpus=8,
        length=4096,
        samples=512,
        flags=f"--expert-model-parallel-size 8 {OPTIM}",
        beside="AutoModel: 12,885",
    ),
    Target(
        "Qwen3-30B-A3B",
        "qwen3-30b-a3b",
        gpus=8,
        length=4096,
        samples=512,
        flags="--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 "
        f"--tp-comm-overlap sub-pipeline {OPTIM}",
        beside="",
        label=", as a search chooses",
        micro=4,
    ),
    Target(
        "Qwen3-30B-A3B",
        "qwen3-30b-a3b",
        gpus=8,
        length=4096,
        samples=512,
        flags="--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 "
        f"--tp-comm-overlap sub-pipeline {OPTIM} {MOMENTS} --cpu-offloading",
        beside="",
        label=", moments in bf16",
        again="--recompute-granularity selective --recompute-method capacity",
        micro=8,
    ),
    Target(
        "Llama 3.1 8B",
        "llama-3.1-8b",
        gpus=8,
        length=2**17,
        samples=8,
        flags=f"--context-parallel-size 8 {OPTIM}",
        beside="torchtitan: 1,071 (fp8)",
    ),
    Target(
        "Llama 3.1 8B",
        "llama-3.1-8b",
        gpus=64,
        length=2**17,
        samples=32,
        flags=f"--context-parallel-size 8 {OPTIM}",
        beside="",
    ),
    Target(
        "Llama 3.1 8B",
        "llama-3.1-8b",
        gpus=64,
        length=2**20,
        samples=4,
        flags=f"--context-parallel-size 64 --cp-comm-type p2p {OPTIM}",
        beside="",
        again="--recompute-granularity full",
    ),
]


def planned(target: Target) -> Plan:
    """The plan that the command of a target shows."""
    with tempfile.TemporaryDirectory() as directory:
        saved = Path(directory) / "plan.json"
        words = target.command.replace("examples", str(ROOT / "examples")).split()[1:]
        with contextlib.redirect_stdout(io.StringIO()):
            tool.main([*words, "--save", str(saved)])
        return Plan.from_json(saved.read_text())


def row(target: Target, plan: Plan) -> str:
    grid = plan.grid
    degrees = {
        "tp": grid.tp,
        "cp": grid.cp,
        "pp": grid.pp,
        "dp": grid.dp,
        "ep": plan.expert_parallel,
    }
    layout = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    again = sum(len(stage.recompute) for stage in plan.stages)
    peak = max(predicted_peaks(plan))
    fits = "" if peak <= plan.cluster.device.usable else " (does not fit)"
    rate = target.samples * target.length / plan.predicted_time / target.gpus
    return (
        f"| {target.model}{target.label} | {target.gpus:,} | {target.length:,} | {layout} "
        f"| {again} of {len(plan.units)} | {peak / GIB:.1f} GiB{fits} "
        f"| {plan.predicted_time:.1f} s | {rate:,.0f} | {target.beside} |"
    )


def table(targets: list[Target] | None = None) -> str:
    chosen = TARGETS if targets is None else targets
    lines = [
        "| model | GPUs | tokens of a sequence | layout | recomputed units | peak of a rank | step "
        "| tokens/s of a GPU | published |",
        "|---|--:|--:|---|--:|--:|--:|--:|---|",
    ]
    lines += [row(target, planned(target)) for target in chosen]
    commands = "\n".join(target.command for target in chosen)
    return "\n".join([*lines, "", "```bash", commands, "```"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_into(parser)
    given = parser.parse_args(argv)
    return show(table(), given.into, BEGIN, END)

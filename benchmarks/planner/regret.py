"""How much slower than the best of all layouts is the one that a search chooses?

    python -m benchmarks regret --results regret.jsonl                    # emulated: times are modelled
    python -m benchmarks regret --measured --results measured.jsonl       # on the cores of this machine
    python -m benchmarks regret --results regret.jsonl --show --into docs/evidence/regret.md   # no run

A case is a model, a number of ranks and a link. Every layout that the search may choose runs some steps
with real tensors; the regret is that of the chosen one beside the fastest. What has run is in --results,
and a command that is started again goes on from there. Emulated ranks have a logical clock, which no load
of the machine changes. With --measured the clock is the machine's: use it where nothing else runs, with
as many cores as ranks; fewer measure the work of all ranks and not their overlap. Links that are slower
than the machine's are emulated only.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.runs import add_into, write
from benchmarks.schedules.worlds import prepare
from megatron_merak.cluster import CLUSTERS, GIB, Cluster, Link, profiled
from megatron_merak.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from megatron_merak.errors import MerakError
from megatron_merak.parallel.clock import Clock, LogicalClock, WallClock
from megatron_merak.parallel.emulated import register
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid, time_text
from megatron_merak.planner import plan
from megatron_merak.planner.request import Request
from megatron_merak.planner.search import Choice, Search
from megatron_merak.planner.search.formulas import FormulaChain
from megatron_merak.planner.tables import align
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.training.gpt_blueprint import by_formulas
from megatron_merak.training.searched import applied
from megatron_merak.training.trainer import Trainer
from tests.ranks import run_ranks

BATCH = 8
TOGETHER = 16  # layouts that one start of the ranks runs
MARKS = "<!-- written by: python -m benchmarks regret -->", "<!-- end of regret -->"
CPU = torch.device("cpu")
NATIVE = "native"
LINKS = {NATIVE: None, "1 Gbit/s": Link("1 Gbit/s", 1e-4, 117e6)}
LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
}
MODELS = {
    "gpt": {"num_layers": 4, "hidden_size": 128, "vocab_size": 1024},
    "llama": {"num_layers": 4, "hidden_size": 128, "vocab_size": 1024, **LLAMA},
    "deep": {"num_layers": 8, "hidden_size": 64, "vocab_size": 512, **LLAMA},
    "wide vocabulary": {"num_layers": 2, "hidden_size": 128, "vocab_size": 8192},
}


@dataclass(frozen=True)
class Case:
    """A model of ``MODELS`` on so many ranks with a link of ``LINKS``."""

    model: str
    ranks: int
    link: str

    @property
    def config(self) -> Config:
        shape = ModelConfig(
            num_attention_heads=8,
            seq_length=64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **MODELS[self.model],
        )
        train = TrainConfig(micro_batch_size=1, global_batch_size=BATCH, train_iters=1000)
        return Config(model=shape, train=train, optimizer=OptimizerConfig(lr=1e-4))

    def cluster(self, memory_gb: float, profile: str | None) -> Cluster:
        """Return cores of a machine with so much memory per rank, joined by the link."""
        host = profiled(CLUSTERS["cpu"], profile)
        link = LINKS[self.link] or host.inside
        device = replace(host.device, memory=int(memory_gb * GIB))
        return replace(host, device=device, inside=link, name=f"cpu, {self.link}")


@dataclass(frozen=True)
class Row:
    """One layout of a case: what was predicted and what it took, in seconds of a step."""

    case: Case
    choice: str
    predicted: float
    taken: float
    chosen: bool
    measured: bool

    @property
    def key(self) -> tuple[Case, str, bool]:
        return self.case, self.choice, self.measured


@dataclass(frozen=True)
class Layouts:
    """Every layout of a case that fits, with its predicted seconds, and the one that is chosen."""

    chosen: Choice
    predicted: dict[Choice, float]

    @classmethod
    def of(cls, case: Case, host: Cluster) -> "Layouts":
        request = Request(sequence_length=case.config.model.seq_length)
        search = Search(FormulaChain(case.config, host), request, host)
        best = search.run(case.ranks, [BATCH], {}).best
        assert best is not None, "nothing fits: give more --memory-gb"
        found = {}
        space = search.space(case.ranks, [BATCH], {})
        for layer in space.layers():
            units = len(search.model.units(layer, 1, False, False))
            for degrees in space.degrees(layer, units):
                for choice in space.choices(degrees, units):
                    try:
                        made = search.plan(choice, degrees.dp, degrees.microbatches)
                    except MerakError:
                        continue
                    found[choice] = made.predicted_time
        return cls(best.choice, found)


def run(
    rank: int, ranks: int, case: Case, host: Cluster, choices: list[Choice], steps: int, real: bool
) -> list[float]:
    """Return this rank's seconds of a step of each layout: the median, after one to warm up; of
    emulated ranks one step is like another.
    """
    clock = WallClock() if real else _emulated(rank, ranks, host)
    config = case.config
    meshes = {}
    traced = {}  # by samples of a micro-batch
    seconds = []
    for choice in choices:
        own = applied(config, choice)
        made = plan(own, ranks, host)
        key: Grid = made.grid
        if key not in meshes:
            meshes[key] = build_mesh(key, rank, CPU, clock=clock)
        mesh = meshes[key]
        if choice.mb not in traced:
            traced[choice.mb] = traced_gpt(own)
        blueprint = by_formulas(traced[choice.mb], own, made)
        trainer = Trainer(own, GPTModel(blueprint, own, mesh))
        batches = _batches(config, choice.mb, made.num_microbatches)
        times = []
        for _ in range(1 + (steps if real else 1)):
            dist.barrier()
            began = clock.now()
            with clock.kernels():
                trainer.step(batches)
            dist.barrier()
            times.append(clock.now() - began)
        seconds.append(median(times[1:]))
    return seconds


def _emulated(rank: int, ranks: int, host: Cluster) -> Clock:
    """Make the job's group one of emulated ranks, and return their clock."""
    clock = LogicalClock(host)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    register(clock)
    store = dist.PrefixStore("emulated", store)
    dist.init_process_group("emu", store=store, rank=rank, world_size=ranks)
    return clock


def _batches(config: Config, mb: int, count: int) -> list[dict[str, torch.Tensor]]:
    length = config.model.seq_length
    generator = torch.Generator().manual_seed(0)
    shape = (mb, length + 1)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, config.model.vocab_size or 1, shape, generator=generator)
        batches.append(
            {
                "tokens": ids[:, :-1].contiguous(),
                "labels": ids[:, 1:].contiguous(),
                "loss_mask": torch.ones(mb, length),
                "position_ids": torch.arange(length).expand(mb, length).contiguous(),
            }
        )
    return batches


def read(path: Path) -> list[Row]:
    """Return what has run; a line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows.append(Row(**row | {"case": Case(**row["case"])}))
    return rows


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    for ranks in arguments.ranks:
        for link in arguments.links:
            if arguments.measured and link != NATIVE:
                continue
            for model in arguments.models:
                yield Case(model, ranks, link)


def run_case(case: Case, arguments: argparse.Namespace, known: set) -> None:
    """Run the layouts of a case that are not known, and append them to the results."""
    host = case.cluster(arguments.memory_gb, arguments.profile)
    layouts = Layouts.of(case, host)
    sampled = [
        choice
        for index, choice in enumerate(layouts.predicted)
        if index % arguments.every == 0 or choice == layouts.chosen
    ]
    left = [each for each in sampled if (case, str(each), arguments.measured) not in known]
    began = time.monotonic()
    for first in range(0, len(left), TOGETHER):
        some = left[first : first + TOGETHER]
        own = (case, host, some, arguments.steps, arguments.measured)
        told = run_ranks(run, case.ranks, *own, timeout=120.0 * len(some))
        with arguments.results.open("a", encoding="utf-8") as file:
            for choice, *seconds in zip(some, *told, strict=True):
                predicted = layouts.predicted[choice]
                chosen = choice == layouts.chosen
                row = Row(
                    case,
                    str(choice),
                    predicted,
                    taken=max(seconds),
                    chosen=chosen,
                    measured=arguments.measured,
                )
                file.write(json.dumps(asdict(row)) + "\n")
        done = first + len(some)
        passed = time.monotonic() - began
        rest = passed / done * (len(left) - done)
        print(
            f"{case.model}, {case.ranks} ranks, {case.link}: {done} of {len(left)} layouts "
            f"({len(layouts.predicted)} in all), {passed:.0f} s, about {rest:.0f} s left",
            file=sys.stderr,
            flush=True,
        )


def table(rows: Sequence[Row], measured: bool) -> str:
    """Return a line for each case of which the chosen layout ran."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        if row.measured == measured:
            found.setdefault(row.case, {})[row.choice] = row
    lines = [
        "| model | ranks | link | layouts | chosen | it takes | the best | it takes | regret |",
        "|---|---:|---|---:|---|---:|---|---:|---:|",
    ]
    for case, own in found.items():
        chosen = next((row for row in own.values() if row.chosen), None)
        if chosen is None:
            continue
        best = min(own.values(), key=lambda row: row.taken)
        cells = (
            case.model,
            str(case.ranks),
            case.link,
            str(len(own)),
            chosen.choice,
            time_text(chosen.taken),
            best.choice,
            time_text(best.taken),
            f"{chosen.taken / best.taken - 1:.1%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(rows: Sequence[Row]) -> str:
    parts = []
    for measured, title in ((False, "Emulated ranks: times are modelled"), (True, "Measured")):
        text = table(rows, measured)
        if text.count("\n") > 1:
            parts.append(f"### {title}\n\n{text}")
    return "\n\n".join(parts)


def worst(rows: Sequence[Row], shown: int) -> str:
    """Return the fastest layouts of each case, with what was predicted."""
    parts = []
    for case in dict.fromkeys(row.case for row in rows):
        own = sorted((row for row in rows if row.case == case), key=lambda row: row.taken)
        lines = [("place", "layout", "predicted", "taken", "beside the best")]
        for place, row in enumerate(own):
            if place < shown or row.chosen:
                apart = f"{row.taken / own[0].taken - 1:+.1%}"
                times = (time_text(row.predicted), time_text(row.taken), apart)
                lines.append((str(place + 1), "chosen: " * row.chosen + row.choice, *times))
        title = f"{case.model}, {case.ranks} ranks, {case.link}"
        parts.append("\n".join([title, *align(lines, (1,))]))
    return "\n\n".join(parts)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="JSON lines of what has run")
    parser.add_argument("--show", action="store_true", help="run nothing: tables of --results")
    parser.add_argument("--measured", action="store_true", help="by the machine's clock")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(2 4 8)")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=[*LINKS], help="(all)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="(all)")
    parser.add_argument("--memory-gb", type=float, default=2.0, help="memory of a rank (2)")
    parser.add_argument("--profile", default=None, help="device profile of merak-probe")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each layout (5)")
    parser.add_argument("--every", type=int, default=1, help="run one in so many layouts (1)")
    add_into(parser)
    return parser


def main() -> int:
    arguments = options().parse_args()
    if not arguments.show:
        prepare("megatron_merak.training.gpt_blueprint")
        known = {row.key for row in read(arguments.results)}
        for case in cases(arguments):
            run_case(case, arguments, known)
    rows = read(arguments.results)
    print(worst(rows, 5))
    print()
    print(page(rows))
    for into in arguments.into:
        write(into, f"\n{page(rows)}\n", *MARKS)
    return 0

"""How much slower than the best of all layouts is the one that a search chooses? Measured on ranks of
this machine.

    python -m benchmarks search_regret                     # every layout on 4 ranks; half an hour on two cores
    python -m benchmarks search_regret --every 20 --steps 3  # one in twenty

The regret is that of the chosen layout beside the fastest measured one. A machine with fewer cores than ranks
measures the work of all ranks, not their overlap.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.schedules.worlds import prepare
from megatron_merak.cluster import CLUSTERS, GIB, Cluster, profiled
from megatron_merak.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from megatron_merak.errors import MerakError
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

BATCH = 16
CPU = torch.device("cpu")


def configuration(layers: int, hidden: int, length: int) -> Config:
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        seq_length=length,
        vocab_size=8 * hidden,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    train = TrainConfig(micro_batch_size=1, global_batch_size=BATCH, train_iters=1000)
    return Config(model=model, train=train, optimizer=OptimizerConfig(lr=1e-4))


def cluster(memory_gb: float, profile: str | None) -> Cluster:
    """Cores of this machine with so much memory per rank."""
    host = profiled(CLUSTERS["cpu"], profile)
    return replace(host, device=replace(host.device, memory=int(memory_gb * GIB)))


def search_of(config: Config, host: Cluster) -> Search:
    request = Request(sequence_length=config.model.seq_length)
    return Search(FormulaChain(config, host), request, host)


def layouts(search: Search, ranks: int) -> list[tuple[Choice, float]]:
    """Every layout that fits, and its predicted seconds."""
    space = search.space(ranks, [BATCH], {})
    found = []
    for layer in space.layers():
        units = len(search.model.units(layer, 1, False, False))
        for degrees in space.degrees(layer, units):
            for choice in space.choices(degrees, units):
                try:
                    made = search.plan(choice, degrees.dp, degrees.microbatches)
                except MerakError:
                    continue
                found.append((choice, made.predicted_time))
    return found


def measure(
    rank: int, ranks: int, config: Config, host: Cluster, choices: list[Choice], steps: int
) -> list[float]:
    """Return this rank's seconds of a step of each layout: the median, after one to warm up."""
    meshes = {}
    traced = {}  # by samples of a micro-batch
    seconds = []
    for choice in choices:
        own = applied(config, choice)
        made = plan(own, ranks, host)
        key: Grid = made.grid
        if key not in meshes:
            meshes[key] = build_mesh(key, rank, CPU)
        mesh = meshes[key]
        if choice.mb not in traced:
            traced[choice.mb] = traced_gpt(own)
        blueprint = by_formulas(traced[choice.mb], own, made)
        trainer = Trainer(own, GPTModel(blueprint, own, mesh))
        batches = _batches(config, choice.mb, made.num_microbatches)
        times = []
        for _ in range(steps + 1):
            dist.barrier()
            began = time.perf_counter()
            trainer.step(batches)
            dist.barrier()
            times.append(time.perf_counter() - began)
        seconds.append(median(times[1:]))
    return seconds


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


def report(
    chosen: Choice, rows: Sequence[tuple[Choice, float, float]], shown: int = 5
) -> list[str]:
    """Return the table of the fastest layouts and the chosen one. rows: (layout, predicted
    seconds, measured ones).
    """
    ranked = sorted(rows, key=lambda row: row[2])
    own = next(place for place, row in enumerate(ranked) if row[0] == chosen)
    table = [("place", "layout", "predicted", "measured", "beside the best")]
    for place in dict.fromkeys([*range(min(shown, len(ranked))), own]):
        choice, predicted, measured = ranked[place]
        apart = f"{measured / ranked[0][2] - 1:+.1%}"
        mark = "chosen: " if place == own else ""
        texts = (time_text(predicted), time_text(measured), apart)
        table.append((str(place + 1), f"{mark}{choice}", *texts))
    regret = ranked[own][2] / ranked[0][2] - 1
    return [*align(table, (1,)), f"regret {regret:.1%} over {len(rows)} layouts"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the job (4)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (4)")
    parser.add_argument("--hidden", type=int, default=256, help="its width (256)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample (128)")
    parser.add_argument("--memory-gb", type=float, default=2.0, help="memory of a rank (2)")
    parser.add_argument("--profile", default=None, help="device profile of benchmarks/calibrate.py")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each layout (5)")
    parser.add_argument("--every", type=int, default=1, help="measure one in so many layouts (1)")
    arguments = parser.parse_args()
    prepare("megatron_merak.training.gpt_blueprint")
    config = configuration(arguments.layers, arguments.hidden, arguments.length)
    host = cluster(arguments.memory_gb, arguments.profile)
    search = search_of(config, host)
    best = search.run(arguments.ranks, [BATCH], {}).best
    assert best is not None, "nothing fits: give more --memory-gb"
    every = layouts(search, arguments.ranks)
    some = [
        pair
        for index, pair in enumerate(every)
        if index % arguments.every == 0 or pair[0] == best.choice
    ]
    choices = [choice for choice, _ in some]
    own = (config, host, choices, arguments.steps)
    measured = run_ranks(measure, arguments.ranks, *own, timeout=60.0 * len(choices))
    longest = [max(seconds) for seconds in zip(*measured, strict=True)]
    rows = [(*pair, seconds) for pair, seconds in zip(some, longest, strict=True)]
    print("\n".join(report(best.choice, rows)))
    return 0

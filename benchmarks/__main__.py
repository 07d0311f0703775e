"""Starts a benchmark by its name: ``python -m benchmarks NAME --help``."""

import difflib
import importlib
import signal
import sys
from typing import NamedTuple


class Benchmark(NamedTuple):
    """Where a benchmark's ``main`` is, below benchmarks, and what it shows."""

    module: str
    help: str


BENCHMARKS = {
    "step": Benchmark("step.step", "one training step beside other ways to run it (1 hour)"),
    "two_lines": Benchmark(
        "trainers.two_lines", "one script through Trainer and MerakTrainer, as shipped (40 min)"
    ),
    "data_parallel": Benchmark(
        "trainers.data_parallel", "ways to train on two replicas: speed, memory (20 min)"
    ),
    "experts": Benchmark(
        "trainers.experts", "mixtures on two ranks, beside transformers' own parallelism (25 min)"
    ),
    "packing": Benchmark(
        "trainers.packing", "documents in padded rows and packed in one row (5 min)"
    ),
    "trl_sft": Benchmark(
        "trainers.trl_sft", "TRL's SFTTrainer, and the same over MerakTrainer (10 min)"
    ),
    "ops": Benchmark(
        "kernels.ops", "compiled operations beside PyTorch's and torch.compile's (5 min)"
    ),
    "performance": Benchmark(
        "kernels.performance", "a step with and without compiled kernels (30 min)"
    ),
    "shared_memory": Benchmark(
        "kernels.shared_memory", "collectives beside gloo, alone and in a step (3 min)"
    ),
    "host": Benchmark(
        "kernels.host", "compiled index builders, simulator and search beside their twins (2 min)"
    ),
    "schedules": Benchmark(
        "schedules.schedules", "every schedule: formula, simulated, measured (70 min)"
    ),
    "unflushed": Benchmark(
        "schedules.unflushed", "schedules that update weights without a flush, modelled (1 s)"
    ),
    "search": Benchmark(
        "schedules.search", "searched schedules beside bounds and builders (2 min)"
    ),
    "regret": Benchmark(
        "planner.regret", "the plan of a search beside all layouts, emulated or measured (hours)"
    ),
    "overlap": Benchmark("overlap.overlap", "tensor-parallel communication left exposed (10 min)"),
    "recompute": Benchmark(
        "modelled.recompute", "recomputing no more than necessary, modelled (2 min)"
    ),
    "calibrate": Benchmark(
        "modelled.calibrate", "the planner's predictions beside published steps (2 min)"
    ),
    "paper": Benchmark("modelled.paper", "Merak's paper on modelled clusters (5 min)"),
    "crossing": Benchmark(
        "modelled.crossing", "where techniques of Merak's paper cross, modelled (1 min)"
    ),
    "data_parallel_modelled": Benchmark(
        "modelled.data_parallel", "what replicas share of a Llama, modelled (1 min)"
    ),
    "targets": Benchmark(
        "modelled.targets", "large mixtures and long sequences on H100s, modelled (2 min)"
    ),
    "servers": Benchmark(
        "servers.parameter_server", "parameter servers beside all-reduce, modelled (3 min)"
    ),
    "servers_measured": Benchmark(
        "servers.measured", "parameter servers beside all-reduce, measured (15 min)"
    ),
    "preprocess": Benchmark(
        "data.preprocess", "text to indexed datasets beside megatron-core's parts (4 min)"
    ),
    "saves": Benchmark(
        "checkpoints.saves", "checkpoints beside torch's and transformers' (15 min)"
    ),
    "elastic": Benchmark(
        "checkpoints.elastic", "runs resumed under other layouts: samples, state, losses (10 min)"
    ),
    "increments": Benchmark(
        "checkpoints.increments", "every step written: what it costs, and gives back (15 min)"
    ),
    "reliability": Benchmark(
        "faults.reliability", "the same faults here and in other programs (20 min)"
    ),
}


def listing() -> str:
    width = max(map(len, BENCHMARKS))
    lines = (f"  {name:{width}s}  {benchmark.help}" for name, benchmark in BENCHMARKS.items())
    return "\n".join(["python -m benchmarks NAME [--help | arguments]", "", *lines])


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *arguments = argv
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, 1, 0.0)[0]
        print(
            f"no benchmark is called {name}; the nearest is {near}. python -m benchmarks lists them",
            file=sys.stderr,
        )
        return 2
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    return importlib.import_module(f"benchmarks.{BENCHMARKS[name].module}").main() or 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended too
    sys.exit(main(sys.argv[1:]))

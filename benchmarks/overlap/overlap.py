"""How much tensor-parallel communication stays exposed: blocking, behind weight gradients, halves, pairs.

    python -m benchmarks overlap              # everything, into docs/evidence/overlap.md; 5 minutes, wants quiet
    python -m benchmarks overlap --modelled   # prints all that no other work on the machine can disturb
    python -m benchmarks overlap --quick      # prints one link and one short repeat: does it all still run?

The measured half needs Linux and the right to make network namespaces (root, or user namespaces); else it says that it
was skipped.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import EVIDENCE
from benchmarks.overlap import shaped
from benchmarks.overlap.page import Outcome, Outcomes, Wall, page
from benchmarks.schedules import worlds

PAGE = EVIDENCE / "overlap.md"
PROGRAM = Path(__file__).resolve().with_name("wall.py")
BANDWIDTHS = (200e9, 20e9, 15e9, 5.5e9)  # bytes per second
RATE = 1e9  # bits per second of the real link


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modelled", action="store_true", help="leave out what is measured")
    parser.add_argument("--quick", action="store_true", help="one link, one short repeat")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each kind (5)")
    parser.add_argument(
        "--forward-ms",
        type=float,
        default=30.0,
        help="forward of half a layer where kernels sleep (30)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page here")
    return parser.parse_args(argv)


def model(bandwidths: Sequence[float]) -> tuple[dict[str, Outcomes], float]:
    """By link; and the largest relative distance of a gradient from the blocking run's."""
    from benchmarks.overlap.modelled import RANKS, run

    links: dict[str, Outcomes] = {f"{bandwidth / 1e9:g} GB/s": {} for bandwidth in bandwidths}
    distances = []

    def done(job: worlds.Job, ranks: list) -> str:
        links[job.name] = {key: Outcome.modelled(one.accounts) for key, one in ranks[0].items()}
        blocking = ranks[0]["none", False].gradient
        distances.extend(_distance(one.gradient, blocking) for one in ranks[0].values())
        return "modelled"

    jobs = [
        worlds.Job(name, run, RANKS, (bandwidth,), 15)
        for name, bandwidth in zip(links, bandwidths, strict=True)
    ]
    worlds.run_jobs(jobs, 1, done)
    return links, max(distances)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    square = sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return (square / sum(b * b for b in other)) ** 0.5


def measure(repeats: int, forward: float, layers: int) -> Wall:
    """Over the real link, where there can be one."""
    from benchmarks.overlap.wall import Bench, predict

    if reason := shaped.missing(RATE):
        return Wall({}, {}, "", f"this machine lends no network namespaces ({reason})")
    print(f"measuring {repeats} rounds over {RATE / 1e9:g} Gbit/s", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        bench = {"store": f"{folder}/store", "results": f"{folder}/results"}
        bench |= {"repeats": repeats, "forward": forward, "layers": layers}
        limit = 60 + (repeats + 1) * layers * (2 * forward + 0.05) * 100
        shaped.run_on_hosts(RATE, PROGRAM, [json.dumps(bench)], limit)
        ranks = [json.loads(Path(f"{folder}/results.{rank}").read_text()) for rank in (0, 1)]
    _check(ranks[0]["runs"])
    told = ranks[0]["bench"]
    description = (
        f"{told['layers']} layers; messages of {told['rows'] * told['width'] * 4 / 2**20:g} MiB; half a layer takes "
        f"{1e3 * forward:g} ms forward, as much for the gradient of its input and as much for that of its weight. "
        f"Medians of {repeats}. Exposed is what a phase takes longer than without communication, at the same kernels."
    )
    wall = Wall.of([rank["runs"] for rank in ranks], description)
    (predicted, _) = worlds.run_ranks(predict, 2, Bench(**told), wall.compute[True])
    return replace(wall, predicted=predicted)


def _check(runs: Sequence[dict]) -> None:
    """All ways to the same gradients, but for the run that leaves communication out."""
    found = [run["gradient"] for run in runs if run["mode"] != "compute"]
    if max(found) - min(found) > 1e-5 * max(found):
        raise AssertionError(
            f"gradients differ between the ways of overlap: norms {min(found)} to {max(found)}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    worlds.prepare("benchmarks.overlap.modelled")
    links, distance = model(BANDWIDTHS[1:2] if options.quick else BANDWIDTHS)
    if options.modelled:
        wall = Wall({}, {}, "", "only the modelled half was asked for")
    elif options.quick:
        wall = measure(1, 0.005, 2)
    else:
        wall = measure(options.repeats, options.forward_ms / 1e3, 8)
    text = page(links, distance, wall)
    if out := options.out or (None if options.quick or options.modelled else PAGE):
        out.write_text(text, encoding="utf-8")
        print(f"written: {out}", file=sys.stderr)
    else:
        print(text)
    return 0

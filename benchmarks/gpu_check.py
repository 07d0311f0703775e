"""What benchmarks/gpu_session.py asks first: what is here, how fast are copies and products, is
every kernel right?

    python benchmarks/gpu_check.py start|rates|profile|kernels --device cuda|cpu --into FILE

FILE is a JSON object; its "figure" is one line. A kernel that is wrong makes the status 1.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from gpu_cases import CASES, MORE, Inputs, Sizes, tensors_of
from gpu_rows import SEQUENCE, SHAPES, tiny
from gpu_stopwatch import card, device_name, versions, write
from torch import Tensor

from megatron_merak.cluster import AttentionRate
from megatron_merak.parallel.launch import World, launch
from megatron_merak.parallel.nodes import Nodes
from megatron_merak.probe.attention import by_kernel
from megatron_merak.probe.measure import copy_speed, probe
from megatron_merak.probe.shapes import ModelShape

KERNELS = Sizes(
    tokens=256,
    hidden=4096,
    ffn=11008,
    vocabulary=32000,
    sequence=128,
    heads=8,
    head_dim=128,
    parameters=1 << 20,
)
KERNEL_TOLERANCE = 2**-6  # of the largest value, bf16
_SECONDS = 8.0  # of the probe
_EACH = 0.15  # of one of torch's kernels of attention, forward or backward


# ---- what is here
def start(device: torch.device) -> dict:
    """Versions, card and clocks, and which extensions are active."""
    from megatron_merak._native import host_problem
    from megatron_merak.ops import PROBLEMS

    wanted = ("_ops_cpu",) if torch.version.cuda is None else ("_ops_cpu", "_ops_cuda")
    problems = {name: PROBLEMS[name] for name in wanted} | {"_C": host_problem()}
    wrong = [f"{name} is not used: {why}" for name, why in problems.items() if why]
    found = {
        "card": card(device),
        "versions": versions(),
        "extensions": not wrong,
        "problems": wrong,
    }
    name = found["card"]["name"]
    state = f"{'; '.join(wrong)}: all goes on with MERAK_EXT=0" if wrong else "extensions loaded"
    return found | {"figure": f"{name}, torch {torch.__version__}, {state}"}


# ---- rates
def rates(world: World, into: Path, models: tuple[str, ...]) -> dict:
    """Of copies, products and attention; the profile that the planner reads is beside ``into``."""
    device = world.device
    shapes = [_shape(name, device.type == "cpu") for name in models]
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    profile = probe(world, None, Nodes(), shapes=shapes, dtypes=(dtype,), seconds=_SECONDS)
    into.with_name("device_profile.json").write_text(profile.to_json(), encoding="utf-8")
    measured = profile.device.rates
    own = [{"way": "ours", **asdict(row)} for row in measured.attention]
    others = [
        {"way": way, "length": shape.length, "heads": shape.heads, **_told(rate)}
        for shape in shapes
        for way, rate in by_kernel(shape.attention, dtype, device, _EACH)
    ]
    ways = [row for row in (*own, *others) if "forward" in row]
    best = max(ways, key=lambda row: row["forward"] + row["backward"])
    product = max(row.forward for row in measured.products)
    copied = copy_speed(device)
    figure = f"copy {copied / 1e9:.0f} GB/s, product {product / 1e12:.4g} TFLOP/s, attention "
    figure += f"{best['forward'] / 1e12:.4g} and {best['backward'] / 1e12:.4g} ({best['way']})"
    return {
        "figure": figure,
        "table": [asdict(row) for row in measured.products],
        "copy": copied,
        "attention": [*own, *others],
    }


def _told(rate: AttentionRate | str) -> dict:
    return asdict(rate) if isinstance(rate, AttentionRate) else {"problem": rate}


def _shape(name: str, small: bool) -> ModelShape:
    model = tiny(SHAPES[name]) if small else SHAPES[name]
    tokens = 64 if small else SEQUENCE
    return ModelShape(
        tokens,
        model.hidden,
        model.heads,
        groups=model.groups,
        ffn=model.ffn,
        vocabulary=model.vocabulary,
        length=tokens,
    )


# ---- kernels
def kernels(device: torch.device) -> dict:
    """Every operation once on the device, and once on the CPU."""
    from megatron_merak.ops import PROBLEMS

    problem = PROBLEMS["_ops_cuda"] if device.type == "cuda" else ""
    makers = {case.op: case.make for case in CASES if case.registered} | MORE
    far: dict[str, float] = {}
    for op, make in makers.items():
        ours = make(Inputs(KERNELS, torch.device("cpu")))
        there = tuple(
            value.to(device, copy=True) if isinstance(value, Tensor) else value for value in ours
        )
        run = getattr(torch.ops.merak, op)
        pairs = zip(tensors_of(run(*there)), tensors_of(run(*ours)), strict=True)
        far[op] = max(
            _off(a, b) for a, b in (*pairs, *zip(tensors_of(there), tensors_of(ours), strict=True))
        )
    worst = max(far, key=far.__getitem__)
    wrong = [op for op, off in far.items() if not off <= KERNEL_TOLERANCE]
    figure = f"{len(far)} operations, worst {worst}: {far[worst]:.1e} of the largest value"
    figure += f"; WRONG: {', '.join(wrong)}" if wrong else ""
    figure += f"; by PyTorch's own operations: {problem}" if problem else ""
    return {"figure": figure, "off": far, "wrong": wrong}


def _off(a: Tensor, b: Tensor) -> float:
    """Largest difference, of the largest value. Not a number where one of them is not."""
    a, b = a.cpu().double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("start", "rates", "profile", "kernels"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    world = launch(use_cpu=given.device == "cpu")  # with a job's precision of fp32 products
    device = world.device
    ways: dict[str, Callable[[], dict]] = {
        "start": lambda: start(device),
        "rates": lambda: rates(world, given.into, ("7b",)),
        "profile": lambda: rates(world, given.into, ("7b", "1.7b", "8b")),
        "kernels": lambda: kernels(device),
    }
    found = ways[given.what]() | {"device": device_name(device)}
    write(given.into, found)
    print(found["figure"])
    return int(bool(found.get("wrong")))


if __name__ == "__main__":
    sys.exit(main())

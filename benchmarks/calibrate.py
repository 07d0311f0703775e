"""How fast this device computes the products and the attention of training, and copies; into a file that plans read.

    python benchmarks/calibrate.py --into FILE                  # the shapes of 1.7B, Llama-2-7B and Llama-3.1-8B
    python benchmarks/calibrate.py --into FILE --device cpu --dtype float32 --shape 256:512:8:8:1376:32000
    python tools/plan.py show --device-profile FILE ...         # and pretrain_gpt.py, pretrain_hf.py, MerakArguments

A linear layer's three products (of the output, of the input's gradient, of the weight's gradient) are timed at every
shape of every model, causal attention forward and backward by the kernel that training takes and by each of torch's by
its name, and the copy of a large tensor. On a GPU medians between events; on a CPU the least time of the processor, in
one thread, since others may be at work. --shape TOKENS:HIDDEN:HEADS:GROUPS:FFN:VOCABULARY is a model of your own.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from gpu_rows import SEQUENCE, SHAPES, tiny
from gpu_stopwatch import device_name
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_merak.cluster import AttentionRate, Device, ProductRate, Profile, Rates, find_device
from megatron_merak.errors import MerakError
from megatron_merak.ops import causal_attention
from megatron_merak.parallel.launch import launch

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SECONDS = 0.15  # that the calls of one measurement take together
FEWEST, MOST = 5, {"cuda": 30, "cpu": 300}  # calls
DISPATCH = 1000  # calls whose start is timed
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Measured:
    """Tokens of a micro-batch, and the widths of the model that they go through."""

    tokens: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """(m, n, k) of the products; those of query, key and value are one here, and those of gate
        and up.
        """
        keys = self.hidden // self.heads * self.groups
        sides = [
            (self.hidden + 2 * keys, self.hidden),
            (self.hidden, self.hidden),
            (2 * self.ffn, self.hidden),
        ]
        sides += [(self.hidden, self.ffn), (self.vocabulary, self.hidden), (self.ffn, self.hidden)]
        return [(self.tokens, *side) for side in sides]


MODELS = ("7b", "1.7b", "8b")


def shapes_of(
    texts: list[str], on_cpu: bool, small: bool, names: Sequence[str] = MODELS
) -> list[Measured]:
    """What is measured. Raises SystemExit for a text that is no shape."""
    if texts:
        try:
            return [Measured(*map(int, text.split(":"))) for text in texts]
        except (TypeError, ValueError):
            form = "TOKENS:HIDDEN:HEADS:GROUPS:FFN:VOCABULARY"
            raise SystemExit(
                f"calibrate.py: --shape {texts}: it is no shape. Give {form}."
            ) from None
    models = [SHAPES[name] for name in names]
    if small:
        models = [tiny(model) for model in models]
    elif on_cpu:
        raise SystemExit(
            "calibrate.py: --shape: a CPU would take minutes for 7B. Give the shapes of your model, or --tiny"
        )
    tokens = 64 if small else SEQUENCE
    return [
        Measured(
            tokens=tokens,
            hidden=one.hidden,
            heads=one.heads,
            groups=one.groups,
            ffn=one.ffn,
            vocabulary=one.vocabulary,
        )
        for one in models
    ]


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: the median between events on a GPU; the least of the processor's time
    on a CPU.
    """
    began = time.perf_counter()
    for _ in range(2):
        call()
        _wait(device)
    each = (time.perf_counter() - began) / 2
    calls = min(max(int(SECONDS / max(each, 1e-7)), FEWEST), MOST[device.type])
    if device.type == "cuda":
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(calls)
        ]
        for start, stop in events:
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize(device)
        return median(start.elapsed_time(stop) for start, stop in events) / 1e3
    times = []
    for _ in range(calls):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_rate(m: int, n: int, k: int, dtype: str, device: torch.device) -> ProductRate:
    made = {"device": device, "dtype": DTYPES[dtype]}
    x = torch.randn(m, k, **made)
    weight = torch.randn(n, k, **made)
    grad = torch.randn(m, n, **made)
    calls = (lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x)
    forward, input_gradient, weight_gradient = (
        2 * m * n * k / seconds_of(call, device) for call in calls
    )
    return ProductRate(
        m,
        n,
        k,
        dtype,
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
    )


def attention_rates(
    shape: Measured, dtype: str, device: torch.device
) -> Iterator[tuple[str, AttentionRate | str]]:
    """By the way that training goes ("ours"), and by each kernel of torch's that takes these
    operands on a GPU.
    """
    dim = shape.hidden // shape.heads
    made = {"device": device, "dtype": DTYPES[dtype], "requires_grad": True}
    query = torch.randn(1, shape.tokens, shape.heads, dim, **made)
    key, value = (torch.randn(1, shape.tokens, shape.groups, dim, **made) for _ in range(2))
    flops = 2 * shape.tokens**2 * shape.hidden

    def rate(attend: Callable[[], Tensor]) -> AttentionRate:
        made = attend()
        grad = torch.randn_like(made)
        back = seconds_of(
            lambda: torch.autograd.grad(made, (query, key, value), grad, retain_graph=True), device
        )
        return AttentionRate(flops, dtype, flops / seconds_of(attend, device), 2 * flops / back)

    def by_torch() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            *heads_first, is_causal=True, enable_gqa=shape.groups < shape.heads
        )

    yield "ours", rate(lambda: causal_attention(query, key, value))
    for name, backend in BACKENDS.items() if device.type == "cuda" else ():
        try:
            with sdpa_kernel(backend):
                yield name, rate(by_torch)
        except RuntimeError as error:
            yield name, str(error).strip().splitlines()[0][:200]


def copy_speed(device: torch.device, small: bool) -> float:
    """Bytes per second, read and written, by the copy of a tensor that no cache holds."""
    source = torch.ones(
        1 << (24 if small else 27 if device.type == "cpu" else 30), dtype=torch.uint8, device=device
    )
    into = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: into.copy_(source), device)


def dispatch_seconds(device: torch.device) -> float:
    """Of starting one small operation on a CPU; on a GPU the host runs ahead, so none."""
    if device.type == "cuda":
        return 0.0
    x, y = torch.zeros(8), torch.zeros(8)
    best = float("inf")
    for _ in range(5):
        began = time.process_time()
        for _ in range(DISPATCH):
            torch.add(x, y)
        best = min(best, (time.process_time() - began) / DISPATCH)
    return best


def known(name: str) -> Device:
    """The table's row of a device. Raises SystemExit where there is none."""
    try:
        return find_device(name)
    except MerakError as error:
        raise SystemExit(f"calibrate.py: {error}") from None


def calibrate(
    shapes: list[Measured], dtype: str, device: torch.device, small: bool
) -> tuple[Profile, dict]:
    """The profile, and what of attention it does not hold: other kernels, or why they do
    not run.
    """
    name, base = device_name(device), known(device_name(device))
    sides = list(dict.fromkeys(side for shape in shapes for side in shape.products))
    products = tuple(product_rate(*side, dtype, device) for side in sides)
    attention, others = [], []
    for shape in {(s.tokens, s.hidden, s.heads, s.groups): s for s in shapes}.values():
        for way, rate in attention_rates(shape, dtype, device):
            attention += [rate] if way == "ours" else []
            told = asdict(rate) if isinstance(rate, AttentionRate) else {"problem": rate}
            others.append(
                {
                    "way": way,
                    "tokens": shape.tokens,
                    "heads": shape.heads,
                    "groups": shape.groups,
                    **told,
                }
            )
    best = max(row.forward for row in products) / base.flops(dtype)
    # the table's CPU is another one
    peaks = {f"{dtype}_flops": base.flops(dtype) * best} if best > 1 else {}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    source = f"{name}, {now}, torch {torch.__version__}"
    measured = replace(
        base,
        memory_bandwidth=copy_speed(device, small),
        matmul_efficiency=min(best, 1.0),
        dispatch=dispatch_seconds(device),
        rates=Rates(products, tuple(attention), source),
        **peaks,
    )
    return Profile(measured, name, now, torch.__version__), {"attention": others}


def told(profile: Profile, others: dict) -> str:
    lines = [
        f"{profile.device.rates.source}: copies {profile.device.memory_bandwidth / 1e9:.4g} GB/s",
        "",
    ]
    lines += [
        "| m x n x k | output | gradient of input | of weight, TFLOP/s |",
        "|---|--:|--:|--:|",
    ]
    for row in profile.device.rates.products:
        rates = (row.forward, row.input_gradient, row.weight_gradient)
        lines.append(
            f"| {row.m} x {row.n} x {row.k} | {' | '.join(f'{rate / 1e12:.4g}' for rate in rates)} |"
        )
    lines += [
        "",
        "| attention | tokens, heads, groups | forward | backward, TFLOP/s |",
        "|---|---|--:|--:|",
    ]
    for row in others["attention"]:
        rates = (
            f"{row['forward'] / 1e12:.4g} | {row['backward'] / 1e12:.4g}"
            if "forward" in row
            else row["problem"]
        )
        lines.append(
            f"| {row['way']} | {row['tokens']}, {row['heads']}, {row['groups']} | {rates} |"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="write the profile here, and FILE.attention.json beside",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="T:H:N:G:F:V", help="a model of your own"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: does it run?")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    given = parse(argv)
    if given.into is None:
        raise SystemExit("calibrate.py: --into: it is missing. Name the file to write.")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("calibrate.py: --device cuda: there is no GPU. Use --device cpu.")
    # set up as a job is: precision of fp32 products
    device = launch(use_cpu=given.device == "cpu").device
    if device.type == "cpu":
        torch.set_num_threads(1)
    shapes = shapes_of(given.shape, given.device == "cpu", given.tiny)
    profile, others = calibrate(shapes, given.dtype, device, given.tiny)
    given.into.parent.mkdir(parents=True, exist_ok=True)
    profile.to_json(given.into)
    given.into.with_suffix(".attention.json").write_text(
        json.dumps(others, indent=1) + "\n", encoding="utf-8"
    )
    print(told(profile, others))
    return 0


if __name__ == "__main__":
    sys.exit(main())

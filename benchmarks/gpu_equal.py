"""Does training on a GPU compute what it computes on a CPU? Losses and gradients of small models with wide layers.

    python benchmarks/gpu_equal.py gpt|captured --device cuda|cpu --into FILE [--kit DIR]
    python benchmarks/gpu_equal.py expected --kit DIR --into FILE     # for a kit: what gpt computes, on this CPU

FILE is a JSON object; its "figure" is one line. Beyond the limits the status is 1, and the distances are there too.
"""

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from gpu_rows import Shape
from gpu_steps import EXPECTED, TEXT
from gpu_stopwatch import device_name, versions, write
from gpu_worker import gpt_flags, hf_config, training_flags
from torch import Tensor

from megatron_merak.arguments import build_parser, read
from megatron_merak.config import Config, ParallelConfig
from megatron_merak.parallel.launch import launch
from megatron_merak.parallel.mesh import Mesh, build_mesh
from megatron_merak.plan import Grid
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.planner.request import Request
from megatron_merak.stages.blueprint import make_blueprint
from megatron_merak.stages.captured import CapturedModel
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.stages.traced import Traced
from megatron_merak.stages.trained_model import TrainedModel
from megatron_merak.training.gpt_blueprint import by_formulas
from megatron_merak.training.trainer import Trainer

# Wide enough for the kernels that a large model takes, and small enough for a CPU.
COMPARED = Shape("compared", layers=4, hidden=512, heads=4, groups=2, ffn=1408, vocabulary=1024)
SEQUENCE = 512
MICRO_BATCHES = 2
STEPS = 3
SKETCHED = 16  # sums with random signs that stand for a gradient
# Largest difference of losses; distance of all gradients, and of the worst tensor: |a - b| / |b|.
LIMITS = {"fp32": (1e-4, 1e-4, 1e-3), "bf16": (2e-2, 5e-2, 2e-1)}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def tokens_of(kit: Path | None) -> Tensor:
    """Bytes of the kit's text, [steps, micro-batches, sequence + 1]; where there is none, made-up
    ones.
    """
    shape = (STEPS, MICRO_BATCHES, SEQUENCE + 1)
    count = STEPS * MICRO_BATCHES * (SEQUENCE + 1)
    if kit is None:
        return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))
    return torch.tensor(list((kit / TEXT).read_bytes()[:count])).view(shape)


# ---- training of the GPT that flags describe
def gpt_run(dtype: str, device: torch.device, tokens: Tensor) -> dict:
    """The first loss and gradient, then the losses and norms of some steps."""
    flags = gpt_flags(COMPARED, SEQUENCE)
    flags += training_flags(COMPARED, SEQUENCE, MICRO_BATCHES, STEPS)
    if dtype == "fp32":
        flags.remove("--bf16")
    config, _ = read(build_parser("", Config), flags, Config)
    config = replace(config, model=replace(config.model, vocab_size=COMPARED.vocabulary))
    mesh = build_mesh(Grid(), 0, device)
    blueprint = by_formulas(traced_gpt(config, mesh), config, make_plan(config, 1))
    model = GPTModel(blueprint, config, mesh)
    trainer = Trainer(config, model)
    steps = [_samples(step) for step in tokens]
    first = model.gradients(model.from_samples(steps[0]))
    sketches = {name: sketch(name, tensor) for name, tensor in gradients_of(model)}
    reports = [trainer.step(batches) for batches in steps]
    losses = [first, *(report.loss for report in reports)]
    return {
        "losses": losses,
        "norms": [report.grad_norm for report in reports],
        "gradients": sketches,
    }


def _samples(rows: Tensor) -> list[dict[str, Tensor]]:
    """Each row as a micro-batch of one sample."""
    return [_sample(row[None]) for row in rows]


def _sample(row: Tensor) -> dict[str, Tensor]:
    positions = torch.arange(SEQUENCE)[None]
    mask = torch.ones(1, SEQUENCE)
    inputs, labels = row[:, :-1].contiguous(), row[:, 1:].contiguous()
    return {"tokens": inputs, "labels": labels, "loss_mask": mask, "position_ids": positions}


def gradients_of(model: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    """By HuggingFace's names, on the CPU, in fp32."""
    for shard in model.shards(model.buffer.main_grad):
        yield shard.name, shard.tensor.detach().float().cpu()


def sketch(name: str, tensor: Tensor) -> dict:
    """A tensor's norm, and its sums with random signs: of two tensors, these differ by as much as
    the tensors do.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    flat = tensor.flatten().double()
    sums = []
    for _ in range(SKETCHED):
        signs = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8)
        sums.append(float(flat @ signs.double().mul_(2).sub_(1)))
    return {"norm": float(torch.linalg.vector_norm(flat)), "sums": sums}


def sketched_distance(ours: dict, theirs: dict) -> tuple[float, float]:
    """Of all gradients, and of the worst tensor: |a - b| / |b|, estimated from sketches."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    squares = {
        name: sum(
            (a - b) ** 2 for a, b in zip(ours[name]["sums"], theirs[name]["sums"], strict=True)
        )
        / SKETCHED
        for name in theirs
    }
    total = sum(squares.values()) / sum(theirs[name]["norm"] ** 2 for name in theirs)
    worst = max(square / max(theirs[name]["norm"] ** 2, 1e-30) for name, square in squares.items())
    return total**0.5, worst**0.5


def gpt(device: torch.device, kit: Path | None) -> dict:
    """Training on the device beside what a CPU computed."""
    tokens = tokens_of(kit)
    on_cpu = json.loads((kit / EXPECTED).read_text(encoding="utf-8")) if kit else expected(None)
    found = {}
    for dtype in LIMITS:
        run = gpt_run(dtype, device, tokens)
        pairs = zip(run["losses"], on_cpu[dtype]["losses"], strict=True)
        loss = max(abs(a - b) for a, b in pairs)
        distances = (loss, *sketched_distance(run["gradients"], on_cpu[dtype]["gradients"]))
        found[dtype] = {"distances": distances, "losses": run["losses"], "norms": run["norms"]}
    return _judged(found)


def _judged(found: dict[str, dict]) -> dict:
    """With a figure, and what is beyond its limit."""
    figures, wrong = [], []
    for dtype, one in found.items():
        loss, gradient, tensor = one["distances"]
        figures.append(
            f"{dtype} loss {loss:.1e}, gradient {gradient:.1e}, worst tensor {tensor:.1e}"
        )
        if not all(
            value <= most for value, most in zip(one["distances"], LIMITS[dtype], strict=True)
        ):
            wrong.append(dtype)
    figure = "; ".join(figures) + (f"; WRONG: {', '.join(wrong)}" if wrong else "")
    return {"figure": figure, "wrong": wrong, **found}


# ---- training of a HuggingFace model
def captured(device: torch.device, kit: Path | None) -> dict:
    """One step of a captured Llama beside the same model run eagerly on the same device."""
    tokens = tokens_of(kit)[0, :, :-1].to(device)
    batches = [{"input_ids": row[None], "labels": row[None]} for row in tokens]
    return _judged({dtype: _captured(dtype, device, batches) for dtype in LIMITS})


def _captured(dtype: str, device: torch.device, batches: list[dict[str, Tensor]]) -> dict:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    kind = getattr(torch, DTYPES[dtype])
    model = AutoModelForCausalLM.from_config(hf_config(COMPARED, SEQUENCE), dtype=torch.float32)
    mesh = build_mesh(Grid(), 0, device)
    ours = _engine(model, batches, DTYPES[dtype], mesh)
    loss = ours.gradients(batches)
    found = dict(gradients_of(ours))
    eager = model.to(device, kind)
    losses = []
    for batch in batches:
        one = eager(**batch)["loss"]
        (one / len(batches)).backward()
        losses.append(float(one.detach()))
    theirs = {name: parameter.grad.float().cpu() for name, parameter in eager.named_parameters()}
    expected = sum(losses) / len(losses)
    squares = {name: float((found[name] - theirs[name]).double().square().sum()) for name in theirs}
    norms = {name: max(float(theirs[name].double().square().sum()), 1e-30) for name in theirs}
    gradient = (sum(squares.values()) / sum(norms.values())) ** 0.5
    worst = max(squares[name] / norms[name] for name in theirs) ** 0.5
    return {"distances": (abs(loss - expected), gradient, worst), "losses": (loss, expected)}


def _engine(
    model: torch.nn.Module, batches: list[dict[str, Tensor]], dtype: str, mesh: Mesh
) -> CapturedModel:
    traced = Traced(model, batches[0], dtype, ranks=mesh)
    degrees = ParallelConfig(
        tensor_model_parallel_size=mesh.grid.tp, pipeline_model_parallel_size=mesh.grid.pp
    )
    request = Request(
        parallel=degrees, replicas=mesh.grid.dp, microbatches=len(batches), graph_sharding="cut"
    )
    return CapturedModel(make_blueprint(traced, request), mesh)


# ---- for the kit
def expected(kit: Path | None) -> dict:
    """What `gpt` compares with."""
    tokens = tokens_of(kit)
    runs = {dtype: gpt_run(dtype, torch.device("cpu"), tokens) for dtype in LIMITS}
    return runs | {"versions": versions(), "figure": f"losses {runs['fp32']['losses']}"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("gpt", "captured", "expected"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--into", type=Path, required=True, metavar="FILE")
    parser.add_argument("--kit", default="", metavar="DIR", help="what make gpu-kit made")
    given = parser.parse_args()
    kit = Path(given.kit) if given.kit else None
    # with a job's precision
    device = launch(use_cpu=given.device == "cpu" or given.what == "expected").device
    ways: dict[str, Callable[[], dict]] = {
        "gpt": lambda: gpt(device, kit),
        "captured": lambda: captured(device, kit),
        "expected": lambda: expected(kit),
    }
    found = ways[given.what]() | {"device": device_name(device)}
    write(given.into, found)
    print(found["figure"])
    return int(bool(found.get("wrong")))


if __name__ == "__main__":
    sys.exit(main())

"""What one tensor-parallel rank does on the modelled clock: forward, recomputation and backward, by
way of overlap.

The model is a Llama ``scale`` (16) times smaller than the one that is modelled in every extent but
layers, samples and heads. Its matrix products then have scale^3 times fewer operations, and its
tensors, weights, logits and messages scale^2 times fewer bytes: a device with scale^3 times fewer
FLOP/s, whose links and memory have scale^2 times fewer bytes/s, takes the same times.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_merak.cluster import Cluster, Device, Link
from megatron_merak.config import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from megatron_merak.parallel.clock import Account, LogicalClock
from megatron_merak.parallel.emulated import register
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.plan import Grid
from megatron_merak.planner.make import plan as make_plan
from megatron_merak.runtime.engine import execute
from megatron_merak.runtime.halves import halve
from megatron_merak.runtime.program import LOSS
from megatron_merak.runtime.stage import Stage
from megatron_merak.stages.gpt_model import GPTModel, traced_gpt
from megatron_merak.training.gpt_blueprint import by_formulas

SCALE = 16
RANKS = 2
LAYERS = 8
HIDDEN = 4096
FFN = 11008
HEADS = 32
SEQUENCE = 2048
BATCH = 8
VOCABULARY = 32000
FLOPS = 156e12  # half an A100's, as large kernels reach them
MEMORY_BANDWIDTH = 1.5e12
LATENCY = 5e-6
MODES = ("none", "weight-gradient", "sub-pipeline", "pair")


@dataclass(frozen=True)
class Phases:
    """Seconds of one micro-batch by phase, ``F``, ``R``, ``B``, or ``F|B`` where two of them run
    together.
    """

    accounts: dict[str, Account]
    gradient: list[float]


def cluster(bandwidth: float, scale: int) -> Cluster:
    """A node whose ranks are joined by links of so many bytes per second, everything
    scaled down.
    """
    flops, bytes_ = FLOPS / scale**3, 1 / scale**2
    device = Device(
        "half an A100",
        bfloat16_flops=flops,
        float32_flops=flops,
        memory_bandwidth=MEMORY_BANDWIDTH * bytes_,
        memory=0,
        matmul_efficiency=1.0,
    )
    link = Link(f"{bandwidth / 1e9:g} GB/s", LATENCY, bandwidth * bytes_)
    return Cluster(device, ranks_per_node=RANKS, inside=link, between=link, name=link.name)


def config(mode: str, recompute: bool, scale: int) -> Config:
    model = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN // scale,
        ffn_hidden_size=FFN // scale,
        num_attention_heads=HEADS,
        seq_length=SEQUENCE // scale,
        vocab_size=VOCABULARY // scale,
        make_vocab_size_divisible_by=1,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    parallel = ParallelConfig(
        tensor_model_parallel_size=RANKS,
        tp_comm_overlap=mode,
        recompute_granularity="full" if recompute else None,
    )
    train = TrainConfig(
        micro_batch_size=BATCH, global_batch_size=2 * BATCH, train_iters=1, bf16=True
    )
    return Config(model=model, parallel=parallel, train=train, data=DataConfig(mock_data=True))


def batches(scale: int) -> list[dict[str, Tensor]]:
    """Two micro-batches."""
    generator = torch.Generator().manual_seed(1)
    length = SEQUENCE // scale
    ids = torch.randint(0, VOCABULARY // scale, (2 * BATCH, length + 1), generator=generator)
    whole = {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "loss_mask": torch.ones(2 * BATCH, length),
        "position_ids": torch.arange(length).repeat(2 * BATCH, 1),
    }
    return [
        {name: value[k * BATCH : (k + 1) * BATCH] for name, value in whole.items()} for k in (0, 1)
    ]


def run(
    rank: int, world_size: int, bandwidth: float, scale: int = SCALE
) -> dict[tuple[str, bool], Phases]:
    """Every mode, without and with recomputation."""
    clock = LogicalClock(cluster(bandwidth, scale))
    register(clock)
    group = dist.new_group(list(range(world_size)), backend="emu")
    mesh = Mesh(
        Grid(tp=world_size),
        rank,
        torch.device("cpu"),
        tp=group,
        control=dist.group.WORLD,
        clock=clock,
    )
    traced = traced_gpt(config(MODES[0], False, scale), mesh)
    data, found = batches(scale), {}
    for recompute in (False, True):
        for mode in MODES:
            made = config(mode, recompute, scale)
            plan = replace(make_plan(made, world_size), overlap=mode)
            blueprint = by_formulas(traced, made, plan)
            model = GPTModel(blueprint, made, mesh)
            samples = model.from_samples(data)
            if mode == "sub-pipeline":  # captured now, not on the clock
                model.admit(halve(samples[0]), True)
            model.parameters.start_step()
            with clock.kernels():
                accounts = _phases(
                    model.stages[0],
                    samples,
                    clock,
                    recompute=recompute,
                    paired=mode == "pair",
                )
            found[mode, recompute] = Phases(accounts, model.buffer.main_grad[::97].tolist())
    return found


def _phases(
    stage: Stage, data: list[dict[str, Tensor]], clock: LogicalClock, recompute: bool, paired: bool
) -> dict[str, Account]:
    """One micro-batch: forward, recomputation apart, backward; or the backward, with its
    recomputation, beside the forward of the second micro-batch.
    """
    stage.start_run(training=True)
    marks = [clock.account()]

    def over(*microbatches: int) -> None:
        for microbatch in microbatches:
            for part in stage.parts[microbatch]:
                part.take(LOSS)
        marks.append(clock.account())

    stage.begin(0, data[0], 0, True)
    execute(stage.forward(0))
    over(0)
    if recompute and not paired:
        execute(stage.recomputation(0))
        over()
    scale = 1 / stage.count(0).clamp(min=1)
    beside = []
    if paired:
        stage.begin(1, data[1], 0, True)
        beside = stage.forward(1)
    execute([*beside, *stage.backward(0, scale, defer=False, last=True)])
    over(*([1] if paired else []))
    stage.end(0)
    spans = [after - before for before, after in pairwise(marks)]
    return (
        {"F|B": spans[1]} if paired else dict(zip("FRB" if recompute else "FB", spans, strict=True))
    )

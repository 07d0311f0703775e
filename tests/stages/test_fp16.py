"""Captured models in fp16: the arithmetic of plain PyTorch with a loss scale, under every
layout.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_merak.config import OptimizerConfig, ParallelConfig
from megatron_merak.optimizer.loss_scale import LossScaler
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from megatron_merak.stages.trials import difference
from tests.engines import engine_of, step
from tests.graph.tiny import randomise, tiny
from tests.ranks import run_ranks
from tests.stages.test_captured import DECAY, RATE, micro_batches, part, parts_of

pytestmark = pytest.mark.long

CPU, HALF = torch.device("cpu"), torch.float16


class Small(nn.Module):
    """Operations that this library computes exactly as PyTorch does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(24, 32)

    def forward(self, input_ids, labels):
        logits = self.down(torch.tanh(self.up(self.embed(input_ids))))
        return {"loss": F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


def token_batches(count):
    """No token twice: gradients of its row would be added up in fp16 by PyTorch, and in
    fp32 here.
    """
    generator = torch.Generator().manual_seed(4)
    drawn = [
        [torch.randperm(32, generator=generator).view(4, 8) for _ in "ab"] for _ in range(count)
    ]
    return [{"input_ids": ids, "labels": labels} for ids, labels in drawn]


def by_hand(batches, scaler, steps):
    """fp16 weights, fp32 masters and sums of gradients, torch's AdamW: loss, norm and scale of
    every step, the masters behind it, and the gradient of the last one."""
    held, told = Small().half(), []
    masters = {name: nn.Parameter(p.detach().float()) for name, p in held.named_parameters()}
    groups = [
        {"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in masters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for _ in range(steps):
        sums, losses = {name: torch.zeros_like(p) for name, p in masters.items()}, []
        for batch in batches:
            held.zero_grad()
            losses.append(held(**batch)["loss"])
            (losses[-1] * (scaler.scale / len(batches))).backward()
            for name, parameter in held.named_parameters():
                sums[name] += parameter.grad
        grads = {name: total / scaler.scale for name, total in sums.items()}
        overflowed = not all(grad.isfinite().all() for grad in grads.values())
        scaler.update(overflowed)
        if not overflowed:
            for name, master in masters.items():
                master.grad = grads[name]
            optimizer.step()
            with torch.no_grad():
                for name, parameter in held.named_parameters():
                    parameter.copy_(masters[name])
        loss = (torch.stack(losses).sum() / len(batches)).item()
        told.append(
            (
                loss,
                overflowed,
                scaler.scale,
                {name: p.detach().clone() for name, p in masters.items()},
            )
        )
    return told, grads


def scaler(initial=2.0**24):
    return LossScaler(initial, 1.0, 3, 2)


def test_one_process_is_plain_pytorch_to_the_bit():
    batches, steps = token_batches(4), 16
    others = {"optimizer": OptimizerConfig(clip_grad=0.0), "scaler": scaler()}
    mesh = build_mesh(Grid(), 0, CPU)
    engine = engine_of(
        Small().half().float(), batches[0], mesh, dtype="float16", microbatches=4, others=others
    )
    told, grads = by_hand(batches, scaler(), steps)
    assert (
        sum(overflowed for _, overflowed, _, _ in told) > 3
        and len({scale for _, _, scale, _ in told[6:]}) > 1
    )
    for number, (loss, overflowed, scale, masters) in enumerate(told):
        result = step(engine, batches, RATE, DECAY)
        expected = (pytest.approx(loss, rel=1e-6), overflowed, scale)
        assert (result.loss, result.skipped, result.loss_scale) == expected, number
        for name, master in masters.items():
            assert torch.equal(engine.buffer.view(engine.optimizer.master, name), master), (
                number,
                name,
            )
    assert engine.iteration == steps and engine.optimizer.steps == sum(
        not overflowed for _, overflowed, _, _ in told
    )
    engine.optimizer.unscale()
    assert all(torch.equal(engine.buffer.grad(name), grad) for name, grad in grads.items())


def _engine(name, grid, rank, ways, options):
    real, _, batch = tiny(name, **options)
    degrees = {"tensor_model_parallel_size": grid.tp, "pipeline_model_parallel_size": grid.pp}
    wishes = {"microbatches": 4 // grid.dp, "parallel": ParallelConfig(**degrees, **ways)}
    others = {"optimizer": OptimizerConfig(clip_grad=1.0), "scaler": scaler(2.0**12)}
    model, mesh = randomise(real()), build_mesh(grid, rank, CPU)
    return engine_of(model, batch, mesh, dtype="float16", others=others, **wishes)


def _train(rank, world_size, name, grid, ways, options):
    torch.set_num_threads(1)
    engine = _engine(name, grid, rank, ways, options)
    mine = micro_batches(name)[engine.mesh.dp_rank :: grid.dp]
    engine.optimizer.scaler.scale = 2.0**40  # overflows somewhere; no rank takes the step
    before = engine.buffer.data.clone(), engine.optimizer.master.clone()
    reports = [step(engine, mine, RATE, DECAY) for _ in range(2)]
    assert all(report.skipped for report in reports) and engine.optimizer.scaler.scale == 2.0**39
    engine.parameters.gatherer.finish()
    assert torch.equal(engine.buffer.data, before[0]) and torch.equal(
        engine.optimizer.master, before[1]
    )
    engine.optimizer.scaler.load(None)
    loss = engine.gradients(mine)
    gatherer = engine.parameters.gatherer
    grads = parts_of(engine, gatherer.full(engine.buffer.own(engine.buffer.main_grad)))
    curve = [step(engine, mine, RATE, DECAY).loss for _ in range(4)]
    assert engine.optimizer.scaler.scale == 2.0**13, "grown behind three steps"
    return loss, grads, curve


def eager(name, options):
    """Loss and gradient of the fp16 model as HuggingFace made it."""
    real, _, _ = tiny(name, **options)
    model, batches = randomise(real()).half(), micro_batches(name)
    sums = {key: torch.zeros(p.shape) for key, p in model.named_parameters()}
    losses = []
    for batch in batches:
        model.zero_grad()
        losses.append(model(**batch)["loss"])
        (losses[-1] * (2.0**12 / len(batches))).backward()
        for key, parameter in model.named_parameters():
            sums[key] += 0 if parameter.grad is None else parameter.grad
    return torch.stack(losses).mean().item(), {key: total / 2.0**12 for key, total in sums.items()}


ZERO = {"use_distributed_optimizer": True}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
LAYOUTS = [
    ("llama", Grid(tp=2, pp=2), {"recompute_granularity": "full"}, {}),
    ("llama", Grid(dp=2), {}, {}),
    ("llama", Grid(dp=2), ZERO, {}),
    ("mixtral", Grid(pp=2), {"pipeline_schedule": "zb-h1"}, ROUTED),
    pytest.param("mixtral", Grid(tp=2, pp=2), ZERO, ROUTED, marks=pytest.mark.slow),
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "grid", "ways", "options"), LAYOUTS, ids=str)
def test_layouts_compute_what_the_fp16_model_computes(name, grid, ways, options):
    loss, expected = eager(name, options)
    scale = max(grad.abs().max().item() for grad in expected.values())
    for found, grads, curve in run_ranks(_train, grid.size, name, grid, ways, options, timeout=150):
        assert found == pytest.approx(loss, abs=5e-3) and curve[0] == found and curve[-1] < curve[0]
        for shard in grads:
            wanted = part(expected[shard.name], shard)
            torch.testing.assert_close(
                shard.tensor, wanted, rtol=2e-2, atol=4e-3 * scale, msg=shard.name
            )


def test_a_pipeline_equals_one_process():
    alone = _train(0, 1, "llama", Grid(), {}, {})
    staged = run_ranks(_train, 2, "llama", Grid(pp=2), {}, {}, timeout=100)
    full = {shard.name: shard.tensor for shard in alone[1]}
    for loss, grads, _ in staged:
        assert loss == alone[0]
        assert all(torch.equal(shard.tensor, full[shard.name]) for shard in grads)


def test_a_trial_finds_a_scale_of_its_own_and_leaves_the_runs():
    engine = _engine("llama", Grid(), 0, {}, {})
    moving = engine.optimizer.scaler
    moving.scale, moving.grown = 2.0**40, 2
    batch = micro_batches("llama")[0]
    assert difference(engine, batch, [dict(batch)]) == ""
    assert (moving.scale, moving.grown, moving.forgiven) == (2.0**40, 2, 0)
    assert difference(engine, batch, [micro_batches("llama")[1]]).startswith("the loss changes")


def test_the_scale_is_saved_with_the_training_state(tmp_path):
    engine = _engine("llama", Grid(), 0, {}, {})
    for _ in range(2):
        step(engine, micro_batches("llama"), RATE, DECAY)
    engine.save(tmp_path)
    other = _engine("llama", Grid(), 0, {}, {})
    other.load(tmp_path)
    assert (
        other.optimizer.scaler.state()
        == engine.optimizer.scaler.state()
        == {"scale": 4096.0, "grown": 2, "forgiven": 0}
    )
    ours, theirs = (step(each, micro_batches("llama"), RATE, DECAY) for each in (engine, other))
    assert ours == theirs and other.optimizer.scaler.scale == 2.0**13
    assert all(
        map(torch.equal, engine.optimizer.state().values(), other.optimizer.state().values())
    )

"""Captured models on a device against HuggingFace's on the CPU, in fp32: one rank, any device."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from megatron_merak import MerakArguments, MerakTrainer
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.plan import Grid
from tests.engines import engine_of, step
from tests.graph.tiny import randomise, tiny
from tests.hf_trainer.stand_in import collate, samples, tiny_llama
from tests.stages.test_captured import DECAY, OPTIMIZER, RATE, STEPS, eager, micro_batches, parts_of


def same_as_eager(name, device):
    """Loss, every gradient, and the losses of some steps."""
    loss, grads, curve = eager(name)
    real, _, batch = tiny(name)
    batches = micro_batches(name)
    mesh, others = build_mesh(Grid(), 0, device), {"optimizer": OPTIMIZER}
    trainer = engine_of(randomise(real()), batch, mesh, microbatches=len(batches), others=others)
    assert trainer.gradients(batches) == pytest.approx(loss, abs=1e-4)
    floor = 1e-4 * max(grad.abs().max().item() for grad in grads.values())
    found = {
        shard.name: shard.tensor.cpu() for shard in parts_of(trainer, trainer.buffer.main_grad)
    }
    assert found.keys() >= grads.keys()
    for key, grad in grads.items():
        scale = max(grad.abs().max().item(), floor)
        assert (found[key] - grad).abs().max() <= 1e-3 * scale, key
    assert [step(trainer, batches, RATE, DECAY).loss for _ in range(STEPS)] == pytest.approx(
        curve, abs=1e-3
    )
    evaluated = trainer.evaluate(batches[:1], ("loss", "*"))[0]
    assert {value.device.type for value in evaluated.values()} == {device.type}


def recorded_as_kernel_by_kernel(name, device, adapt=lambda model: model, dtype="float32"):
    """Losses and weights of steps that replay a recorded one, bit for bit. adapt: what is done to
    the model first. dtype: that it computes in.
    """
    batches = micro_batches(name)
    found = []
    for warm_up in (None, 1):
        real, _, batch = tiny(name)
        others = {"optimizer": OPTIMIZER, "graph_warm_up": warm_up}
        mesh = build_mesh(Grid(), 0, device)
        model = adapt(randomise(real()))
        trainer = engine_of(
            model, batch, mesh, dtype=dtype, microbatches=len(batches), others=others
        )
        losses = [step(trainer, batches, RATE, DECAY).loss for _ in range(5)]
        found.append((losses, trainer.buffer.data.cpu()))
    (losses, weights), (again, weights_again) = found
    assert losses == again and torch.equal(weights, weights_again)
    assert trainer.executor(len(batches)).recordings.replayed == 3 * 2 * len(batches)


def same_as_the_trainer(folder, device):
    """The logs of MerakTrainer, and those of transformers' Trainer on the CPU: training and
    evaluation.
    """
    told = {
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
    }
    told |= {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "report_to": "none",
    }
    told |= {"learning_rate": 1e-3, "disable_tqdm": True, "seed": 3}
    data = {
        "train_dataset": samples(16),
        "eval_dataset": samples(6, seed=2),
        "data_collator": collate,
    }
    ours = MerakArguments(str(folder / "ours"), use_cpu=device.type == "cpu", **told)
    trainers = [
        MerakTrainer(tiny_llama(), ours, **data),
        Trainer(
            tiny_llama(), TrainingArguments(str(folder / "theirs"), use_cpu=True, **told), **data
        ),
    ]
    logs = []
    for trainer in trainers:
        trainer.train()
        kept = [
            {k: v for k, v in row.items() if k in ("loss", "eval_loss")}
            for row in trainer.state.log_history
        ]
        logs.append([row for row in kept if row])
    assert trainers[0].args.device.type == device.type and len(logs[0]) == 6
    for mine, theirs in zip(*logs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)
    assert all(torch.isfinite(p).all() for p in trainers[0].model.parameters())

"""One process, the original model: HuggingFace's modules, plain autograd, torch's AdamW and
clipping.
"""

from functools import cache
from math import cos, pi

import torch
import torch.nn.functional as F
from torch import nn

from .batches import Batch, global_batch
from .cases import FIRST, MICRO_BATCH, PEAK, STEPS, WARMUP, WEIGHT_DECAY, Case
from .families import FAMILIES
from .rig import Run, assemble, mesh_of, new_trainer, parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = {"fp16": 2.0**12}  # of losses, so that small gradients are not lost


@cache
def reference(family: str, dtype: str, loss: str, micro_batch: int = MICRO_BATCH) -> Run:
    """The run that every layout of a case without dropout is compared with."""
    case = Case(family, dtype=dtype, loss=loss, micro_batch=micro_batch)
    trainer = new_trainer(case, mesh_of(case))
    weights = assemble([parts(trainer, trainer.model.buffer.data)])
    model = FAMILIES[family].original().to(DTYPES[dtype]).train()
    held = dict(model.named_parameters())
    assert held.keys() == weights.keys(), sorted(held.keys() ^ weights.keys())
    model.load_state_dict(weights, strict=False)
    masters = {
        name: nn.Parameter(parameter.detach().float().clone()) for name, parameter in held.items()
    }
    optimizer = torch.optim.AdamW(decay_groups(masters), lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
    first_loss = accumulate(model, masters, case, 0)
    gradients = {name: master.grad.clone() for name, master in masters.items()}
    curve, norms = [], []
    for step in range(STEPS):
        curve.append(accumulate(model, masters, case, step))
        norms.append(nn.utils.clip_grad_norm_(masters.values(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in held.items():
                parameter.copy_(masters[name])
    trained = {name: parameter.detach() for name, parameter in held.items()}
    return Run(first_loss, first_loss, gradients, curve, norms, trained)


def decay_groups(masters: dict[str, nn.Parameter]) -> list[dict]:
    """Weight decay on all but biases and norms, told by their names."""
    free = [name for name in masters if name.endswith(".bias") or "norm" in name or ".ln_" in name]
    return [
        {
            "params": [masters[name] for name in masters if name not in free],
            "weight_decay": WEIGHT_DECAY,
        },
        {"params": [masters[name] for name in free], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    """Linear warm-up, then cosine to a tenth of the peak; ``step`` counts the steps already done,
    as in Megatron-LM.
    """
    if step <= WARMUP:
        return FIRST + (PEAK - FIRST) * step / WARMUP
    return PEAK * (0.1 + 0.9 * 0.5 * (1 + cos(pi * (step - WARMUP) / (STEPS - WARMUP))))


def accumulate(model: nn.Module, masters: dict[str, nn.Parameter], case: Case, step: int) -> float:
    """Fill the masters' fp32 gradients with those of one global batch, micro-batch by micro-batch;
    return its loss.
    """
    batches = global_batch(case, step)
    tokens = sum(batch["loss_mask"].sum() for batch in batches)
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    total, scale = 0.0, SCALES.get(case.dtype, 1.0)
    for batch in batches:
        if case.loss == "per-token":
            loss = token_losses(model, batch).sum() / tokens
        else:
            loss = (
                token_losses(model, batch).sum()
                / batch["loss_mask"].sum().clamp(min=1)
                / len(batches)
            )
        (loss * scale).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad += parameter.grad.float() / scale
            parameter.grad = None
        total += loss.item()
    return total


def token_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """fp32 [b * s], zero where masked."""
    logits = model(
        input_ids=batch["tokens"], position_ids=batch["position_ids"], use_cache=False
    ).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses * batch["loss_mask"].flatten()

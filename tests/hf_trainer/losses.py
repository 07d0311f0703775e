"""Losses of scripts: a function, and overrides of ``compute_loss``, each as a trainer's class made
of another's.
"""

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F


def focal(outputs, labels, num_items_in_batch=None):
    """Tokens that are predicted well count less; a share of the step's loss where its targets are
    counted.
    """
    logits, targets = outputs["logits"][:, :-1].float(), labels[:, 1:]
    each = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none"
    )
    total = (each * (1 - torch.exp(-each)) ** 2).sum()
    return total / (targets.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def derived(compute):
    """Makes a trainer's class with that ``compute_loss`` of another."""
    return lambda kind: type("Own", (kind,), {"compute_loss": compute})


def by_class(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Weights of classes, which the trainer's class holds; the mean of each micro-batch."""
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    weights = torch.linspace(0.5, 1.5, outputs.logits.shape[-1], device=outputs.logits.device)
    loss = F.cross_entropy(outputs.logits, labels, weight=weights)
    return (loss, outputs) if return_outputs else loss


def smooth_states(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    """The model's own loss, and one of what its first layers make; another entry of the batch
    weighs the samples.
    """
    weights = inputs.pop("weight")
    outputs = model(**inputs, output_hidden_states=True, num_items_in_batch=num_items_in_batch)
    first, second = outputs.hidden_states[1:3]
    apart = (weights * (first - second).square().mean((1, 2))).mean()
    loss = outputs.loss + 0.5 * apart
    outputs.hidden_states = None
    return (loss, outputs) if return_outputs else loss


def twice(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    """Two forwards of the model: its predictions should not depend on the order of a batch's
    halves.
    """
    outputs = model(**inputs)
    other = model(input_ids=inputs["input_ids"].flip(1))
    loss = outputs.loss + (outputs.logits - other.logits.flip(1)).square().mean()
    return (loss, outputs) if return_outputs else loss


def distilled(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
    """The model's loss, and in training its distance from a frozen part of the model that is a
    model itself.

    The frozen part comes first: of two stages, one has nothing to do in evaluation.
    """
    if model.training:
        with torch.no_grad():
            wanted = getattr(model, "module", model).teacher(input_ids=inputs["input_ids"]).logits
    outputs = model(**inputs)
    loss = outputs.loss
    if model.training:
        pair = (
            F.log_softmax(each.float() / 2, -1).flatten(0, 1) for each in (outputs.logits, wanted)
        )
        loss = loss + F.kl_div(*pair, log_target=True, reduction="batchmean")
    return (loss, outputs) if return_outputs else loss


class Pupil(hf.LlamaForCausalLM):
    """A model with a frozen, larger one in it."""

    def __init__(self, config):
        super().__init__(config)
        larger = {"hidden_size": 32, "num_hidden_layers": 6, "intermediate_size": 40}
        self.teacher = hf.LlamaForCausalLM(
            hf.LlamaConfig(**config.to_diff_dict() | larger)
        ).requires_grad_(False)


class Regressor(nn.Module):
    """No model of transformers: its forward takes no labels and makes no loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.last = (
            nn.Embedding(64, 16),
            nn.Linear(16, 32),
            nn.Linear(32, 64),
        )

    def forward(self, input_ids):
        return {"logits": self.last(F.gelu(self.first(self.embed(input_ids))))}

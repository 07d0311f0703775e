"""Whose forward says what a model takes: a model of peft hands on what it is called with, whatever
its signature.
"""

import sys

from torch import nn


def inspected_model(model: nn.Module) -> nn.Module:
    """Return the model whose class and forward are inspected in place of ``model``, as
    transformers.Trainer does.

    model: for one of peft it is the base model, else the model itself. peft is never imported here:
           if a model has adapters, it is in ``sys.modules``.
    """
    peft = sys.modules.get("peft")
    if peft is None:
        return model
    if isinstance(model, peft.PeftModel):
        return model.get_base_model()
    if isinstance(model, peft.PeftMixedModel):
        return model.base_model.model
    return model

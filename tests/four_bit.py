"""Tiny Llamas with adapters whose frozen layers are in 4 bits, by transformers and bitsandbytes,
and their twins: the same values as matrices.
"""

from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

ATTENTION = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def save_llama(directory, **sizes):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | sizes)).save_pretrained(directory)
    return str(directory)


def four_bit(directory, kind="nf4", double=False, dtype=torch.float32, compute=None, **more):
    """What a QLoRA script loads."""
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute or dtype,
        **more,
    )
    return LlamaForCausalLM.from_pretrained(directory, dtype=dtype, quantization_config=how)


def twin_of(model):
    """The model with its layers in 4 bits as plain ones, in place."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

    for name, layer in [*model.named_modules()]:
        if isinstance(layer, Linear4bit):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            plain.weight = nn.Parameter(weight, requires_grad=False)
            model.set_submodule(name, plain)
    model.is_quantized = model.is_loaded_in_4bit = False
    del model.config.quantization_config
    del model.quantization_method
    return model


def adapted(model, targets=ATTENTION, seed=0, **more):
    """With adapters of which none begins as zeros."""
    more = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0} | more
    model = get_peft_model(model, LoraConfig(target_modules=list(targets), **more))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def tokens(rows=2, length=16, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}

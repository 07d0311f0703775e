"""The native model divides its tensors in one way: a plan that says otherwise is refused
by name.
"""

from dataclasses import replace

import pytest

from megatron_merak.config import ModelConfig
from megatron_merak.errors import PlanError
from megatron_merak.models.names import tensor_table
from megatron_merak.plan import TensorSharding
from megatron_merak.stages.native import check_native_shardings

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "seq_length": 16,
}
LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
}
QKV, TABLE, NORM = (
    "transformer.h.0.attn.c_attn.weight",
    "transformer.wte.weight",
    "transformer.ln_f.weight",
)


def table(tp=2, **more):
    return tensor_table(ModelConfig(**SIZES, **more), tp)


@pytest.mark.parametrize("more", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("tp", [1, 2])
def test_its_own_table_is_accepted_in_any_order(tp, more):
    check_native_shardings(table(tp, **more)[::-1], table(tp, **more))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            QKV,
            {"dim": 0, "blocks": 1},
            "has it sharded along dimension 0, and the native model sharded along dim",
        ),
        (
            QKV,
            {"blocks": 1},
            "has it sharded along dimension 1, and the native model sharded along dimension 1 in 3",
        ),
        (
            TABLE,
            {"dim": None},
            "has it replicated, and the native model sharded along dimension 0, padded to",
        ),
        (TABLE, {"padded": 512}, "padded to 512, and the native model"),
        (NORM, {"dim": 0}, "has it sharded along dimension 0, and the native model replicated"),
        (NORM, {"shape": (64,)}, r"its shape is \(64,\) in the plan, and \(32,\) in the model"),
    ],
)
def test_the_first_tensor_that_differs_is_named(name, change, words):
    plan = [replace(tensor, **change) if tensor.name == name else tensor for tensor in table()]
    with pytest.raises(PlanError, match=f"sharding of {name}: .*{words}"):
        check_native_shardings(plan, table())


def test_it_says_of_every_tensor_and_of_no_other():
    with pytest.raises(
        PlanError, match=f"sharding of {NORM}: the plan does not say how it is sharded"
    ):
        check_native_shardings([tensor for tensor in table() if tensor.name != NORM], table())
    with pytest.raises(
        PlanError, match="sharding of extra: .* the native model has no such tensor"
    ):
        check_native_shardings([*table(), TensorSharding("extra", (2,))], table())

"""Captured models on a GPU compute what HuggingFace's compute on a CPU; the comparison itself is
tried on a CPU.
"""

import peft
import pytest
import torch

from megatron_merak.errors import ConfigError
from tests.gpu.captured import (
    recorded_as_kernel_by_kernel,
    same_as_eager,
    same_as_the_trainer,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(
    ("name", "device"),
    [("gpt2", CPU)]
    + [
        pytest.param(name, GPU, marks=ON_A_GPU)
        for name in ("llama", "gpt2", "mixtral", "t5", "bert", "vit")
    ],
)
def test_a_model_computes_what_it_computes_eagerly(name, device):
    same_as_eager(name, device)


@pytest.mark.parametrize(
    ("name", "device"),
    [("t5", CPU)] + [pytest.param(name, GPU, marks=ON_A_GPU) for name in ("llama", "gpt2", "t5")],
)
def test_replayed_steps_have_the_bits_of_others(name, device):
    recorded_as_kernel_by_kernel(name, device)


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=ON_A_GPU)])
def test_replayed_steps_of_experts_have_the_bits_of_others(device):
    """In bf16: in fp32 the host reads how many rows each expert has."""
    recorded_as_kernel_by_kernel("mixtral", device, dtype="bfloat16")


def test_experts_in_fp32_are_refused_before_the_first_step():
    with pytest.raises(
        ConfigError, match="a product of experts in another type than bf16 is Python code"
    ):
        recorded_as_kernel_by_kernel("mixtral", CPU)


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=ON_A_GPU)])
def test_replayed_steps_of_adapters_have_the_bits_of_others(device):
    config = peft.LoraConfig(r=4, target_modules="all-linear")

    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    recorded_as_kernel_by_kernel("llama", device, adapted)


@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=ON_A_GPU)])
def test_a_trainer_logs_what_the_trainer_of_transformers_logs(device, tmp_path):
    same_as_the_trainer(tmp_path, device)

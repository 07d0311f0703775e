"""One read of several tensors gives every number that reading them one by one gives."""

import torch

from megatron_merak.parallel.host_read import read


def test_numbers_are_the_same_bits():
    torch.manual_seed(1)
    tensors = [
        torch.randn(3),
        torch.randn((), dtype=torch.float64),
        torch.tensor(2**53 - 1),
        torch.zeros(0),
    ]
    tensors += [torch.randn(2, 2).bfloat16(), torch.tensor([torch.inf, 5e-45])]
    assert read(*tensors) == [tensor.reshape(-1).tolist() for tensor in tensors]
    assert read(None, tensors[0], None) == [[], tensors[0].tolist(), []]

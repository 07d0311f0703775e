"""What segments of a micro-batch share."""

import torch

from megatron_merak.segment import Common


def test_without_a_seed_function_nothing_is_seeded():
    before = torch.get_rng_state()
    Common({}).seed(None)
    assert torch.equal(before, torch.get_rng_state())

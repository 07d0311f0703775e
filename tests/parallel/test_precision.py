"""The choice of fp32 matmul precision: whatever it says, products are fp32-accurate."""

import pytest
import torch

from megatron_merak.parallel.precision import choose_fp32_matmul


@pytest.fixture(autouse=True)
def restore():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_what_it_chooses_is_set_and_accurate():
    choice = choose_fp32_matmul(torch.device("cpu"))
    assert choice in ("highest", "medium") and torch.get_float32_matmul_precision() == choice
    generator = torch.Generator().manual_seed(1)
    for rows, inner, columns in [(64, 300, 500), (1, 512, 77), (512, 64, 512), (512, 512, 512)]:
        left, right = (
            torch.randn(rows, inner, generator=generator),
            torch.randn(inner, columns, generator=generator),
        )
        exact = left.double() @ right.double()
        total = torch.zeros(rows, columns)
        for product in (left @ right, total.addmm_(left, right)):
            assert ((product - exact).abs().max() / exact.abs().max()).item() < 1e-5
    queries, keys = (torch.randn(4, 64, 16, generator=generator) for _ in range(2))
    exact = queries.double() @ keys.double().mT
    assert ((queries @ keys.mT - exact).abs().max() / exact.abs().max()).item() < 1e-5


def test_other_devices_are_left_at_highest():
    torch.set_float32_matmul_precision("medium")
    assert (
        choose_fp32_matmul(torch.device("cuda"))
        == torch.get_float32_matmul_precision()
        == "highest"
    )


def test_it_draws_from_no_stream():
    before = torch.get_rng_state()
    choose_fp32_matmul(torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())

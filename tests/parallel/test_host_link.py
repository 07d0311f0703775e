"""Memory of the host that a GPU copies from and to, with a stand-in for CUDA's registration."""

import gc

import pytest
import torch

from megatron_merak.parallel.host_link import host_zeros

GPU = torch.device("cuda")


class Cudart:
    """Registers memory as CUDA does, without a GPU. codes: what registrations return, 0 is success."""

    def __init__(self, *codes):
        self.codes = list(codes)
        self.registered = {}

    def cudaHostRegister(self, address, nbytes, flags):
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            assert address not in self.registered
            self.registered[address] = nbytes
        return code

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


def stand_in(monkeypatch, *codes):
    cudart = Cudart(*codes)

    def check_error(code):
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return cudart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_memory_is_registered_until_its_last_view_is_gone(monkeypatch, dtype):
    cudart = stand_in(monkeypatch)
    values = host_zeros(5000, dtype, GPU)
    assert values.dtype == dtype and values.shape == (5000,) and not values.count_nonzero()
    assert cudart.registered == {values.data_ptr(): values.nbytes}
    views = [values[10:20], values[20:30].view(2, 5)]
    del values
    views[0].fill_(1)
    assert views[0].sum() == 10 and not views[1].count_nonzero()
    del views[0]
    gc.collect()
    assert cudart.registered
    views.clear()
    gc.collect()
    assert not cudart.registered


def test_memory_that_cannot_be_registered_is_given_back(monkeypatch):
    cudart = stand_in(monkeypatch, 2)
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        host_zeros(5000, torch.float32, GPU)
    gc.collect()
    assert not cudart.registered


def test_nothing_is_registered_for_no_elements_and_for_a_cpu(monkeypatch):
    cudart = stand_in(monkeypatch)
    kept = [host_zeros(0, torch.float32, GPU), host_zeros(3, torch.float32, torch.device("cpu"))]
    assert not cudart.registered
    assert torch.equal(kept[1], torch.zeros(3))

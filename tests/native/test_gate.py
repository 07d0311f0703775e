"""Every CUDA kernel keeps its values in registers, for each architecture that is released."""

import functools
import re
import shutil

import pytest

from tests.native.gate import ARCHITECTURES, ROOT, kernels

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH"),
    pytest.mark.timeout(600),
]
SOURCES = sorted((ROOT / "csrc/cuda").glob("launch_*.cu"))

# Registers of a thread: with this many a multiprocessor of 65536 holds the threads that hide memory
# latency.
REGISTERS = {
    "norm::forward": 64,
    "norm::backward": 128,
    "sum_columns": 64,
    "activation::gated": 64,
    "activation::gated_backward": 64,
    "activation::biased": 64,
    "activation::biased_backward": 64,
    "residual::bias_dropout_add": 64,
    "residual::bias_dropout_add_backward": 64,
    "rotary::rotate": 64,
    "masked_softmax": 80,
    "masked_softmax_long": 64,
    "masked_softmax_backward": 128,
    "masked_softmax_backward_long": 64,
    "cross_entropy_stats": 64,
    "cross_entropy_grad": 64,
    "exponentiate": 64,
    "adamw": 64,
    "square_parts": 64,
    "sum_parts": 64,
    "scale_into": 64,
    "add_rows": 64,
    "all_reduce": 128,
    "await_counter": 32,
    "raise_counter": 32,
}
SCALAR = {"sum_columns", "sum_parts", "await_counter", "raise_counter"}  # read single numbers


@functools.cache
def compiled(source):
    return kernels(source)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_kernel_leaves_the_registers(source):
    found = compiled(source)
    assert {kernel.architecture for kernel in found} == set(ARCHITECTURES)
    assert {kernel.family for kernel in found} <= REGISTERS.keys(), (
        "give each kernel a row in REGISTERS"
    )
    for kernel in found:
        assert kernel.stack == kernel.spilled == 0, kernel
        assert kernel.registers <= REGISTERS[kernel.family], kernel


@pytest.mark.skipif(shutil.which("nvdisasm") is None, reason="nvdisasm is not on PATH")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_machine_code(source):
    """Loads of 16 bytes, and no access to local memory."""
    for kernel in compiled(source):
        assert kernel.local == 0, kernel
        assert kernel.loads > 0 or kernel.family in SCALAR, kernel


@pytest.mark.skipif(shutil.which("nvdisasm") is None, reason="nvdisasm is not on PATH")
def test_peers_are_asked_for_several_packs_before_the_first_is_there():
    """One by one, 16384 threads of 16 bytes would read 256 KiB in the microsecond of an answer."""
    for kernel in compiled(ROOT / "csrc/cuda/launch_all_reduce.cu"):
        world, two_shots = re.search(r"(\d), (true|false)>$", kernel.name).groups()
        # copied in, summed, and by two shots read
        phases = 3 if two_shots == "true" else 2
        together = int(world) if two_shots == "true" else 4
        assert sum(count >= together for count in kernel.rounds) >= phases, kernel

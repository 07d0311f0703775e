"""A device and a link: what one rank computes with, and what joins ranks.

Rates are bytes and floating-point operations per second, times are seconds.
"""

from dataclasses import dataclass

from megatron_merak.cluster.practice import Practice
from megatron_merak.cluster.rates import Rates

GIB = 2**30
RESERVE = 4 * GIB  # of a device's memory: for what no plan counts, see ``Device.usable``
_LARGEST_RESERVE = 4  # a part of small devices: one in four bytes


@dataclass(frozen=True)
class Device:
    """What one rank computes with.

    memory:          in bytes; 0 if it is shared and has no fixed size per rank.
    dispatch:        seconds in which the host starts one operation and which no computation hides;
                     0 on GPUs.
    fused_attention: attention is one kernel that stores no probabilities, also with dropout, as on
                     GPUs.
    rates:           measured ones of products and attention, used instead of ``matmul_efficiency``
                     if there are any.
    multiprocessors: each computes one tile of a product at a time; 0: products are not priced by
                     their tiles.
    practice:        what training reaches of these figures, see ``Practice``; None: all of them.
    reserve:         bytes of ``memory`` that plans leave for what they do not count; None: see
                     ``usable``.
    host_bandwidth:  bytes per second of copies to pinned memory of its host, and as many back at the
                     same time; 0: unknown.
    fp8_flops:       dense matrix-product peak of operands in fp8; 0: it has no such products, which
                     are then computed and priced in the type of the model.
    step_factor:     by how much steps took longer than predicted, which all rates allow for.
    """

    name: str
    bfloat16_flops: float
    float32_flops: float
    memory_bandwidth: float
    memory: int
    matmul_efficiency: float
    dispatch: float = 0.0
    fused_attention: bool = True
    rates: Rates | None = None
    multiprocessors: int = 0
    practice: Practice | None = None
    reserve: int | None = None
    host_bandwidth: float = 0.0
    fp8_flops: float = 0.0
    step_factor: float = 1.0

    @property
    def usable(self) -> int:
        """Bytes that plans use: ``memory`` without ``reserve``, which is 4 GiB, or a quarter of the
        memory where that is less, unless it is given; 0 if the memory is not known.

        The rest is for what no plan counts: the driver's context, buffers of NCCL and cuBLAS, the
        allocator's gaps.
        """
        usual = min(RESERVE, self.memory // _LARGEST_RESERVE)
        return max(0, self.memory - (usual if self.reserve is None else self.reserve))

    def flops(self, dtype: str) -> float:
        """Return the dense matrix-product peak for "float32", or for the 16-bit types."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops

    def compute_time(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Return the time of many kernels: matrix products and element-wise work one after the
        other, so the sum.
        """
        return (
            flops / (self.flops(dtype) * self.matmul_efficiency)
            + moved_bytes / self.memory_bandwidth
        )

    def passes_time(self, moved_bytes: float) -> float:
        """Return the time of element-wise passes that move so many bytes, as far as training
        reaches the memory bandwidth.
        """
        slower = 1.0 if self.practice is None else self.practice.passes
        return slower * moved_bytes / self.memory_bandwidth

    def kernel_time(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Return the time of one kernel, by the roofline: the longer of arithmetic and traffic."""
        arithmetic = flops / (self.flops(dtype) * self.matmul_efficiency)
        return self.dispatch + max(arithmetic, moved_bytes / self.memory_bandwidth)


@dataclass(frozen=True)
class Link:
    """A connection of one rank, or of a group of ranks: seconds per message, and bytes per second
    in each direction.
    """

    name: str
    latency: float
    bandwidth: float

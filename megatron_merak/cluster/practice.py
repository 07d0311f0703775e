"""What training reaches of the figures of a device and its links: the fitted constants of the
planner.

A device without them, such as a CPU or one that was measured, is priced by its figures alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from megatron_merak.errors import ConfigError


@dataclass(frozen=True)
class Practice:
    """Constants of a family of devices, with the cluster that is usual around them.

    product:         share of the peak that a product of many full tiles reaches.
    attention:       share of the peak that attention reaches, by the FLOPs that count for
                     utilisation.
    attention_drops: the same of attention with dropout.
    passes:          time of the element-wise passes, relative to moving what is counted of them
                     once at the full memory bandwidth.
    inside:          share of the link in a node that a tensor-parallel collective has; more than 1
                     where part of it is hidden.
    between:         share of a network card that an all-reduce over nodes has; more than 1 where
                     switches add up.
    step:            seconds of a step for each doubling of the replicas.
    handover:        seconds of a pass that hands over to another pipeline stage.
    skew:            part of a step for each doubling of the nodes: ranks wait for the slowest.
    low, high:       one measured step in ten takes less, and one more, than so many times the
                     prediction; 0: nothing was compared.
    """

    product: float
    attention: float
    attention_drops: float
    passes: float
    inside: float
    between: float
    step: float
    handover: float
    skew: float
    low: float = 0.0
    high: float = 0.0


# "fitted" is by `python -m benchmarks calibrate`, on published steps of the device;
# docs/evidence/planner.md shows what that is worth.
_A100 = Practice(
    product=0.882,  # fitted
    attention=0.45,  # FlashAttention-2 (2307.08691): 120 to 190 TFLOP/s, causal
    # unfused, as in Megatron-LM of 2021 and 2022: in the time in which a score moves 13 bytes and
    # is computed with its masked half, 256 FLOPs of it count (128 features of a head)
    attention_drops=0.075,
    passes=1.35,  # fitted
    inside=0.638,  # fitted
    between=0.875,  # fitted
    step=0.00944,  # fitted
    handover=150e-6,  # assumed: the host's messages of a pass, of 30 to 50 us each
    skew=0.005,  # assumed: half a percent for each doubling of the nodes
    low=0.927,  # by rows that were not fitted, as fitted
    high=1.2,
)
_H100 = Practice(
    product=0.689,  # fitted
    attention=0.40,  # FlashAttention-2 to -3 (2407.08608): 330 to 550 TFLOP/s, causal
    attention_drops=0.075,  # as A100
    passes=1.64,  # fitted
    inside=1.2,  # fitted
    between=1.91,  # fitted
    step=0.0109,  # fitted
    handover=150e-6,  # as A100
    skew=0.005,  # as A100
    low=0.804,  # by rows that were not fitted, as fitted
    high=1.29,
)
# Of the others no published step was compared: what is not said is taken from their next of kin.
_V100 = replace(
    _A100,
    product=0.75,  # cuBLAS: 90 to 100 TFLOP/s in fp16
    attention=0.3,  # no FlashAttention-2; cuDNN and the memory-efficient kernel
    low=0.0,
    high=0.0,
)
_H100_PCIE = replace(_H100, inside=0.9, low=0.0, high=0.0)  # nothing adds up on PCIe
_B200 = replace(_H100, low=0.0, high=0.0)
_MI300X = replace(
    _H100,
    product=0.48,  # hipBLASLt: about 620 TFLOP/s in bf16, by SemiAnalysis (2024-12)
    attention=0.25,
    inside=0.9,
    between=0.9,
    low=0.0,
    high=0.0,
)
PRACTICE: Mapping[str, Practice] = MappingProxyType(
    {
        "V100": _V100,
        "A100": _A100,
        "H100": _H100,
        "H100 PCIe": _H100_PCIE,
        "B200": _B200,
        "MI300X": _MI300X,
    }
)


_ZERO_IS_FINE = ("step", "handover", "skew", "low", "high")


def practice_of(content: Any, where: str) -> Practice:
    """Parse constants from JSON. ``where`` names them in errors. Raises ConfigError."""
    names = [field.name for field in fields(Practice)]
    remedy = f"Give {', '.join(names)}, or leave practice out"
    if not isinstance(content, dict) or content.keys() != {*names}:
        raise ConfigError(where, repr(content)[:60], "it is not an object of constants", remedy)
    for name, value in content.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < 1e6 or (value == 0 and name not in _ZERO_IS_FINE):
            least = "at least 0" if name in _ZERO_IS_FINE else "above 0"
            raise ConfigError(
                f"{where}: {name}", repr(value), f"it is not a number {least}", remedy
            )
    return Practice(**content)

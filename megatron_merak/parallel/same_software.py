"""Check that all ranks of a job run the same programs with the same settings of torch; report
unequal hardware.
"""

import hashlib
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from .. import _native
from ..counting import named_ranks
from ..errors import LaunchError
from .agree import gather_json, together
from .position import numeric_environment

_PACKAGES = ("numpy", "transformers", "tokenizers", "datasets", "accelerate", "peft", "trl", "apex")
_HERE = Path(__file__).parent.parent
_INSTALL = "Install the same version on all hosts"
_SET = "Set it alike on every rank"


def check_same_software(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise LaunchError on every rank unless all run the same software with the same settings.

    group:  all ranks, for agreement on the CPU; collective over it.
    device: of this rank.

    The first rank warns where hardware or numbers of threads differ, which changes sums in their
    last bits.
    """
    if group is None:
        return
    with together(group, "cpu"):
        facts = [software(), settings(device), hardware(device)]
    versions, chosen, machines = zip(*gather_json(facts, group, "cpu"), strict=True)
    _refuse(versions, _INSTALL)
    _refuse(chosen, _SET)
    unequal = [text for name in machines[0] if (text := _difference(name, machines))]
    if unequal and dist.get_rank(group) == 0:
        what = "; ".join(unequal)
        warnings.warn(
            f"Ranks differ: {what}. The last bits of their sums may differ, too.", stacklevel=3
        )


def software() -> dict[str, str]:
    """Return the versions of all that computes or prepares numbers, by name."""
    found = {"Python": ".".join(map(str, sys.version_info[:2])), "torch": str(torch.__version__)}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "(not installed)"
    found["source of megatron_merak"] = _source()
    return found | {f"compiled part {name}": digest for name, digest in _native.contents().items()}


def settings(device: torch.device) -> dict[str, str]:
    """Return the settings of torch that decide numbers on this device, and environment variables,
    by name.
    """
    found: dict[str, object] = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":  # on CPUs a probe of each host chooses among equally exact ones
        matmul = torch.backends.cuda.matmul
        found |= {
            "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
            "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
            "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
            "allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        }
    named = {f"environment variable {name}": value for name, value in numeric_environment().items()}
    return {name: str(value) for name, value in found.items()} | named


def hardware(device: torch.device) -> dict[str, str]:
    """Return what may differ between ranks and changes the order of sums, by name."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    capability = torch.backends.cpu.get_cpu_capability()
    machine = f"{platform.machine()} with {capability}"
    return {"CPU": machine, "threads of a rank": str(torch.get_num_threads())}


def _source() -> str:
    """Return a digest of this package's Python code."""
    digest = hashlib.sha256()
    for path in sorted(_HERE.rglob("*.py")):
        digest.update(path.relative_to(_HERE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _refuse(everywhere: Sequence[dict[str, str]], remedy: str) -> None:
    for name, value in everywhere[0].items():
        others = {rank: each[name] for rank, each in enumerate(everywhere) if each[name] != value}
        if others:
            other = next(iter(others.values()))
            alike = [rank for rank, each in others.items() if each == other]
            reason = (
                f"{named_ranks(alike)} {'has' if len(alike) == 1 else 'have'} it, and rank "
                f"0 has {value}"
            )
            raise LaunchError(name, other, reason, remedy)


def _difference(name: str, everywhere: Sequence[dict[str, str]]) -> str:
    values = [each.get(name, "(none)") for each in everywhere]
    kinds = list(dict.fromkeys(values))
    if len(kinds) == 1:
        return ""
    parts = [
        f"{kind} on {named_ranks([r for r, each in enumerate(values) if each == kind])}"
        for kind in kinds
    ]
    return f"{name}: {', '.join(parts)}"

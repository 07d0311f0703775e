"""TRL's trainers under a plan: ``from megatron_merak.trl import parallelize``."""

from ..extras import installed_by, is_installed

if not is_installed("trl"):
    raise ImportError(
        f"megatron_merak.trl needs the package trl, which is not installed: {installed_by('trl')}"
    )

from .parallelize import parallelize  # noqa: E402

__all__ = ["parallelize"]

"""TRL's trainers under a plan: ``from megatron_merak.trl import parallelize``."""

from importlib.util import find_spec

if find_spec("trl") is None:
    raise ImportError(
        "megatron_merak.trl needs the package trl, which is not installed: pip install "
        "'megatron_merak[trl]'"
    )

from .parallelize import parallelize  # noqa: E402

__all__ = ["parallelize"]

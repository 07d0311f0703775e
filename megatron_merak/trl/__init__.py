"""TRL's trainers under a plan: ``from megatron_merak.trl import parallelize``."""

from .parallelize import parallelize

__all__ = ["parallelize"]

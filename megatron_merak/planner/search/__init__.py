"""Searches the fastest plan of a job: degrees, micro-batch, schedule, recomputation, sharding."""

from megatron_merak.planner.search.choice import Choice, pins_of
from megatron_merak.planner.search.search import FoundPlan, Model, Result, Search

__all__ = ["Choice", "FoundPlan", "Model", "Result", "Search", "pins_of"]

"""The planner: pure Python, so that a laptop plans for thousands of ranks."""

from megatron_merak.planner.make import plan, plan_chain

__all__ = ["plan", "plan_chain"]

"""The planner. It is pure Python and needs no accelerators: a laptop can plan for thousands of
ranks.
"""

from megatron_merak.planner.make import plan, plan_chain
from megatron_merak.planner.predict import priced

__all__ = ["plan", "plan_chain", "priced"]

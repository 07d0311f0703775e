"""What a plan of a given grid is made from."""

import dataclasses
from typing import Any

from megatron_merak.config import ParallelConfig
from megatron_merak.plan import Grid
from megatron_merak.planner.request import Request

ONE = Grid()
_OWN = {field.name for field in dataclasses.fields(Request)}


def request(grid: Grid = ONE, parallel: ParallelConfig | None = None, **asked: Any) -> Request:
    """A request for a grid, whatever the degrees in ``parallel``.

    asked: its fields, and those of ``ParallelConfig``.
    """
    settings = {name: value for name, value in asked.items() if name not in _OWN}
    degrees = {
        "tensor_model_parallel_size": grid.tp,
        "context_parallel_size": grid.cp,
        "pipeline_model_parallel_size": grid.pp,
        "rank_order": grid.order,
    }
    made = dataclasses.replace(parallel or ParallelConfig(), **degrees, **settings)
    own = {name: value for name, value in asked.items() if name in _OWN}
    return Request(parallel=made, replicas=grid.dp, **own)

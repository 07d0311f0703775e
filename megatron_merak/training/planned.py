"""The plan of a command line, for tools that only examine it: made from training flags, or
stored.
"""

import argparse
import dataclasses
import functools
import gc
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..arguments import build_parser, read
from ..cluster import CLUSTERS, DEVICES, find_cluster, profiled, reserving
from ..config import Config, HFConfig, RunConfig, check_sizes, planned_part
from ..errors import ConfigError, MerakError, PlanError
from ..pipeline_parallel.search.progress import SEARCHING, SearchProgress

if TYPE_CHECKING:
    from ..plan import Plan
    from ..stages.traced import Traced


def kind_of(arguments: Sequence[str]) -> type[RunConfig]:
    """Return the configuration class of these flags: that of pretrain_hf.py if ``--model`` is among
    them.
    """
    return (
        HFConfig if any(argument.split("=")[0] == "--model" for argument in arguments) else Config
    )


def parser(
    description: str, usage: str, kind: type[RunConfig]
) -> tuple[argparse.ArgumentParser, argparse._ArgumentGroup]:
    """Return a parser of all training flags, and its group for the planned machine, to which a tool
    may add flags.
    """
    flags = build_parser(description, kind)
    flags.usage = usage
    own = flags.add_argument_group("plan")
    own.add_argument("--world-size", metavar="N", default=None, help="number of ranks [required]")
    names = ", ".join(dict.fromkeys((*DEVICES, *CLUSTERS)))
    where = f"device or cluster to plan for: one of {names}, or a cluster in a JSON file [cpu]"
    own.add_argument("--device", metavar="NAME", default="cpu", help=where)
    return flags, own


def configured(
    flags: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[RunConfig, argparse.Namespace]:
    """Return the configuration and the tool's own values of a command line."""
    return read(flags, arguments, kind_of(arguments))


def planned(config: RunConfig, own: argparse.Namespace) -> tuple["Plan", tuple[str, ...]]:
    """Return the plan, and notes on it."""
    maker = Maker(config, own)
    return maker.plan, maker.notes()


class Maker:
    """Makes the plan of a command line, and plans with other parallel settings. A model is captured
    once.
    """

    def __init__(self, config: RunConfig, own: argparse.Namespace):
        ranks = world_size(own.world_size)
        cluster = profiled(find_cluster(own.device), config.parallel.device_profile)
        self.cluster = reserving(cluster, config.parallel.memory_reserve_gb)
        config, self.ranks, self.part_notes = planned_part(config, ranks)
        if config.parallel.plan is not None:
            raise ConfigError(
                "--plan", config.parallel.plan, "it is already a plan", "Use: plan.py show FILE"
            )
        self.config = config

    @functools.cached_property
    def plan(self) -> "Plan":
        """The plan. Raises what planning raises."""
        try:
            return self._make(self.config, self.ranks)
        except PlanError as error:
            for line in self.fitting():
                error.add_note(line)
            raise

    @property
    def limit(self) -> float:
        """Bytes that a rank may use, where nodes differ of the largest, see ``planner.remedies.limit_of``."""
        from ..planner.remedies import limit_of

        largest = max(self.cluster.devices, key=lambda device: device.usable)
        return limit_of(largest, self.config.parallel.device_memory_gb)

    def notes(self) -> tuple[str, ...]:
        """Return notes on the plan, in sentences."""
        notes = self.part_notes
        if not isinstance(self.config, Config) or self.config.is_priced_by_graph:
            captured = self._traced.captured
            notes += (f"Captured {captured.how}.", *captured.notes)
        if isinstance(self.config, HFConfig):
            notes += self._beyond_positions()
        return notes + _growth(self.plan, self.config, self.ranks)

    def _beyond_positions(self) -> tuple[str, ...]:
        from .hf_model import beyond_positions

        return beyond_positions(self._traced.model, self.config.model.seq_length)

    def remade(self, changes: Mapping[str, Any]) -> "Plan | None":
        """Return the plan with other parallel settings, and ``world_size``; None if it is
        refused.
        """
        changes = dict(changes)
        ranks = changes.pop("world_size", self.ranks)
        if "data_parallel_sharding_strategy" in changes:
            changes["use_distributed_optimizer"] = False
        parallel = dataclasses.replace(self.config.parallel, **changes)
        try:
            return self._make(dataclasses.replace(self.config, parallel=parallel), ranks)
        except MerakError:
            return None

    def fitting(self) -> list[str]:
        """If no cut fits into ``--device-memory-gb``, return a line for each change with which one
        does.
        """
        from ..planner.remedies import misfits

        anyhow = {"device_memory_gb": None}
        memory = self.config.parallel.device_memory_gb
        plan = self.remade(anyhow)
        if memory is None or plan is None:
            return []

        def remake(changes: Mapping[str, Any]) -> "Plan | None":
            return self.remade(changes) or self.remade({**changes, **anyhow})

        lines = misfits(plan, memory * 2**30, remake)
        return [line for line in lines if line.endswith("it fits")]

    def _make(self, config: RunConfig, ranks: int) -> "Plan":
        if isinstance(config, Config) and not config.is_priced_by_graph:
            # here and below, so that a command line is answered before planning is loaded
            from ..planner import plan

            with SearchProgress(SEARCHING) as progress:
                return plan(config, ranks, self.cluster, report_progress=progress)
        from .hf_model import blueprint_of

        config.validate(ranks, training=False)
        with SearchProgress(SEARCHING) as progress:
            return blueprint_of(self._traced, config, ranks, self.cluster, progress=progress).plan

    @functools.cached_property
    def _traced(self) -> "Traced":
        # here, since these take seconds
        from ..stages.gpt_model import traced_gpt
        from .hf_model import build_model, traced_of

        # most objects stay: looking for garbage among them less often saves a tenth
        gc.set_threshold(200_000, 10, 10)
        if isinstance(self.config, Config):
            return traced_gpt(self.config)
        assert isinstance(self.config, HFConfig)
        return traced_of(build_model(self.config.model), self.config)[0]


def _growth(plan: "Plan", config: RunConfig, ranks: int) -> tuple[str, ...]:
    from ..planner.growth import growth_table

    check_sizes(config.train, config.batches(ranks), plan.grid.dp)
    table = growth_table(plan, config.phases(ranks))
    return (f"\n{table}",) if table else ()


def world_size(text: str | None, flag: str = "--world-size") -> int:
    """Return a number of ranks. Raises ConfigError, which names ``flag``."""
    if text is None:
        raise ConfigError(flag, "(missing)", "it is needed", "Give the number of ranks to plan for")
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise ConfigError(
            flag,
            text,
            "it is not a number of ranks",
            "Give a whole number of at least 1",
        )
    return int(text)

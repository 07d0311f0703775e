"""Run a stored or hand-edited plan: flags need not repeat what it decides, and must not contradict
it.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..arguments import flags
from ..cluster import Cluster
from ..config import RAMP, STEPS, RunConfig, flag_name
from ..config.table import DECIDES, MAKES
from ..errors import ConfigError, PlanError, ScheduleError
from ..pipeline_parallel.check import check
from ..pipeline_parallel.schedule_files import executable
from ..plan import Plan, hardware_of
from ..plan.fit import check_ranks
from ..planner.memory import predicted_peaks
from ..planner.predict import priced
from ..strict_json import parse

_PARTS = ("grid", "units", "stages", "schedule")  # of every plan


def stored(path: str) -> Plan:
    """Return the plan of a JSON file, with new predictions, as it may have been edited. Raises
    PlanError.
    """
    text = _text_of(path)
    _check_kind(path, text)
    try:
        plan = Plan.from_json(text)
        check(plan.schedule)
        executable(plan.schedule, "plan", path)
    except (PlanError, ScheduleError) as error:
        raise PlanError(
            "plan", path, f"{error.what} {error.value}: {error.reason}", error.remedy
        ) from error
    return priced(plan)


def _text_of(path: str) -> str:
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise OSError("it is not a regular file")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError("plan", path, f"it cannot be read ({reason})", _instead(path)) from error


def _check_kind(path: str, text: str) -> None:
    """Raise PlanError for what is no JSON, or JSON of something else than a plan."""
    try:
        values = parse(text)
    except ValueError as error:
        reason = f"it does not parse as JSON ({error})"
        raise PlanError("plan", path, reason, _instead(path)) from error
    missing = [name for name in _PARTS if not isinstance(values, dict) or name not in values]
    if len(missing) == len(_PARTS):
        reason = f"it is JSON of something else, without {', '.join(_PARTS)}"
        raise PlanError("plan", path, reason, _instead(path))
    if missing:
        raise PlanError("plan", path, f"it has no {', '.join(missing)}", "Make the plan anew")


def _instead(path: str) -> str:
    """Return what to give in place of a file that is no plan: that of its run, where there is
    one.
    """
    place = Path(path) if Path(path).is_dir() else Path(path).parent
    near = place / "plan.json"
    if Path(path).exists() and near.is_file() and near != Path(path):
        return f"Give {near}"
    return (
        "Give a file that merak-plan show --save FILE.json wrote, or the plan.json of a --run-dir"
    )


def decided(kind: type[RunConfig], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a ``--plan`` on the command line decides, by field.

    Raises PlanError, and ConfigError for a flag from which plans are made.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--plan")
    try:
        path = finder.parse_known_args(arguments)[0].plan
    except argparse.ArgumentError:
        return {}  # the parser of all flags reports it
    if path is None:
        return {}
    plan = stored(path)
    known = {flag.field for flag in flags(kind)}
    if plan.is_of_gpt and "graph_sharding" in known:
        reason = "it is a plan of the GPT of merak-pretrain"
        remedy = "Make one with the flags of merak-pretrain-hf: merak-plan show --model"
        raise PlanError("--plan", path, reason, remedy)
    names = {argument.partition("=")[0] for argument in arguments}
    for name in MAKES:
        if flag_name(name) in names and name in known:
            raise ConfigError(
                flag_name(name), "(given)", f"it is decided by the plan {path}", "Leave it out"
            )
    if names & {RAMP, STEPS}:  # they set the sizes, of which the plan has the largest
        known -= {"global_batch_size"}
    if "--use-distributed-optimizer" in names:  # it says so alone
        known -= {"data_parallel_sharding_strategy"}
    if "--use-tp-pp-dp-mapping" in names:
        known -= {"rank_order"}
    return {name: where.read(plan) for name, where in DECIDES.items() if name in known}


def check_plan_ranks(config: RunConfig, world_size: int) -> None:
    """Raise PlanError if ``--plan`` names a plan for another number of ranks.

    Called before checks of its degrees, whose errors would blame flags.
    """
    if config.parallel.plan is not None:
        check_ranks(stored(config.parallel.plan), world_size)


def plan_of(
    config: RunConfig, world_size: int, cluster: Cluster, rank: int | None = None
) -> Plan | None:
    """Return the plan that ``--plan`` names; None without it.

    cluster: on which the job runs, as this rank knows it.
    rank:    whose memory is checked; None: that of all.

    Raises PlanError if it does not fit the job or machine, and ConfigError for a flag that
    contradicts it.
    """
    parallel = config.parallel
    if parallel.plan is None:
        return None
    plan = stored(parallel.plan)
    check_ranks(plan, world_size)
    settings = {
        flag.field: getattr(getattr(config, flag.section), flag.field)
        for flag in flags(type(config))
    }
    settings["global_batch_size"] = config.global_batch_size(world_size)
    settings["data_parallel_sharding_strategy"] = parallel.sharding
    settings["rank_order"] = parallel.order
    settings["expert_tensor_parallel_size"] = parallel.expert_tensor_parallel
    other_names = {"global_batch_size": STEPS} if config.train.step_batch_size_schedule else {}
    if parallel.data_parallel_sharding_strategy is None and parallel.use_distributed_optimizer:
        other_names["data_parallel_sharding_strategy"] = "--use-distributed-optimizer"
    if parallel.rank_order is None and parallel.use_tp_pp_dp_mapping:
        other_names["rank_order"] = "--use-tp-pp-dp-mapping"
    compare(plan, settings, lambda name: other_names.get(name) or flag_name(name))
    check_memory(plan, cluster, rank)
    return plan


def compare(plan: Plan, settings: Mapping[str, Any], named: Callable[[str], str]) -> None:
    """Raise ConfigError for the first setting that contradicts a plan. named: returns its name for
    the user.
    """
    for name, where in DECIDES.items():
        if name in settings and settings[name] != where.read(plan):
            reason = f"the plan has {where.read(plan)}"
            raise ConfigError(
                named(name), settings[name], reason, "Leave it out, or change the plan"
            )


def check_memory(plan: Plan, cluster: Cluster, rank: int | None = None) -> None:
    """Raise PlanError if a rank of ``cluster`` has less memory, all of it counted, than the plan
    needs.

    A plan that leaves less than the reserve runs: it may be what ``--device-memory-gb`` asked for.
    Its table says it.

    rank: the one to check, by its own device: hosts may have others; None: all.
    """
    if not plan.predicted_bytes:
        return
    hardware = hardware_of(cluster, plan.grid)
    peaks = predicted_peaks(plan)
    places = range(plan.grid.pp) if rank is None else plan.grid.coordinates(rank)[3:]
    for place in places:
        devices = hardware[place].devices if rank is None else (cluster.device_at(rank),)
        device = min(devices, key=lambda device: device.memory)
        if not 0 < device.memory < peaks[place]:
            continue
        capacity = device.memory / 2**30
        reason = f"pipeline rank {place} does not fit into the {capacity:.0f} GiB of {device.name}"
        remedy = "Make a plan for this device"
        raise PlanError("plan", f"(priced for {plan.cluster.device_names})", reason, remedy)

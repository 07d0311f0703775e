"""``--parallel auto`` and merak-plan search: the settings that a search decides."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..cluster import Cluster
from ..config import Config, HFConfig, RunConfig, flag_name
from ..config.checks import check_room, check_searched
from ..config.run import Run
from ..errors import ConfigError, MerakError, PlanError
from ..plan import LAYERS
from ..planner.request import Request
from ..planner.search import Choice, Model, Result, Search, pins_of
from ..planner.search.choice import SEARCHED
from ..planner.search.formulas import FormulaChain
from ..planner.search.report import lacking, left_out
from ..planner.search.search import Report

FLAG = "--parallel"
PIN = f"{FLAG} auto,{{}}=VALUE"  # how a setting is pinned on the command line of a job


def stand_ins(words: Sequence[str], pin: str) -> dict[str, Any]:
    """Return what stands for required settings that a search decides, by field.

    words: the command line.
    pin:   how one is pinned, in words.

    Raises ConfigError for a flag that the search decides.
    """
    names = {word.partition("=")[0] for word in words}
    for name, short in SEARCHED.items():
        if flag_name(name) in names:
            remedy = f"Leave it out, or pin it: {pin.format(short)}"
            raise ConfigError(flag_name(name), "(given)", "it is decided by the search", remedy)
    return {"micro_batch_size": 1}


def pins(config: RunConfig) -> dict[str, Any]:
    """Return what ``--parallel auto,tp=2`` pins. Raises ConfigError."""
    return pins_in(config.parallel.parallel or "", FLAG)


def pins_in(text: str, flag: str) -> dict[str, Any]:
    """Return what a text like ``auto,tp=2`` pins, given for ``flag``. Raises ConfigError."""
    kind, _, rest = text.partition(",")
    if kind != "auto":
        remedy = "Use auto, or auto,tp=2 to pin settings"
        raise ConfigError(flag, text, "it does not begin with auto", remedy)
    return pins_of(rest, flag) if rest else {}


def check(config: RunConfig) -> None:
    """Check what can be checked before the search. Raises ConfigError."""
    pins(config)
    check_searched(config.parallel, config.train)
    if isinstance(config, Config):
        check_room(config.model, config.parallel)


def search_of(config: RunConfig, cluster: Cluster, pinned: Mapping[str, Any]) -> Search:
    """Return the search of a run's plan. Raises a MerakError for settings that no search tries.

    pinned: see `pins`. Sequences of the GPT of flags are divided only where that is pinned.
    """
    check_searched(config.parallel, config.train)
    if isinstance(config, Config):
        check_room(config.model, config.parallel)
    request = Request(
        parallel=config.parallel,
        sequence_length=config.model.seq_length,
        dtype=config.train.dtype,
        fp8=config.train.fp8,
        loss_chunk=config.model.cross_entropy_chunk_size,
        state_bytes=config.optimizer.state_bytes,
        couples_samples=config.couples_samples,
    )
    model: Model
    by_graph = isinstance(config, Config) and (config.is_priced_by_graph or pinned.get("cp", 1) > 1)
    if isinstance(config, Config) and not by_graph:
        residual = config.model.fp32_residual_connection
        request = dataclasses.replace(request, graph_sharding=LAYERS, fp32_residual=residual)
        model = FormulaChain(config, cluster)
    else:
        # here, since it takes seconds
        from .hf_model import captured_chain

        assert isinstance(config, (Config, HFConfig))
        model, request = captured_chain(config, request, cluster)
    return Search(model, request, cluster)


def batch_sizes(config: RunConfig) -> list[int]:
    """Return the samples of a step; where they grow, of all steps, the largest last."""
    return sorted(size for _, size in config.batches_over(1).sizes)


def applied(config: Run, choice: Choice) -> Run:
    """Return the settings with what was chosen."""
    parallel = dataclasses.replace(
        choice.applied(config.parallel), parallel=None, parallel_verify=None
    )
    train = dataclasses.replace(config.train, micro_batch_size=choice.mb)
    return dataclasses.replace(config, parallel=parallel, train=train)


def searched(
    config: RunConfig,
    ranks: int,
    cluster: Cluster,
    report: Report = lambda share, best: None,
    wanted: int = 1,
) -> Result:
    """Return what ``--parallel auto`` finds. Raises a MerakError where no plan fits.

    wanted: see ``Search.run``.
    """
    pinned = pins(config)
    search = search_of(config, cluster, pinned)
    batch = batch_sizes(config)
    result = search.run(ranks, batch, pinned, report, wanted=wanted)
    if result.best is None:
        raise unfit(search, ranks, batch, pinned, result)
    return result


def notes_of(config: RunConfig, choice: Choice, result: Result) -> tuple[str, ...]:
    """Return notes on what was chosen of what a search found."""
    room = ""
    if config.parallel.moe_expert_rank_capacity_factor and not choice.layer.exchanges_rows:
        room = "--moe-expert-rank-capacity-factor has no effect: no ranks divide experts."
    notes = (f"{FLAG} {config.parallel.parallel} chose {choice}.", left_out(result), room)
    return tuple(filter(None, notes))


def unfit(
    search: Search, ranks: int, batch: Sequence[int], pinned: Mapping[str, Any], result: Result
) -> MerakError:
    """Return the error of a search that found nothing, with what would fit."""
    if result.refusal is not None:
        return result.refusal
    remedy, *others = lacking(search, ranks, batch, pinned)
    layouts = f"{result.counted:,} layouts"
    if result.rest is not None:
        layouts = f"the {result.made:,} most promising of {layouts}"
    reason = f"none of {layouts} fits into the memory of {search.cluster.device_names}"
    error = PlanError("ranks", ranks, reason, remedy)
    for line in others:
        error.add_note(line)
    return error

"""Choose the degrees of a trainer and what else ``MerakArguments(parallel="auto")`` leaves open.

The batch of a step stays that of transformers' Trainer on the same ranks, ``per_device_train_batch_size`` x
``gradient_accumulation_steps`` x ranks. It is divided anew: into micro-batches of any number of rows
where the loss is a mean over the targets of the step, and of as many as were asked for where it
depends on them.
"""

import dataclasses
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..errors import ConfigError
from ..graph.capture.captured import Captured
from ..graph.ir.nodes import is_op
from ..optimizer.recipe import Recipe
from ..parallel.agree import broadcast_json, together
from ..parallel.nodes import located
from ..parallel.ranks import Ranks
from ..pipeline_parallel.search.progress import SEARCHING, SearchProgress
from ..planner.search import Choice, Search
from ..planner.search.report import left_out
from ..stages.precision import compute_dtype
from ..stages.searched import CapturedChain
from ..stages.traced import Batch, OwnLoss, Traced
from ..training.searched import unfit
from ..training.verified import Expected, fastest
from .arguments.merak_arguments import MerakArguments
from .arguments.optimizers import adam_of
from .arguments.searched import NAME, VERIFY, apply_choice, pinned
from .engine import state_bytes_of, wishes
from .run.console import say

_SUM = 2  # a reduction of torch's cross_entropy_loss


def choose(
    args: MerakArguments,
    ranks: Ranks,
    model: nn.Module,
    example: Batch,
    recipe: Recipe,
    loss: OwnLoss | None,
    timed_steps: Callable[[MerakArguments, Ranks, int], list[float]],
) -> list[str]:
    """Set in ``args`` what the first rank's search chooses, or what is fastest of that where plans
    are tried; return notes on it. Collective.

    ranks:   of the job.
    example: a micro-batch of ``args``.
    recipe:  which optimizer steps which parameter.
    loss:    replaces the model's own.

    timed_steps: returns the seconds of so many steps under other arguments, on the ranks given.

    Raises a MerakError where no plan fits, or none that is tried runs.
    """
    text = args.parallel
    rows = args.per_device_train_batch_size
    with together(ranks.control, "cpu"):
        # on every rank: a forward may set what has to be equal on all, such as config.problem_type
        whole = _traced(args, model, example, loss)
        adds_up = _adds_up(whole.captured)
        unit = 1 if adds_up and _has_rows(example, rows) else rows
    batch = rows * args.gradient_accumulation_steps * ranks.world.size // unit
    found = None
    with together(ranks.control, "cpu"):
        if ranks.rank == 0:

            def trace(samples: int) -> Traced:
                if samples * unit == rows:
                    return whole
                return _traced(args, model, _of_rows(example, samples), loss)

            search = _search(args, ranks, trace, recipe, whole.dtype)
            found = _found(search, args, ranks.world.size, batch, unit)
    offered, notes = broadcast_json(found, ranks.control, "cpu")
    candidates = [Expected(Choice(**fields), seconds) for fields, seconds in offered]

    def apply(args: MerakArguments, choice: Choice) -> None:
        replicas = ranks.world.size // (choice.tp * choice.cp * choice.pp)
        apply_choice(args, choice, choice.mb * unit, batch // (choice.mb * replicas))

    def trial(choice: Choice, inside: Ranks, count: int) -> list[float]:
        tried = copy(args)
        apply(tried, choice)
        return timed_steps(tried, inside, count)

    choice = candidates[0].choice
    if (wanted := args.parallel_verify) is not None:
        told = partial(say, args)
        parallel = wishes(args)["request"].parallel
        choice = fastest(
            candidates,
            wanted,
            ranks,
            trial,
            say=told,
            graph_warm_up=parallel.graph_warm_up,
            flag=VERIFY,
        ).choice
    before = args.gradient_accumulation_steps
    room = args.moe_expert_rank_capacity_factor
    apply(args, choice)
    settings = replace(choice, mb=choice.mb * unit)
    if whole.accepts_num_items and not adds_up and args.gradient_accumulation_steps != before:
        notes.append(
            "The loss is not plainly a sum that is divided by num_items_in_batch. If it depends on "
            f"micro-batches, as some of transformers do: there are {args.gradient_accumulation_steps} "
            f"in a step, not {before}."
        )
    if room is not None and not choice.layer.exchanges_rows:
        notes.append("moe_expert_rank_capacity_factor has no effect: no ranks divide experts.")
    return [f"{NAME} {text} chose {settings}.", *notes]


def _found(
    search: Search, args: MerakArguments, ranks: int, batch: int, unit: int
) -> tuple[list[tuple[dict, float]], list[str]]:
    """Return the fields of the best choice, or of as many as are tried, with the predicted seconds of
    each, and notes.
    """
    pins = pinned(args)
    if unit > 1:
        pins = {"mb": 1, **pins}
    with SearchProgress(SEARCHING) as progress:
        wanted = args.parallel_verify or 1
        result = search.run(ranks, [batch], pins, progress, wanted=wanted)
    if result.best is None:
        error = unfit(search, ranks, [batch], pins, result)
        if error.what == "--global-batch-size":
            # of commands; here it is a product of arguments
            error = ConfigError("batch of a step", error.value, error.reason, error.remedy)
        raise error
    offered = [(dataclasses.asdict(each.choice), each.seconds) for each in result.first(wanted)]
    return offered, [note for note in [left_out(result)] if note]


def _traced(args: MerakArguments, model: nn.Module, batch: Batch, loss: OwnLoss | None) -> Traced:
    dtype = compute_dtype(model, args.bf16, args.fp16)
    with torch.random.fork_rng(devices=[]):
        return Traced(model, batch, dtype, args.bf16 or args.fp16, loss=loss)


def _search(
    args: MerakArguments,
    ranks: Ranks,
    trace: Callable[[int], Traced],
    recipe: Recipe,
    dtype: str,
) -> Search:
    """Return the search of a model's plan. trace: see `CapturedChain`."""
    requested = wishes(args)
    state_bytes = state_bytes_of(requested["optimizer"], recipe)
    request = replace(requested["request"], dtype=dtype, state_bytes=state_bytes)
    cluster = located(requested["cluster"], ranks.nodes)
    state_of = recipe.state_of if adam_of(recipe) is None else None
    return Search(CapturedChain(trace, request, cluster, state_of), request, cluster)


def _adds_up(captured: Captured) -> bool:
    """Whether the loss is a sum over targets, divided by those of the step, so that it does not
    matter how rows are grouped. A mean over a micro-batch, or an auxiliary loss of a router, does.
    """
    (output,) = captured.module.graph.find_nodes(op="output")
    loss = output.args[0][0]
    if not is_op(loss, "div"):
        return False
    total, items = loss.args
    return (
        is_op(total, "cross_entropy_loss")
        and total.args[3:4] == (_SUM,)
        and isinstance(items, Node)
        and items.target == "num_items_in_batch"
    )


def _has_rows(batch: Batch, rows: int) -> bool:
    """Whether every tensor of a batch has so many rows, or is a number."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim() > 0]
    return all(len(value) == rows for value in tensors)


def _of_rows(batch: Batch, rows: int) -> Batch:
    """Return a batch of the first row, so many times."""
    return {
        name: value[:1].expand(rows, *value.shape[1:]).contiguous()
        if isinstance(value, Tensor) and value.dim() > 0
        else value
        for name, value in batch.items()
    }

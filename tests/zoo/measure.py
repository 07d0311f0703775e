"""One row of the parity table: everything that is measured of one model type, in this process and
its children.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron_merak.config.parallel import ALL_GATHER, P2P
from megatron_merak.errors import MerakError
from megatron_merak.graph.capture.capture import capture
from megatron_merak.graph.capture.empty import init_empty_weights
from megatron_merak.graph.ir.nodes import op_name
from megatron_merak.graph.ir.operators import flops
from megatron_merak.graph.lowering.context import repeated
from megatron_merak.graph.partition.cut import cut
from megatron_merak.graph.sharding.experts import GROUPED
from megatron_merak.graph.sharding.shard import shard

from .chain import RankProgram, Subject, check_chain, check_tensor_parallel
from .compare import BROKEN, REFUSED, WRONG, Cell
from .configs import KV_HEADS
from .curve import check_curve
from .doubled import doubled
from .eager import reference
from .heads import heads
from .specimen import Specimen, tiny

CELLS = ("pp2", "pp3", "tp2", "tp4", "curve")
DIVIDED = (
    "sp2",
    "cp2",
    "cp2 gather",
    "cp2 ring",
    "cp2tp2",
    "ep2",
    "ep2pp2",
    "cp2ep2",
    "cp2tp2ep4",
)  # of docs/evidence/parity_divided.md
FULL = 0.55  # of the parameters per rank at TP=2: at most this much is a full plan


def subject_of(specimen: Specimen, dtype: torch.dtype = torch.float32) -> Subject:
    """Raises TraceError. The capture is of a model without memory, the reference of one with
    weights.
    """
    model, batch = _without_grouped_mm(specimen.model(dtype), dtype), specimen.batch(dtype=dtype)
    torch.manual_seed(0)
    loss, gradients = reference(model, batch)
    with init_empty_weights():
        empty = _without_grouped_mm(specimen.empty(), dtype)
    captured = capture(empty, batch, dtype=dtype)
    return Subject(model, batch, loss, gradients, captured, cut(captured), dtype)


def _without_grouped_mm(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with a loop over its experts in fp64, for which torch has no grouped product."""
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def row(model_type: str, asked: Sequence[str] = CELLS) -> dict[str, Any]:
    """JSON-safe; ``asked`` are the cells to measure.

    ``left_out`` is why the unmodified model does not train, ``refused`` why it is not captured.
    """
    start = time.perf_counter()
    head = heads()[model_type]
    found: dict[str, Any] = {"type": model_type, "mapping": head.mapping, "class": head.class_name}
    found["causal"] = head.causal
    try:
        specimen = tiny(model_type)
    except LookupError as error:
        return found | {"left_out": str(error)}
    found |= {"recipe": specimen.recipe}
    subject, failure = attempt(lambda: subject_of(specimen))
    if subject is None:
        return found | {failure.state: failure.text, "seconds": time.perf_counter() - start}
    found |= {"how": subject.captured.how, "notes": list(subject.captured.notes)}
    return found | cells(specimen, subject, asked) | {"seconds": time.perf_counter() - start}


def cells(specimen: Specimen, subject: Subject, asked: Sequence[str]) -> dict[str, Any]:
    twins: list[Subject] = []

    def twin() -> Subject:
        if not twins:
            twins.append(subject_of(specimen, torch.float64))
        return twins[0]

    checks: dict[str, Callable[[Subject], Cell]] = {
        "pp2": lambda s: check_chain(s, shard(s.captured, 1), 2),
        "pp3": lambda s: check_chain(s, shard(s.captured, 1), 3),
        "tp2": lambda s: check_tensor_parallel(s, shard(s.captured, 2)),
    }
    if specimen.config_value("num_key_value_heads") == KV_HEADS:
        checks["tp4"] = lambda s: check_tensor_parallel(s, shard(s.captured, 4))
    checks["sp2"] = lambda s: check_tensor_parallel(s, shard(s.captured, 2), sequences=True)
    checks["cp2"] = lambda s: check_tensor_parallel(s, shard(s.captured, 1), cp=2)
    for name, cp_comm_type in (("cp2 gather", ALL_GATHER), ("cp2 ring", P2P)):
        checks[name] = partial(in_kind, cp_comm_type=cp_comm_type)
    checks["cp2tp2"] = lambda s: check_tensor_parallel(
        s, shard(s.captured, 2), sequences=True, cp=2
    )
    if any(op_name(node) in GROUPED for node in subject.captured.module.graph.nodes):
        checks["ep2"] = lambda s: check_tensor_parallel(
            s, shard(s.captured, 2, experts=2), sequences=True
        )
        checks["ep2pp2"] = lambda s: check_tensor_parallel(
            s, shard(s.captured, 2, experts=2), sequences=True, stages=2
        )
        checks["cp2ep2"] = lambda s: check_tensor_parallel(s, shard(s.captured, 1, experts=2), cp=2)
        checks["cp2tp2ep4"] = lambda s: check_tensor_parallel(
            s, shard(s.captured, 2, experts=4), sequences=True, cp=2
        )
    checks["curve"] = lambda s: check_curve(specimen, s)
    found: dict[str, Any] = {
        name: twice(check, subject, twin) for name, check in checks.items() if name in asked
    }
    if "cp2" in asked:
        found["repeated"], _ = attempt(lambda: repeated_share(subject))
    found["share"], _ = attempt(lambda: shard(subject.captured, 2).share())
    return found


def in_kind(subject: Subject, cp_comm_type: str) -> Cell:
    """Ranks that divide sequences and exchange in one way."""
    return check_tensor_parallel(
        subject, shard(subject.captured, 1), cp=2, cp_comm_type=cp_comm_type
    )


def repeated_share(subject: Subject) -> float:
    """The share of FLOPs that each of two ranks that divide sequences computes in full."""
    program = RankProgram(subject, shard(subject.captured, 1), 0, cp=2, fused=False)
    graph = program.rewritten.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return sum(repeated(graph).values()) / max(sum(map(flops, calls)), 1)


def twice(
    check: Callable[[Subject], Cell], subject: Subject, twin: Callable[[], Subject]
) -> dict[str, Any]:
    """In fp32, and again in fp64 where that misses: rounding gets better there, a mistake
    does not.
    """
    cell, failure = attempt(lambda: check(subject))
    if cell is not None and cell.state == WRONG:
        with doubled():
            again, why = attempt(lambda: check(twin()))
        text = f"fp32: loss {cell.loss:.1e}, gradient {cell.gradient:.1e} {cell.where}".rstrip()
        if again is not None:
            cell = Cell(again.state, again.loss, again.gradient, again.where, text)
        else:
            cell = replace(cell, text=f"{text}. In fp64: {why.text}")
    return (cell or failure).to_dict()


def attempt(work: Callable[[], Any]) -> tuple[Any, Cell]:
    """(result, ...) or (None, why not)."""
    try:
        return work(), Cell(BROKEN)
    except MerakError as error:
        return None, Cell(REFUSED, text=f"{type(error).__name__}: {error}")
    except Exception as error:
        last = traceback.format_exception(error)[-6:]
        return None, Cell(
            BROKEN, text=f"{type(error).__name__}: {error}"[:300] + "\n" + "".join(last)[-1500:]
        )

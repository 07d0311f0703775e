"""Agreement between ranks: JSON sent in tensors, without pickle, and errors that every rank raises.

Every function is collective: all ranks of ``group`` call it, in the same order. With ``group`` None
this process is alone and nothing is sent. ``device`` is the device of the tensors that the group's
backend sends ("cpu" for gloo).
"""

import json
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..counting import named_ranks
from ..errors import MerakError

_RANKS_NAMED = 8
_LONGEST_TRACE = 20_000  # characters, of which the last ones count


def gather_json(value: object, group: dist.ProcessGroup | None, device: torch.device | str) -> list:
    """Return the values of all ranks, in rank order, on every rank.

    ``value`` is anything that JSON can represent; a tuple becomes a list, an integer key a string,
    on the sender too.
    """
    text = json.dumps(value).encode()
    if group is None:
        return [json.loads(text)]
    world = dist.get_world_size(group)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(gathered, length, group=group)
    lengths: list[int] = torch.cat(gathered).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    padded = padded.to(device)
    texts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(_as_bytes(text[:n])) for text, n in zip(texts, lengths, strict=True)]


def alike(value: object, group: dist.ProcessGroup | None) -> bool:
    """Return on every rank of ``group``, of CPU tensors, whether all have the same value, by its
    checksum.

    One small collective, for what a step asks each time and what almost always is so.
    """
    if group is None:
        return True
    code = zlib.crc32(json.dumps(value).encode())
    bounds = torch.tensor([code, -code])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    return bounds[0].item() == -bounds[1].item()


def broadcast_json(
    value: object, group: dist.ProcessGroup | None, device: torch.device | str, source: int = 0
) -> Any:
    """Return the ``value`` of the rank ``source`` of the group on every rank; what other ranks pass
    is ignored.
    """
    if group is None:
        return json.loads(json.dumps(value))
    first = dist.get_rank(group) == source
    text = json.dumps(value).encode() if first else b""
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=source)
    if first:
        payload = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    else:
        payload = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(payload, group=group, group_src=source)
    return json.loads(_as_bytes(payload))


def raise_together(
    error: Exception | None, group: dist.ProcessGroup | None, device: torch.device | str
) -> None:
    """Return when no rank has an error; otherwise raise on every rank, naming the ranks that
    failed.

    All ranks raise the error of the lowest failing rank: its type, ``what``, ``value`` and
    ``remedy`` unchanged, its ``reason`` prefixed with the global rank. Other exceptions become a
    ``MerakError`` with the traceback of that rank. Where the failure occurred, the original
    exception is the ``__cause__``. Without a group the error is raised unchanged.
    """
    if group is None:
        if error is not None:
            raise error
        return
    reports = gather_json(None if error is None else _report(error), group, device)
    ranks = dist.get_process_group_ranks(group)
    failed = [
        (rank, report) for rank, report in zip(ranks, reports, strict=True) if report is not None
    ]
    if failed:
        raise _merge(failed) from error


@contextmanager
def together(group: dist.ProcessGroup | None, device: torch.device | str) -> Iterator[None]:
    """Run a body without collectives, which may fail on some ranks only, and `raise_together` at
    its end.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error, group, device)


def _as_bytes(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().tobytes()


def _report(error: Exception) -> dict:
    if not isinstance(error, MerakError):
        return {
            "type": MerakError.__name__,
            "what": type(error).__name__,
            "value": str(error),
            "reason": "this failure was not foreseen",
            "remedy": "Read the traceback of that rank",
            "trace": "".join(traceback.format_exception(error))[-_LONGEST_TRACE:],
        }
    value = error.value if isinstance(error.value, str | int | float | None) else str(error.value)
    return {
        "type": type(error).__name__,
        "what": str(error.what),
        "value": value,
        "reason": str(error.reason),
        "remedy": str(error.remedy),
        "trace": error.trace,
    }


def _merge(failed: list[tuple[int, dict]]) -> MerakError:
    traces = [report.pop("trace") for _, report in failed]
    report = failed[0][1]
    same = [rank for rank, other in failed if other == report]
    others = [(rank, other) for rank, other in failed if other != report]
    reason = f"on {named_ranks(same)}, {report['reason']}"
    for rank, other in others[:_RANKS_NAMED]:
        reason += f"; on rank {rank}, {other['what']} {other['value']}: {other['reason']}"
    if len(others) > _RANKS_NAMED:
        reason += f"; and {len(others) - _RANKS_NAMED} other ranks failed"
    error = _error_class(report["type"])(report["what"], report["value"], reason, report["remedy"])
    error.trace = next((trace for trace in traces if trace), "")
    return error


def _error_class(name: str) -> type[MerakError]:
    """Find a subclass by name; one that this rank has not imported becomes a plain `MerakError`."""
    pending = [MerakError]
    while pending:
        kind = pending.pop()
        if kind.__name__ == name:
            return kind
        pending.extend(kind.__subclasses__())
    return MerakError

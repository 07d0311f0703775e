"""Agreement between ranks: JSON carried by tensors, and failures that every rank raises together. No pickle.

Every function is collective: all ranks of ``group`` call it, in the same order. ``group`` None means that this process
is alone, and nothing is sent. ``device`` is the device whose tensors the group's backend moves ("cpu" for gloo).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_merak.errors import MerakError

_RANKS_NAMED = 8


def gather_json(value: object, group: dist.ProcessGroup | None, device: torch.device | str) -> list:
    """Return the values of all ranks, in rank order, on every rank.

    ``value`` is anything that JSON can say; a tuple arrives as a list and an integer key as text, on the sender too.
    """
    text = json.dumps(value).encode()
    if group is None:
        return [json.loads(text)]
    world = dist.get_world_size(group)
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(world)]
    dist.all_gather(lengths, length, group=group)
    lengths = torch.cat(lengths).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    padded = padded.to(device)
    texts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(_as_bytes(text[:n])) for text, n in zip(texts, lengths, strict=True)]


def broadcast_json(value: object, group: dist.ProcessGroup | None, device: torch.device | str) -> object:
    """Return the first rank's ``value`` on every rank; what the other ranks pass is ignored."""
    if group is None:
        return json.loads(json.dumps(value))
    first = dist.get_rank(group) == 0
    text = json.dumps(value).encode() if first else b""
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(length, group=group, group_src=0)
    if first:
        payload = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    else:
        payload = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(payload, group=group, group_src=0)
    return json.loads(_as_bytes(payload))


def raise_together(error: Exception | None, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
    """Return when no rank has an error; otherwise raise on every rank, naming the ranks that failed.

    All ranks raise the error of the lowest failing rank: its type, ``what``, ``value`` and ``remedy`` unchanged, its
    ``reason`` led by the rank (global number). An exception that is no ``MerakError`` becomes one. Where the failure
    happened, the original exception is the ``__cause__``. A process that is alone raises its error as it is.
    """
    if group is None:
        if error is not None:
            raise error
        return
    reports = gather_json(None if error is None else _report(error), group, device)
    ranks = dist.get_process_group_ranks(group)
    failed = [(rank, report) for rank, report in zip(ranks, reports, strict=True) if report is not None]
    if failed:
        raise _merge(failed) from error


@contextmanager
def together(group: dist.ProcessGroup | None, device: torch.device | str) -> Iterator[None]:
    """Run a body that may fail on some ranks only, and `raise_together` at its end. The body holds no collective."""
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
            "type": "MerakError",
            "what": type(error).__name__,
            "value": str(error),
            "reason": "this failure was not foreseen",
            "remedy": "Read the traceback of that rank",
        }
    value = error.value if isinstance(error.value, str | int | float | None) else str(error.value)
    return {
        "type": type(error).__name__,
        "what": str(error.what),
        "value": value,
        "reason": str(error.reason),
        "remedy": str(error.remedy),
    }


def _merge(failed: list[tuple[int, dict]]) -> MerakError:
    report = failed[0][1]
    alike = [rank for rank, other in failed if other == report]
    others = [(rank, other) for rank, other in failed if other != report]
    reason = f"on {_name_ranks(alike)}, {report['reason']}"
    for rank, other in others[:_RANKS_NAMED]:
        reason += f"; on rank {rank}, {other['what']} {other['value']}: {other['reason']}"
    if len(others) > _RANKS_NAMED:
        reason += f"; and {len(others) - _RANKS_NAMED} other ranks failed"
    return _error_class(report["type"])(report["what"], report["value"], reason, report["remedy"])


def _name_ranks(ranks: list[int]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:_RANKS_NAMED])
    more = f" and {len(ranks) - _RANKS_NAMED} more" if len(ranks) > _RANKS_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _error_class(name: str) -> type[MerakError]:
    """Find a subclass by name; one that this rank has not imported becomes a plain `MerakError`."""
    pending = [MerakError]
    while pending:
        kind = pending.pop()
        if kind.__name__ == name:
            return kind
        pending.extend(kind.__subclasses__())
    return MerakError

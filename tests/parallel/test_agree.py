"""Ranks agree: values arrive everywhere in rank order, and one rank's failure is everyone's."""

import pytest
import torch.distributed as dist

from megatron_merak.errors import CheckpointError, ConfigError, MerakError
from megatron_merak.parallel.agree import broadcast_json, gather_json, raise_together, together
from tests.ranks import run_ranks


def _gather(rank: int, world_size: int) -> tuple:
    group = dist.group.WORLD
    value = None if rank == 1 else {"rank": rank, "text": "é" * (7 * rank)}
    everyone = gather_json(value, group, "cpu")
    return everyone, broadcast_json(["from", rank], group, "cpu")


def test_values_of_unequal_length_arrive_on_every_rank_in_rank_order():
    want = [{"rank": 0, "text": ""}, None, {"rank": 2, "text": "é" * 14}]
    for everyone, first in run_ranks(_gather, 3):
        assert everyone == want
        assert first == ["from", 0]


def _caught(error: Exception | None, group: dist.ProcessGroup) -> dict:
    try:
        raise_together(error, group, "cpu")
    except MerakError as raised:
        return {
            "type": type(raised).__name__,
            "fields": (raised.what, raised.value, raised.reason, raised.remedy),
            "text": str(raised),
            "cause": type(raised.__cause__).__name__,
        }
    return {}


def _fail(rank: int, world_size: int) -> list[dict]:
    world = dist.group.WORLD
    typed = ConfigError("--split", 7, "it does not add up", "Give three numbers")
    outcomes = [
        _caught(None, world),
        _caught(typed if rank == 1 else None, world),
        _caught(typed if rank != 1 else None, world),
        _caught([typed, None, KeyError("x")][rank], world),
    ]
    pair = dist.new_group([1, 2])
    if rank > 0:
        outcomes.append(_caught(typed if rank == 2 else None, pair))
    return outcomes


def test_a_failure_is_raised_on_every_rank_with_its_type_and_fields():
    outcomes = run_ranks(_fail, 3)
    for rank, (none, one, two, mixed, *pair) in enumerate(outcomes):
        assert none == {}
        assert one["type"] == "ConfigError"
        assert one["fields"] == (
            "--split",
            7,
            "on rank 1, it does not add up",
            "Give three numbers",
        )
        assert one["cause"] == ("ConfigError" if rank == 1 else "NoneType")
        assert two["text"] == "--split 7: on ranks 0, 2, it does not add up. Give three numbers."
        assert mixed["type"] == "ConfigError" and "on rank 2, KeyError 'x'" in mixed["text"]
        assert [outcome["fields"][2] for outcome in pair] == ["on rank 2, it does not add up"] * (
            rank > 0
        )


def _foreign(rank: int, world_size: int) -> tuple[str, str]:
    group = dist.group.WORLD
    try:
        with together(group, "cpu"), together(group, "cpu"):
            if rank == 1:
                raise KeyError("lost")
    except MerakError as error:
        return f"{type(error).__name__} {error}", error.trace
    return "", ""


def test_an_unforeseen_exception_becomes_typed_and_names_the_rank():
    for text, trace in run_ranks(_foreign, 2):
        assert text.startswith("MerakError KeyError 'lost': on rank")
        assert 'raise KeyError("lost")' in trace and trace.count("Traceback") == 1


def test_a_process_alone_keeps_its_own_error():
    assert gather_json({"a": (1, 2)}, None, "cpu") == [{"a": [1, 2]}]
    assert broadcast_json(3, None, "cpu") == 3
    raise_together(None, None, "cpu")
    error = CheckpointError("checkpoint", "x", "gone", "look")
    with pytest.raises(CheckpointError) as caught, together(None, "cpu"):
        raise error
    assert caught.value is error

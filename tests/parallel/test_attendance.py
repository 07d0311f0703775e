"""Calls that every rank must make."""

import time

import pytest

from megatron_merak.errors import ConfigError
from megatron_merak.parallel.attendance import attend
from tests.ranks import run_ranks


def differing(rank, world_size):
    import torch.distributed as dist

    attend("evaluate", dist.group.WORLD)
    with pytest.raises(ConfigError) as error:
        attend("save_model" if rank == 0 else "train", dist.group.WORLD)
    return str(error.value)


def test_other_calls_are_an_error_on_every_rank():
    for text in run_ranks(differing, 2):
        assert (
            "rank 1 train: rank 0 is in save_model, and both need all ranks. Call it on every rank"
            in text
        )


def late(rank, world_size, path):
    import sys

    import torch.distributed as dist

    sys.stderr = open(f"{path}/{rank}", "w")
    time.sleep(1.0 * rank)
    attend("save_model", dist.group.WORLD, patience=0.2)
    sys.stderr.close()


def test_a_rank_that_waits_says_for_what(tmp_path):
    run_ranks(late, 2, str(tmp_path))
    assert "in save_model for ranks that did not call it" in (tmp_path / "0").read_text()
    assert (tmp_path / "1").read_text() == ""


def test_a_process_alone_waits_for_nobody():
    attend("train", None)

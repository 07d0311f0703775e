"""Dumps that torch's own flight recorder makes of gloo ranks, and what is told of them."""

import os
import pickle
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_merak.cli.doctor import main
from megatron_merak.errors import DataError
from megatron_merak.report.flight_recorder import explained, read_dumps
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="torch records none"
)


def recorded(rank, size, directory, case):
    """Run collectives of which some never end, and write what was recorded."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    # Ranks end when what they wait in has run out of time.
    group = dist.new_group([0, 1], group_desc="dp", timeout=timedelta(seconds=1))
    x = torch.ones(4, 2)
    for _ in range(2):
        dist.all_reduce(x, group=group)
    works = []
    if case == "absent" and rank == 0:
        works.append(dist.all_reduce(x, group=group, async_op=True))
    if case == "different":
        y = torch.ones(3 if rank else 5)
        call = dist.broadcast if rank else dist.all_reduce
        arguments = [y, 0] if rank else [y]
        works.append(call(*arguments, group=group, async_op=True))
    time.sleep(0.2)
    content = torch._C._distributed_c10d._dump_fr_trace()
    (directory / f"nccl_trace_rank_{rank}").write_bytes(content)
    return len(works)


CASES = {
    "ended": ["every collective that was begun has ended on each of these ranks"],
    "absent": [
        "group 1 (dp): rank 0 has begun all_reduce 3 of 4x2 Float at HERE",
        "group 1 (dp): rank 1 has not begun number 3; its last is all_reduce 2 of 4x2 Float at HERE",
    ],
    "different": [
        "group 1 (dp): rank 0 has begun all_reduce 3 of 5 Float at HERE",
        "group 1 (dp): rank 1 has begun broadcast 3 of 3 Float at HERE",
        "group 1 (dp): these differ, so that they wait for each other for ever",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_what_ranks_wait_in_is_told(case, tmp_path, capsys):
    run_ranks(recorded, 2, tmp_path, case)
    assert main(["--flight-recorder", str(tmp_path / "nccl_trace_rank_")]) == 0
    told = re.sub(r"\S*test_flight_recorder.py:\d+", "HERE", capsys.readouterr().out)
    assert told.splitlines() == ["2 ranks recorded collectives", *CASES[case]]


def entry(number, state, name="all_reduce", p2p=False, sizes=((4,),)):
    return {
        "frames": [],
        "process_group": ("7", "pp"),
        "collective_seq_id": 0 if p2p else number,
        "p2p_seq_id": number if p2p else 0,
        "profiling_name": f"nccl:{name}",
        "input_sizes": sizes,
        "input_dtypes": ["BFloat16"],
        "state": state,
        "retired": False,
        "is_p2p": p2p,
    }


def write(directory, rank, *entries, ranks="[0, 1, 2]"):
    """A dump as NCCL's has it: with the ranks of its groups."""
    content = {"version": "2.10", "pg_config": {"7": {"ranks": ranks}}, "entries": [*entries]}
    (directory / f"dump{rank}").write_bytes(pickle.dumps(content))


def test_links_lost_ranks_and_records_that_begin_later(tmp_path):
    write(tmp_path, 0, entry(1, "completed"), entry(2, "started"))
    write(tmp_path, 1, entry(2, "started"), entry(5, "scheduled", "recv 0<-1", p2p=True))
    assert explained(read_dumps(tmp_path)) == [
        "group 7 (pp): ranks 0, 1 have begun all_reduce 2 of 4 BFloat16",
        "group 7 (pp): all have begun it, so look at the links between these ranks",
        "group 7 (pp): rank 1 waits in recv 0<-1 5 of 4 BFloat16",
        "group 7 (pp): there is no dump of rank 2",
    ]
    write(tmp_path, 2)
    assert "group 7 (pp): rank 2 has not begun number 1, nor any other of this group" in explained(
        read_dumps(tmp_path)
    )


class Calls:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pickle.dumps(Calls()), "it names posix.system"),
        (b"cut", "it is no dump"),
        (pickle.dumps({"entries": [{}]}), "it is no dump"),
        (pickle.dumps([1]), "it is no dump"),
    ],
)
def test_other_files_are_refused(content, reason, tmp_path):
    (tmp_path / "rank0").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_dumps(tmp_path)


def test_places_without_dumps(tmp_path, capsys):
    assert main(["--flight-recorder", str(tmp_path)]) == 1
    assert "there is no file whose name ends with a rank" in capsys.readouterr().err
    for name in ("a0", "b0"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match="a0 and b0 are both of rank 0"):
        read_dumps(tmp_path)

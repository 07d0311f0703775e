"""Shared memory when something is wrong: ranks that die, hang or disagree, mounts that are full,
hosts that differ.
"""

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_merak import _native
from megatron_merak.parallel import shared_segment
from megatron_merak.parallel.launch import launch, leave
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.shared_memory import SharedMemoryGroup, register
from megatron_merak.parallel.shared_segment import MOUNT, NAME, SegmentSettings, sweep
from megatron_merak.plan import Grid
from tests.parallel.test_launch import VARIABLES, free_port
from tests.ranks import PRELOAD, run_ranks

BUILT = hasattr(_native.host(), "shared_memory")
needs_build = pytest.mark.skipif(
    not BUILT, reason="the compiled part is missing: " + _native.host_problem()
)
SMALL = SegmentSettings(slots=4, slot_sizes=(4096,))
SECONDS = 60  # of the groups: what ends sooner did not wait for them


def shared(n):
    register(SMALL)
    group = dist.new_group(
        list(range(n)), backend="merak_shm", timeout=datetime.timedelta(seconds=SECONDS)
    )
    assert type(group) is SharedMemoryGroup
    return group


# ---- Ranks that end: not by run_ranks, which ends the others


def member(pipe, fn, rank, n, store, args):
    limit = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, n), rank=rank, world_size=n, timeout=limit
    )
    try:
        pipe.send(fn(rank, n, *args))
    except BaseException:
        pipe.send(traceback.format_exc())
    pipe.close()
    os._exit(0)


def survivors(tmp_path, fn, n, *args):
    """What each rank returned, None where it died; and the seconds from the first death to the last
    answer.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    pipes, processes = [], []
    for rank in range(n):
        pipe, theirs = context.Pipe(duplex=False)
        arguments = (theirs, fn, rank, n, str(tmp_path / "store"), args)
        processes.append(context.Process(target=member, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(pipe)
    try:
        died = multiprocessing.connection.wait([process.sentinel for process in processes], SECONDS)
        assert died, "nobody ended"
        start, found = time.monotonic(), []
        for pipe in pipes:
            assert pipe.poll(SECONDS), "a rank is still waiting"
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append(None)
        return found, time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.join()


def left(pids):
    """Names in the mount that first ranks with these process ids made."""
    return [path.name for path in MOUNT.glob(f"{NAME}-*") if int(path.name.split("-")[1]) in pids]


def told(wait):
    """(the error that ends ``wait``, seconds it took)."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        wait()
    return str(error.value), time.monotonic() - start


def one_dies(rank, n, victim, size):
    group = shared(n)
    tensor = torch.ones(size)
    for _ in range(3):
        dist.all_reduce(tensor, group=group)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    message, _ = told(lambda: dist.all_reduce(tensor, group=group))
    again, seconds = told(lambda: dist.all_reduce(tensor, group=group))
    return os.getpid(), message, again, seconds


@needs_build
@pytest.mark.parametrize(("n", "victim", "size"), [(2, 1, 4), (3, 0, 4), (3, 1, 100_000)])
def test_a_killed_rank_ends_the_waits_of_the_others_at_once(tmp_path, n, victim, size):
    found, seconds = survivors(tmp_path, one_dies, n, victim, size)
    assert found[victim] is None and seconds < 10
    for rank in set(range(n)) - {victim}:
        pid, message, again, seconds = found[rank]
        assert (
            f"rank {victim} has ended" in message
            and f"all-reduce of {4 * size} bytes of float32, sum" in message
        )
        assert "shared memory of group" in message and again == message and seconds < 1
    assert left([one[0] for one in found if one]) == []


def killed_in_the_middle(rank, n):
    group, tensor = shared(n), torch.ones(1_000_000)
    if rank == 1:
        timer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {os.getpid()}"])
        assert timer.pid
    try:
        while True:
            dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        return str(error)


@needs_build
def test_a_rank_killed_in_the_middle_of_a_message(tmp_path):
    found, seconds = survivors(tmp_path, killed_in_the_middle, 3)
    assert found[1] is None and seconds < 10
    assert all("rank 1 has ended" in found[rank] for rank in (0, 2))


# ---- Ranks that hang, disagree or give up


def one_hangs(rank, n, seconds):
    group, tensor = shared(n), torch.ones(4)
    if seconds is None:
        group.set_timeout(datetime.timedelta(seconds=0.5))
    dist.all_reduce(tensor, group=group)
    found = None
    if rank != 1:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        limit = [datetime.timedelta(seconds=seconds)] if seconds else []
        found = told(lambda: work.wait(*limit))
    dist.barrier()
    return found


@needs_build
@pytest.mark.parametrize("seconds", [0.5, None])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(seconds):
    first, none, last = run_ranks(one_hangs, 3, seconds)
    assert none is None and 0.4 < first[1] < 10
    for message, _ in (first, last):
        assert (
            "has waited 0.5" in message
            and "for rank 1 in an all-reduce of 16 bytes of float32, sum" in message
        )
    assert first[0] == last[0], "both say what broke the group first"


def disagreeing(rank, n, what):
    group, tensor = shared(n), torch.ones(8)
    calls = {
        "size": lambda: dist.all_reduce(tensor[: 8 - rank], group=group),
        "type": lambda: dist.all_reduce(tensor if rank else tensor.int(), group=group),
        "operation": lambda: dist.all_reduce(
            tensor, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM, group
        ),
        "collective": lambda: (
            dist.all_reduce(tensor, group=group)
            if rank
            else dist.broadcast(tensor, group=group, group_src=1)
        ),
        "root": lambda: dist.broadcast(tensor, group=group, group_src=1 - rank),
    }
    return told(calls[what])[0]


@needs_build
@pytest.mark.parametrize("what", ["size", "type", "operation", "collective", "root"])
def test_ranks_that_call_different_collectives(what):
    found = run_ranks(disagreeing, 2, what)
    assert all("launched another collective or size" in message for message in found), found


def aborting(rank, n):
    group, tensor = shared(n), torch.ones(4)
    if rank == 0:
        time.sleep(0.3)
        group.abort()
        return told(lambda: dist.all_reduce(tensor, group=group))[0]
    return told(lambda: dist.all_reduce(tensor, group=group))[0]


@needs_build
def test_abort_ends_the_waits_of_all():
    assert all("rank 0 of the group aborted it" in message for message in run_ranks(aborting, 3))


class Rung(Exception):
    pass


def ring(*_):
    raise Rung


def interrupted(rank, n):
    """A signal ends a wait; the group goes on."""
    group, tensor = shared(n), torch.ones(4)
    if rank == 0:
        signal.signal(signal.SIGALRM, ring)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Rung):
            work.wait()
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.all_reduce(tensor, group=group)
    return tensor.eq(n).all().item()


@needs_build
def test_signals_are_heard():
    assert run_ranks(interrupted, 2) == [True] * 2


# ---- Falling back


def made(rank, n, settings):
    """(warnings, whether memory is shared, a sum, names left)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        register(settings)
        group = dist.new_group(list(range(n)), backend="merak_shm")
    tensor = torch.full((3000,), rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert dist.get_backend(group) == "merak_shm"
    said = [str(one.message) for one in caught if "merak_shm" in str(one.message)]
    pids = [None] * n
    dist.all_gather_object(pids, os.getpid(), group=group)
    return said, type(group) is SharedMemoryGroup, tensor[-1].item(), left(pids)


def differing_hosts(rank, n):
    return made(rank, n, SegmentSettings(host=f"host {rank}"))


def without_the_build(rank, n, missing):
    if rank in missing:
        os.environ["MERAK_EXT"] = "0"
    return made(rank, n, SMALL)


def without_joining(rank, n):
    if rank == 1:
        shared_segment._join = lambda *_: (None, {"problem": "cannot open it"})
    return made(rank, n, SMALL)


def refused(found, reason):
    ranks = ", ".join(map(str, range(len(found))))
    for rank, (said, is_shared, total, names) in enumerate(found):
        assert not is_shared and total == sum(range(1, len(found) + 1)) and names == []
        assert len(said) == (rank == 0) and all(
            f"ranks {ranks} use gloo: " in one and reason in one for one in said
        ), said


@needs_build
def test_a_mount_that_is_too_full():
    refused(run_ranks(made, 3, SegmentSettings(room=2**20)), "/dev/shm has 1024 KiB left")
    refused(
        run_ranks(made, 2, SegmentSettings(room=2**62, slot_sizes=(2**48,))),
        "cannot allocate shared memory",
    )


@needs_build
def test_a_mount_with_little_room_gives_small_slots():
    assert [found[:2] for found in run_ranks(made, 2, SegmentSettings(room=2**21))] == [
        ([], True)
    ] * 2


@needs_build
def test_ranks_of_several_hosts():
    refused(run_ranks(differing_hosts, 2), "they are on several hosts")


@needs_build
def test_one_rank_that_cannot_join():
    refused(run_ranks(without_joining, 3), "cannot open it")


@pytest.mark.parametrize("missing", [[0, 1], [1]])
def test_without_the_compiled_part(missing):
    if BUILT or missing == [0, 1]:
        refused(run_ranks(without_the_build, 2, missing), "MERAK_EXT=0")


@needs_build
def test_more_ranks_than_cores():
    assert run_ranks(made, 4, SegmentSettings(ranks_here=1000)) == [([], True, 10, [])] * 4


def alone(rank, n):
    register(SMALL)
    groups = [dist.new_group([one], backend="merak_shm") for one in range(n)]
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=groups[rank])
    return tensor.tolist()


def test_a_group_of_one():
    assert run_ranks(alone, 2) == [[1, 1]] * 2


# ---- Names in the mount


@needs_build
def test_the_segment_of_another_group_is_not_joined():
    part = _native.host().shared_memory
    shape, seats = (
        part.Shape(2, 4, 4096),
        [part.Seat(place, [0, 1], "test", False) for place in range(2)],
    )
    name = f"/{NAME}-{os.getpid()}-test"
    first = part.Communicator.create(name, 17, shape, seats[0])
    try:
        with pytest.raises(OSError, match="cannot create shared memory .*File exists"):
            part.Communicator.create(name, 17, shape, seats[0])
        for token, other in ((18, shape), (17, part.Shape(2, 8, 4096))):
            with pytest.raises(RuntimeError, match="is not the first rank's"):
                part.Communicator.join(name, token, other, seats[1])
        second = part.Communicator.join(name, 17, shape, seats[1])
    finally:
        part.unlink(name)
    with pytest.raises(OSError, match="cannot open shared memory"):
        part.Communicator.join(name, 17, shape, seats[1])
    a, b = torch.ones(3), torch.ones(3)
    number = first.all_reduce(
        a.data_ptr(), a.data_ptr(), 12, part.Element.float32, part.Reduction.sum, 1.0
    )
    assert number == 1 and not first.test(1, 1.0)
    second.all_reduce(b.data_ptr(), b.data_ptr(), 12, part.Element.float32, part.Reduction.sum, 1.0)
    first.wait(1, 1.0)
    second.wait(1, 1.0)
    assert a.tolist() == b.tolist() == [2] * 3 and left([os.getpid()]) == []


def test_names_that_a_killed_rank_left_are_removed(tmp_path):
    old, young, other = (
        tmp_path / name for name in (f"{NAME}-1-a", f"{NAME}-2-b", "something-else")
    )
    held = tmp_path / f"{NAME}-3-c"
    for path in (old, young, other, held):
        path.write_bytes(b"12345678")
    for path in (old, other, held):
        os.utime(path, (1, 1))
    lock = "f = open(sys.argv[1], 'r+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1); print(1, flush=True); input()"
    command = [sys.executable, "-c", f"import fcntl, sys; {lock}", held]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"1\n"
        sweep(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [young.name, other.name, held.name]
        )
    finally:
        holder.kill()
        holder.communicate()
    sweep(tmp_path)
    assert not held.exists() and young.exists()


# ---- Joining a job


def join(rank, n, port):
    dist.destroy_process_group()
    values = (rank, n, rank, "127.0.0.1", port)
    os.environ.update({name: str(value) for name, value in zip(VARIABLES, values, strict=True)})
    world = launch("merak_shm")
    mesh = build_mesh(Grid(tp=2, pp=2), rank, world.device, collectives=world.collectives)
    tensor = torch.full((2,), rank + 1.0)
    dist.all_reduce(tensor, group=mesh.tp)
    kinds = [
        type(getattr(mesh, axis)) is SharedMemoryGroup for axis in ("tp", "pp", "model", "control")
    ]
    leave(world)
    return world.collectives, str(world.device), kinds, tensor[0].item()


@needs_build
def test_a_job_that_asks_for_it_has_it_where_ranks_share_layers():
    kinds = [True, False, False, False]
    assert run_ranks(join, 4, free_port()) == [
        ("merak_shm", "cpu", kinds, 3 + 4 * (rank // 2)) for rank in range(4)
    ]

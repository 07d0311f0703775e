"""Collectives through shared memory: whole numbers to the bit, rounding in the order of ranks,
training with gloo's.
"""

import datetime
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from megatron_merak import _native
from megatron_merak.parallel.mesh import build_mesh
from megatron_merak.parallel.shared_memory import SharedMemoryGroup, register
from megatron_merak.parallel.shared_segment import SegmentSettings
from megatron_merak.plan import Grid
from tests.parity.cases import Case
from tests.parity.rig import mesh_of, train
from tests.ranks import run_ranks

from .collectives import OPS, bits, each_collective, gather_single, whole

pytestmark = pytest.mark.skipif(
    not hasattr(_native.host(), "shared_memory"),
    reason="the compiled part is missing: " + _native.host_problem(),
)

CPU = torch.device("cpu")
SLOT = 4096  # bytes: small, so that small messages have many blocks
SMALL = SegmentSettings(slots=4, slot_sizes=(SLOT,))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
# of 2 to 8 bytes: a part of a block, a block, one more, up to 18 blocks
SIZES = (0, 1, 7, 1021, 2048, 2049, 9001)


def shared(ranks, settings=SMALL, **options):
    """A group in shared memory, and not in gloo because something was not there."""
    register(settings)
    group = dist.new_group(ranks, backend="merak_shm", **options)
    assert dist.get_rank() not in ranks or type(group) is SharedMemoryGroup
    return group


def collectives(rank, n):
    group, wrong, seed = shared(list(range(n))), [], 0
    for dtype in DTYPES:
        for size in SIZES:
            for later in (False, True):
                seed += 1
                for name, work, found, wanted in each_collective(
                    rank, n, whole(seed, n, n * size, dtype), size, group, later
                ):
                    if later:
                        assert work.wait() and work.is_completed() and work.wait()
                    if not all(map(torch.equal, found, wanted)):
                        wrong.append((name, dtype, size, later))
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_collective_of_every_type_and_size(n):
    assert run_ranks(collectives, n, timeout=100) == [[]] * n


def numbers(seed, n, size, dtype):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, size, generator=generator) * 10 ** torch.linspace(-3, 3, size)).to(dtype)


def rounding(rank, n):
    group, found = shared(list(range(n))), {}
    for dtype in DTYPES[:4]:
        for size in (5, 1021, 9001):
            given = numbers(size, n, size, dtype)
            wide = given.float() if dtype.itemsize == 2 else given
            total = wide[0]
            for other in wide[1:]:
                total = total + other
            for _ in range(2):
                tensor = given[rank].clone()
                dist.all_reduce(tensor, group=group)
                assert torch.equal(tensor, total.to(dtype)), (dtype, size)
            if n == 2:  # in which order makes no difference
                gloos = given[rank].clone()
                dist.all_reduce(gloos)
                assert torch.equal(gloos, tensor), (dtype, size)
            found[str(dtype), size] = tensor
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_round_in_the_order_of_ranks_and_once(n):
    first, *others = run_ranks(rounding, n)
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)


def special(rank, n):
    group, results = shared(list(range(n))), []
    nan, inf = float("nan"), float("inf")
    given = torch.tensor(
        [[nan, 1, inf, -inf, -inf, 6e4, 1e-7], [1, nan, -inf, -inf, 2, 6e4, -1e-7], [0.0] * 7]
    )[:n]
    for dtype in DTYPES[:4]:
        for op in OPS:
            tensor = given[rank].to(dtype, copy=True)
            dist.all_reduce(tensor, op, group)
            total = given.to(dtype).to(torch.float64)
            expected = (total.sum(0) if op == dist.ReduceOp.SUM else total.amax(0)).to(dtype)
            results.append(torch.equal(tensor.nan_to_num(7.5), expected.nan_to_num(7.5)))
            results.append(torch.equal(tensor.isnan(), expected.isnan()))
    return all(results)


@pytest.mark.parametrize("n", [2, 3])
def test_infinite_and_undefined_numbers(n):
    assert run_ranks(special, n) == [True] * n


def strided(rank, n):
    group = shared(list(range(n)))
    given = whole(5, n, 60, torch.float32).view(n, 6, 10)
    for later in (False, True):
        tensor = given[rank].clone().t()
        assert not tensor.is_contiguous()
        work = dist.all_reduce(tensor, group=group, async_op=later)
        assert not later or work.wait()
        assert torch.equal(tensor, given.sum(0).t())
        tensor = torch.zeros(6, 20)[:, ::2].copy_(given[rank])
        work = dist.broadcast(tensor, group=group, group_src=1, async_op=later)
        assert not later or work.wait()
        assert torch.equal(tensor, given[1])
        parts = [torch.zeros(10, 6).t() for _ in range(n)]
        work = dist.all_gather(parts, given[rank], group, async_op=later)
        assert not later or work.wait()
        assert all(map(torch.equal, parts, given))
    weight = nn.Parameter(given[rank].clone().t())
    dist.all_reduce(weight, group=group)
    return torch.equal(weight, given.sum(0).t())


def test_tensors_that_are_not_dense():
    assert run_ranks(strided, 2) == [True] * 2


def in_flight(rank, n, order):
    """Many collectives of all lengths under way, awaited in an order of this rank's own."""
    group = shared(list(range(n)))
    for turn in range(3):
        given = [whole(100 * turn + k, n, 1 + 611 * k % 9001, torch.float32) for k in range(40)]
        tensors = [one[rank].clone() for one in given]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        wanted = list(range(40))
        if order == "backwards":
            wanted.reverse()
        elif order == "shuffled":
            random.Random(rank).shuffle(wanted)
        elif order == "last" or (order == "different" and rank == 0):
            wanted = [39]
        for k in wanted:
            works[k].wait(datetime.timedelta(seconds=30))
            assert torch.equal(tensors[k], given[k].sum(0)), k
        assert all(work.is_completed() for work in works)
        assert all(
            torch.equal(tensor, one.sum(0)) for tensor, one in zip(tensors, given, strict=True)
        )
    return True


@pytest.mark.parametrize(
    ("n", "order"),
    [(2, "backwards"), (2, "different"), (3, "shuffled"), (3, "last"), (4, "shuffled")],
)
def test_many_under_way_and_waits_in_any_order(n, order):
    assert run_ranks(in_flight, n, order) == [True] * n


def early_and_late(rank, n):
    """A wait ends as soon as the others have launched, though they do not wait themselves: they
    wait for this rank.
    """
    group = shared(list(range(n)))
    tensor, token = torch.full((SLOT // 4,), rank + 1.0), torch.zeros(1)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert not work.is_success()
    if rank == 0:
        work.wait()
        dist.send(tensor[:1], 1)
    elif rank == 1:
        dist.recv(token, 0)
    work.wait()
    return tensor[-1].item(), token.item()


def test_what_fits_needs_no_more_than_the_others_launch():
    assert run_ranks(early_and_late, 2) == [(3, 0), (3, 3)]


def polled(rank, n):
    group = shared(list(range(n)))
    tensor, token = torch.ones(20 * SLOT), torch.ones(1)
    if rank == 1:
        dist.recv(token, 0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if rank == 0:
        assert not work.is_completed(), "the other has not launched it"
        dist.send(token, 1)
    while not work.is_completed():
        pass
    dropped = torch.ones(3 * SLOT)
    dist.all_reduce(dropped, group=group, async_op=True)
    future = dist.all_reduce(torch.ones(5), group=group, async_op=True).get_future()
    assert future.done() and dropped.eq(n).all(), (
        "a work that nobody kept is finished with a later one"
    )
    return tensor.eq(n).all().item() and future.value()[0].eq(n).all().item()


def test_polling_finishes_it_and_nobody_has_to_keep_a_work():
    assert run_ranks(polled, 2) == [True] * 2


def the_rest(rank, n):
    """Everything that gloo does for the group."""
    group = shared(list(range(n)))
    assert (
        dist.get_backend(group) == "merak_shm" and group.group_name and group._device_types == [CPU]
    )
    found = {}
    tensor = torch.full((3,), rank + 2.0)
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT, group)
    found["product"] = tensor[0].item()
    tensor = torch.full((3,), rank + 2, dtype=torch.uint8)
    dist.all_reduce(tensor, group=group)
    found["uint8"] = tensor[0].item()
    tensor = torch.full((3,), rank + 1.0)
    dist.reduce(tensor, 0, group=group)
    found["reduce"] = tensor[0].item() if rank == 0 else None
    parts = [torch.zeros(2) for _ in range(n)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), parts, 0, group=group)
    found["gather"] = [part[0].item() for part in parts or ()]
    tensor = torch.zeros(2)
    dist.scatter(
        tensor, [torch.full((2,), 5.0 + k) for k in range(n)] if rank == 0 else None, 0, group=group
    )
    found["scatter"] = tensor[0].item()
    tensor = torch.zeros(n)
    dist.all_to_all_single(tensor, torch.arange(n) + 10.0 * rank, group=group)
    found["all_to_all"] = tensor.tolist()
    request = dist.isend(torch.tensor([float(rank)]), (rank + 1) % n, group=group, tag=3)
    tensor = torch.zeros(1)
    dist.irecv(tensor, (rank - 1) % n, group=group, tag=3).wait()
    request.wait()
    found["message"] = tensor.item()
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    found["objects"] = [one["rank"] for one in objects]
    objects = ["from", 0] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0, group=group)
    found["broadcast"] = objects
    dist.barrier(group)
    bools = torch.zeros(n, 2, dtype=torch.bool)
    gather_single(bools, torch.tensor([[rank == 1, True]]), group)
    found["bools"] = bools[:, 0].tolist()
    return found


def test_gloo_does_the_rest():
    for rank, found in enumerate(run_ranks(the_rest, 3)):
        assert found == {
            "product": 24,
            "uint8": 9,
            "reduce": 6 if rank == 0 else None,
            "gather": [0, 1, 2] if rank == 0 else [],
            "scatter": 5 + rank,
            "all_to_all": [rank, 10 + rank, 20 + rank],
            "message": (rank - 1) % 3,
            "objects": [0, 1, 2],
            "broadcast": ["from", 0],
            "bools": [False, True, False],
        }


def traced(rank, n):
    group = shared(list(range(n)))
    mine = whole(1, n, 3000, torch.float32)
    summed = functional.all_reduce(mine[rank], "sum", group)
    gathered = functional.all_gather_tensor(mine[rank], 0, group)
    scattered = functional.reduce_scatter_tensor(mine[rank], "sum", 0, group)
    assert torch.equal(summed + 0, mine.sum(0)) and torch.equal(gathered + 0, mine.reshape(-1))
    assert torch.equal(scattered + 0, mine.sum(0).view(n, -1)[rank])
    both = functional.all_gather_into_tensor_coalesced([mine[rank], mine[rank, :7]], group)
    assert torch.equal(both[0] + 0, mine.reshape(-1)) and torch.equal(
        both[1] + 0, mine[:, :7].reshape(-1)
    )
    return True


def test_functional_collectives():
    assert run_ranks(traced, 2) == [True] * 2


def gradients(group):
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(100, 100), nn.ReLU()) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.05
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(8, 100, generator=generator)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def replicas(rank, n):
    ours, gloos = gradients(shared(list(range(n)))), gradients(dist.new_group(backend="gloo"))
    return all(map(torch.equal, ours, gloos))


def test_data_parallel_modules_have_gloos_gradients():
    assert run_ranks(replicas, 2) == [True] * 2


def overlapping(rank, n):
    """Rows and columns of a square of ranks and all of them, under way together, in different
    orders of waiting.
    """
    members = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3]]
    groups = [(ranks, group) for ranks in members for group in [shared(ranks)] if rank in ranks]
    for turn in range(5):
        works = []
        for ranks, group in groups:
            given = whole(turn, n, 5000, torch.float32)
            tensor = given[rank].clone()
            works.append(
                (dist.all_reduce(tensor, group=group, async_op=True), tensor, given[ranks].sum(0))
            )
        for work, tensor, expected in works if turn % 2 else reversed(works):
            work.wait()
            assert torch.equal(tensor, expected)
    dist.destroy_process_group(groups[0][1])
    with pytest.raises(RuntimeError, match="has been closed"):
        groups[0][1].allreduce([torch.ones(1)])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=groups[2][1])
    return tensor[0].item()


def test_groups_that_share_ranks():
    assert run_ranks(overlapping, 4) == [4] * 4


def default(rank, n, store):
    dist.destroy_process_group()
    register(SMALL)
    dist.init_process_group("merak_shm", init_method=f"file://{store}", rank=rank, world_size=n)
    group = dist.new_group()
    assert type(group) is type(dist.group.WORLD) is SharedMemoryGroup
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=group)
    mesh = build_mesh(Grid(tp=n), rank, CPU)
    assert type(mesh.tp) is SharedMemoryGroup and dist.get_backend(mesh.control) == "gloo"
    return tensor[0].item()


def test_as_the_backend_of_the_job(tmp_path):
    assert run_ranks(default, 2, str(tmp_path / "store")) == [4] * 2


def training(rank, n, case):
    """Gradients, losses and weights of a run over gloo, and of the same run with shared memory."""
    register()
    gloos = bits(train(case, mesh_of(case, rank)))
    mesh = build_mesh(Grid(tp=case.tp, dp=case.dp, pp=case.pp), rank, CPU, collectives="merak_shm")
    groups = [group for group in (mesh.tp, mesh.dp) if group is not None]
    assert groups and all(type(group) is SharedMemoryGroup for group in groups)
    assert mesh.pp is None or type(mesh.pp) is dist.ProcessGroup
    return bits(train(case, mesh)) == gloos


@pytest.mark.parametrize(
    ("n", "case"),
    [
        (2, Case("gpt2", tp=2, hidden_dropout=0.1)),
        (2, Case("gpt2", dp=2)),
        pytest.param(4, Case("gpt2", tp=2, pp=2), marks=pytest.mark.long),
        (4, Case("gpt2", tp=2, dp=2)),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, int) else f"tp{value.tp}-dp{value.dp}-pp{value.pp}"
    ),
)
def test_training_has_gloos_bits(n, case):
    assert run_ranks(training, n, case, timeout=110) == [True] * n

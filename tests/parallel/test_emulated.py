"""The emulated backend: gloo's numbers, and times that follow the rules, worked out by hand."""

import pytest
import torch
import torch.distributed as dist

from megatron_merak.cluster import DEVICES, Cluster, Link
from megatron_merak.parallel.clock import LogicalClock, WallClock
from megatron_merak.parallel.emulated import register
from megatron_merak.tensor_parallel.sequence import gather_single, reduce_scatter_single
from tests.ranks import run_ranks

# Two ranks in a node. In binary fractions of a second, so that sums of times are exact.
INSIDE, BETWEEN = Link("inside", 2**-9, 2.0**12), Link("between", 2**-7, 2.0**9)
# All four: two network cards in each node, and of three steps around the ring one crosses, (2**-7 +
# 2 * 2**-9) / 3.
ACROSS = Link("across", 2**-8, 2.0**10)
CLUSTER = Cluster(DEVICES["A100"], 2, INSIDE, BETWEEN, "test")
SIZE = 2**10  # fp32 values that take 1 s inside and 8 s between
GROUPS = {"world": [[0, 1, 2, 3]], "inside": [[0, 1], [2, 3]], "between": [[0, 2], [1, 3]]}


def groups(rank, backend):
    made = {
        name: [dist.new_group(ranks, backend=backend) for ranks in lists]
        for name, lists in GROUPS.items()
    }
    return {
        name: next(g for g in made[name] if rank in dist.get_process_group_ranks(g))
        for name in made
    }


def calls(rank, group):
    """Every collective: name -> (run, asynchronously or not, on whole numbers; what it found)."""
    n, me = group.size(), dist.get_rank(group)
    first = dist.get_global_rank(group, 0)
    generator = torch.Generator().manual_seed(rank)
    given = torch.randint(0, 1000, (SIZE,), generator=generator).float()
    parts = [given.clone() for _ in range(n)]
    whole = given.repeat(n)

    def call(function, *args, found=None, **options):
        return lambda wait: (
            function(*args, group=group, async_op=not wait, **options),
            found or args[0],
        )

    def rooted(function, tensor, tensors, found):
        mine = tensors if me == 0 else None
        return lambda wait: (function(tensor, mine, first, group=group, async_op=not wait), found)

    collected, received = [torch.empty(SIZE) for _ in range(n if me == 0 else 0)], torch.empty(SIZE)
    return {
        "all_reduce": call(dist.all_reduce, given.clone()),
        "all_reduce max": call(dist.all_reduce, given.clone(), op=dist.ReduceOp.MAX),
        "all_reduce bf16": call(dist.all_reduce, given.bfloat16()),
        "broadcast": call(dist.broadcast, given.clone(), src=first),
        "reduce": call(dist.reduce, given.clone(), dst=first),
        "all_gather": call(dist.all_gather, parts, given),
        "all_gather_single": call(gather_single, torch.empty(n * SIZE), given),
        "reduce_scatter": call(
            dist.reduce_scatter, torch.empty(SIZE), [part.clone() for part in parts]
        ),
        "reduce_scatter_single": call(reduce_scatter_single, torch.empty(SIZE), whole),
        "all_to_all_single": call(dist.all_to_all_single, torch.empty(n * SIZE), whole),
        "rotation": call(
            dist.all_to_all_single,
            torch.empty(SIZE),
            given,
            [SIZE * (rank == (me - 1) % n) for rank in range(n)],
            [SIZE * (rank == (me + 1) % n) for rank in range(n)],
        ),
        "gather": rooted(dist.gather, given, collected, collected),
        "scatter": rooted(dist.scatter, received, [part.clone() for part in parts], received),
    }


def expected(name, n, link):
    """Seconds by the closed formula."""
    second = 4 * SIZE / link.bandwidth
    match name:
        case "all_reduce" | "all_reduce max":
            return 2 * (n - 1) * (link.latency + second / n)
        case "all_reduce bf16":
            return 2 * (n - 1) * (link.latency + second / 2 / n)
        case "rotation":
            return link.latency + second
        case "broadcast" | "reduce":
            return link.latency + second
    return (n - 1) * (link.latency + second)


def collectives(rank, world_size):
    clock = LogicalClock(CLUSTER)
    register(clock)
    real, modelled = groups(rank, "gloo"), groups(rank, "emu")
    for where, group in modelled.items():
        link = {"inside": INSIDE, "between": BETWEEN, "world": ACROSS}[where]
        wanted = {name: run(True)[1] for name, run in calls(rank, real[where]).items()}
        for name in wanted:
            for wait in (True, False):
                dist.barrier(group=modelled["world"])
                before, run = clock.account(), calls(rank, group)[name]
                # the copies that gloo's threads make to move the data are none of the model's
                with clock.kernels():
                    work, found = run(wait)
                    if not wait:
                        assert clock.now() == before.now, "launching takes no time"
                        work.wait()
                        work.wait()
                spent, seconds = clock.account() - before, expected(name, group.size(), link)
                if name != "reduce" or rank == dist.get_process_group_ranks(group)[0]:
                    same = zip(
                        *([x] if isinstance(x, torch.Tensor) else x for x in (found, wanted[name])),
                        strict=True,
                    )
                    assert all(torch.equal(a, b) for a, b in same), (where, name)
                assert spent.now == spent.exposed == spent.communication == seconds, (
                    where,
                    name,
                    wait,
                    spent,
                    seconds,
                )
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank}, group=modelled["world"])
    assert objects == [{"rank": other} for other in range(world_size)]
    before = clock.now()
    dist.all_reduce(torch.ones(SIZE))
    assert clock.now() == before, "a plain gloo group is not modelled"
    return clock.account()


def test_collectives_are_gloos_and_take_what_the_formulas_say():
    accounts = run_ranks(collectives, 4)
    assert len({account.now for account in accounts}) == 1
    for account in accounts:
        assert account.busy == account.idle == 0 and account.now == account.exposed


class Rules:
    """Two ranks of two nodes, 8 s and a latency apart; each rule starts at a common time."""

    LATENCY = BETWEEN.latency

    def __init__(self, rank, group, clock):
        self.rank, self.group, self.clock = rank, group, clock

    def reduce(self, times=1):
        """Once the size takes two times 4 s and two latencies."""
        return dist.all_reduce(torch.ones(times * SIZE), group=self.group, async_op=True)

    def send(self, tag=0, times=1):
        return dist.isend(torch.ones(times * SIZE), 1 - self.rank, group=self.group, tag=tag)

    def receive(self, tag=0, times=1):
        return dist.irecv(torch.empty(times * SIZE), 1 - self.rank, group=self.group, tag=tag)

    def hidden(self):
        """A kernel as long as the transfer hides all of it, one half as long half of it."""
        cost = 8 + 2 * self.LATENCY
        for kernel, exposed in ((cost, 0), (cost / 2, cost / 2), (2 * cost, 0)):
            before, work = self.clock.account(), self.reduce()
            self.clock.kernel(kernel)
            work.wait()
            spent = self.clock.account() - before
            assert (spent.busy, spent.exposed, spent.idle, spent.communication) == (
                kernel,
                exposed,
                0,
                cost,
            )

    def late(self):
        """The second rank comes 3 s later: the first is idle for so long, and only then is the
        transfer exposed.
        """
        self.clock.kernel(3.0 * self.rank)
        before = self.clock.account()
        self.reduce().wait()
        spent = self.clock.account() - before
        assert (spent.idle, spent.exposed) == (3.0 * (1 - self.rank), 8 + 2 * self.LATENCY)

    def reverse(self):
        """Two on the same links are one after the other, whatever order they are waited for in."""
        before, works = self.clock.account(), [self.reduce(), self.reduce(2)]
        works[1].wait()
        assert self.clock.now() - before.now == 24 + 4 * self.LATENCY
        works[0].wait()
        spent = self.clock.account() - before
        assert spent.now == spent.exposed == spent.communication == 24 + 4 * self.LATENCY

    def wire(self):
        """Two messages: the second starts when the first is through, which arrives a
        latency later.
        """
        before = self.clock.now()
        if self.rank == 0:
            works = [self.send(), self.send(7, 2)]
            self.clock.kernel(1.0)
            [work.wait() for work in works]
            assert self.clock.now() - before == 1.0, "a sender is free at once"
        else:
            works = [self.receive(), self.receive(7, 2)]
            works[0].wait()
            assert self.clock.now() - before == 8 + self.LATENCY
            works[1].wait()
            assert self.clock.now() - before == 24 + self.LATENCY

    def both_ways(self):
        """One direction does not wait for the other."""
        before = self.clock.now()
        works = [self.receive(), self.send()]
        [work.wait() for work in works]
        assert self.clock.now() - before == 8 + self.LATENCY

    def posted(self):
        """A message starts when it is sent and its receive is posted, whichever is later."""
        for sent, received in ((5.0, 2.0), (2.0, 5.0)):
            before = self.clock.account()
            self.clock.kernel(received if self.rank else sent)
            work = self.receive() if self.rank else self.send()
            work.wait()
            spent = self.clock.account() - before
            if self.rank:
                assert spent.now == 5 + 8 + self.LATENCY
                assert (spent.idle, spent.exposed) == (5 - received, 8 + self.LATENCY)
            dist.barrier(group=self.group)

    def tags(self):
        """Messages go in the order in which they become ready; one that nobody receives yet lets
        the others through.
        """
        before = self.clock.now()
        if self.rank == 0:
            [work.wait() for work in (self.send(1), self.send(2), self.send(3))]
            return
        third = self.receive(3)
        self.clock.kernel(1.0)
        second = self.receive(2)
        second.wait()
        assert self.clock.now() - before == 9 + self.LATENCY, (
            "nobody can know yet that another comes before"
        )
        third.wait()
        assert self.clock.now() - before == 17 + self.LATENCY
        self.receive(1).wait()
        assert self.clock.now() - before == 25 + 2 * self.LATENCY, "posted only then"

    def turns(self):
        """What was posted first goes first, though it was sent last."""
        before = self.clock.now()
        if self.rank == 0:
            [work.wait() for work in (self.send(1, 2), self.send(2))]
            return
        second = self.receive(2)
        self.clock.kernel(1.0)
        first = self.receive(1, 2)
        second.wait()
        assert self.clock.now() - before == 8 + self.LATENCY
        first.wait()
        assert self.clock.now() - before == 24 + self.LATENCY

    def queued(self):
        """A collective between nodes does not delay a message."""
        before, reduced = self.clock.now(), self.reduce(4)
        work = self.receive() if self.rank else self.send()
        work.wait()
        assert self.clock.now() - before == (8 + self.LATENCY) * self.rank
        reduced.wait()
        assert self.clock.now() - before == 32 + 2 * self.LATENCY

    def together(self):
        """batch_isend_irecv, blocking calls and a future."""
        before, found = self.clock.now(), torch.empty(SIZE)
        mine = torch.full((SIZE,), float(self.rank))
        pair = [dist.P2POp(dist.isend, mine, 1 - self.rank, group=self.group)]
        pair += [dist.P2POp(dist.irecv, found, 1 - self.rank, group=self.group)]
        [work.wait() for work in dist.batch_isend_irecv(pair)]
        assert self.clock.now() - before == 8 + self.LATENCY and found[0] == 1 - self.rank
        if self.rank == 0:
            dist.send(mine, 1, group=self.group)
        else:
            dist.recv(found, 0, group=self.group)
        assert self.clock.now() - before == (8 + self.LATENCY) * (1 + self.rank)
        dist.barrier(group=self.group)
        future = dist.all_reduce(found, group=self.group, async_op=True).get_future()
        future.wait()


RULES = (
    "hidden",
    "late",
    "reverse",
    "wire",
    "both_ways",
    "posted",
    "tags",
    "turns",
    "queued",
    "together",
)


def follow_rules(rank, world_size):
    clock = LogicalClock(Cluster(CLUSTER.device, 1, INSIDE, BETWEEN))
    register(clock)
    group = dist.new_group(backend="emu")
    rules = Rules(rank, group, clock)
    for name in RULES:
        dist.barrier(group=group)
        getattr(rules, name)()
        account = clock.account()
        assert account.now == account.busy + account.exposed + account.idle, name
    dist.destroy_process_group(group)
    return clock.now()


def test_rules_of_the_clock():
    assert run_ranks(follow_rules, 2) == run_ranks(follow_rules, 2), (
        "modelled times repeat to the last bit"
    )


def ddp(rank, world_size):
    """What was not written for emulation runs on it: torch's own data parallelism."""
    clock = LogicalClock(CLUSTER)
    register(clock)
    found = []
    for backend in ("gloo", "emu"):
        torch.manual_seed(0)
        group = dist.new_group(backend=backend)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(64, 64), process_group=group
        )
        with clock.kernels():
            model(torch.full((2, 64), float(rank + 1))).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    account = clock.account()
    return account.busy > 0 and account.communication > 0


def test_ddp_runs_unchanged():
    assert run_ranks(ddp, 2) == [True, True]


def test_kernels_of_given_time():
    clock, wall = LogicalClock(), WallClock()
    clock.kernel(1.5)
    with clock.kernels():
        torch.ones(10) + 1
    assert clock.now() == clock.busy == 1.5, "without a cluster operations have no price"
    before = wall.now()
    wall.kernel(0.02)
    assert wall.now() - before >= 0.02
    assert (wall.label, clock.label, LogicalClock(CLUSTER).label) == (
        "",
        "modelled",
        "modelled on test",
    )


def test_operations_take_the_time_of_their_device():
    clock = LogicalClock(CLUSTER)
    with clock.kernels():
        torch.ones(1000).add_(1)
    assert clock.now() == pytest.approx(3 * 4000 / DEVICES["A100"].memory_bandwidth)

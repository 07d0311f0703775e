"""The model of parameter servers: its times by hand, and that the servers' own code learns what one
process would.
"""

import pytest
import torch

from benchmarks import EVIDENCE
from benchmarks.servers import learner, measured, modelled, network, parameter_server
from megatron_merak import ops
from megatron_merak.cluster import DEVICES, Cluster, Link, all_reduce

LINK = Link("a test's", 0.5, 8e6)


def setup(workers, servers, slow=(), compute=10.0, elements=1_000_000, server_bandwidth=1e12):
    cluster = Cluster(DEVICES["H100"], 1, LINK, LINK)
    return modelled.Setup(
        workers, servers, cluster, elements, compute, slow, server_bandwidth=server_bandwidth
    )


def follow(*given, strategy="ps-async", steps=20, **named):
    return modelled.follow(setup(*given, **named), strategy, steps)


class Quadratic:
    """Parts of a batch pull to points of their own: the gradient of |w - point|^2 / 2, exact in
    fp32.
    """

    def __init__(self, size=70):
        self.weights = torch.zeros(size)
        self.seen = []  # (part, weights)

    def gradient(self, weights, part):
        self.seen.append((part, weights.clone()))
        return weights - torch.randn(len(weights), generator=torch.Generator().manual_seed(part))

    def loss(self, weights):
        return (weights**2).sum().item() / 2


def adamw(weights, moments, gradient, lr, betas, eps, weight_decay, step):
    """A step as https://arxiv.org/abs/1711.05101 has it, in fp64."""
    weights = weights.double()
    gradient = gradient.double()
    first, second = (moment.double() for moment in moments)
    first = (betas[0] * first + (1 - betas[0]) * gradient) / (1 - betas[0] ** step)
    second = (betas[1] * second + (1 - betas[1]) * gradient**2) / (1 - betas[1] ** step)
    return weights * (1 - lr * weight_decay) - lr * first / (second.sqrt() + eps)


def test_messages_share_the_ends_that_they_meet_at():
    messages = [
        network._Message(*ends, 1.0, 1.0, print)
        for ends in ((0, 8), (1, 8), (2, 8), (2, 9), (3, 9), (3, 7))
    ]
    network.fair_rates(messages, 6.0)
    # Three meet at node 8; what those leave of node 2 goes to 9, where it meets another, and so on.
    assert [message.rate for message in messages] == [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]


def test_steps_of_two_workers_and_one_server_by_hand():
    # 4e6 bytes of gradients take 0.5 s, 2e6 bytes of weights 0.25 s, each behind a latency of 0.5
    # s.
    sync = follow(2, 1, strategy="ps-sync", steps=2)
    pushed, pulled = 0.5 + 2 * 0.5, 0.5 + 2 * 0.25  # both workers at once
    # a gradient is announced; in between the norm, and to apply it
    step = 10 + 2 * 0.5 + pushed + 2 * 0.5 + pulled
    assert (
        sync.finished[0] == pytest.approx([step, 2 * step], abs=1e-3)
        and sync.finished[0] == sync.finished[1]
    )
    assert sync.sent == {0: 4e6, 1: 4e6, 2: 4e6} and sync.received == {0: 2e6, 1: 2e6, 2: 8e6}

    alone = follow(2, 1, strategy="ps-async", steps=1, slow=(1.0, 1.025))
    # The second pushes 0.25 s later. The first has sent half of its gradient by then; the two share
    # the server's end until the first is there (0.75 s after it started), and the second has half
    # left.
    assert [event.worker for event in alone.events] == [0, 1]
    assert [event.seconds for event in alone.events] == pytest.approx([11.25, 11.5], abs=1e-3)
    assert [times[0] for times in alone.finished] == pytest.approx([12.0, 12.25], abs=1e-3)

    reduced = follow(2, 0, strategy="allreduce", steps=1, slow=(1.0, 3.0))
    update = setup(2, 0).cluster.device.compute_time(0, 34e6, "bfloat16")
    assert reduced.finished[0] == pytest.approx([30 + all_reduce(2, 4e6, LINK) + update])
    assert reduced.sent[0] == 4e6

    # Of two pieces on the workers' own nodes, one of each travels.
    both = follow(2, 0, strategy="ps-sync", steps=1)
    assert both.sent == both.received == {0: 3e6, 1: 3e6}
    # Adding takes 8 bytes of the first gradient and 12 of the second, the norm 4, AdamW 30: of each
    # element.
    slow = follow(2, 1, strategy="ps-sync", steps=1, server_bandwidth=1e7)
    assert slow.seconds - sync.finished[0][0] == pytest.approx((8 + 12 + 4 + 30) / 10, abs=1e-3)
    slow = follow(1, 1, strategy="ps-async", steps=1, server_bandwidth=1e7)
    assert slow.seconds == pytest.approx(10 + 1 + (30 + 4) / 10 + 0.75, abs=1e-3)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_a_slow_worker_holds_up_the_others_only_where_they_step_together(servers):
    equal, slow = ((1.0,) * 4, (1.0, 2.0, 1.0, 1.0))
    for strategy, least, most in (
        ("ps-async", 0.9, 1.1),
        ("ps-sync", 0.0, 0.7),
        ("allreduce", 0.0, 0.7),
    ):
        rates = []
        for factors in (equal, slow):
            trace = follow(4, servers, factors, strategy=strategy, steps=40)
            rates.append([trace.rate(worker) for worker in range(4)])
            assert sum(map(len, trace.finished)) == 4 * 40
        for worker in (0, 2, 3):
            assert least < rates[1][worker] / rates[0][worker] < most
        assert (rates[1][1] < 0.7 * rates[1][0]) == (strategy == "ps-async"), (
            "whether fast and slow ones differ"
        )


@pytest.mark.parametrize("servers", [0, 1, 3])
def test_workers_that_step_together_learn_what_one_process_does(servers):
    problem = Quadratic()
    trace = follow(3, servers, strategy="ps-sync", steps=6)
    curve = learner.learn(
        trace, problem, learner.Settings(3, True, 0, decay=0.1), lambda step: 0.1 / (step + 1), 1
    )

    reference = Quadratic()
    weights = reference.weights.clone()
    moments = [torch.zeros(70), torch.zeros(70)]
    losses = [0.0]
    for step in range(6):
        parts = [reference.gradient(weights, 3 * step + worker) / 3 for worker in range(3)]
        named = {
            "lr": 0.1 / (step + 1),
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "step": step + 1,
        }
        before, expected = (
            weights.clone(),
            adamw(weights, moments, parts[0] + parts[1] + parts[2], **named),
        )
        ops.adamw_(weights, *moments, parts[0] + parts[1] + parts[2], None, **named)
        torch.testing.assert_close(
            weights.double() - before, expected - before, rtol=1e-4, atol=1e-7
        )
        losses.append(reference.loss(weights))
    assert torch.equal(curve.weights, weights) and curve.losses == losses
    assert [part for part, _ in problem.seen] == [*range(18)]


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_the_same_again_and_every_part_of_a_batch_once(servers):
    found = []
    for _ in range(2):
        problem = Quadratic()
        trace = follow(3, servers, (1.0, 2.0, 1.3), steps=10)
        curve = learner.learn(trace, problem, learner.Settings(3, False, 12), lambda step: 0.05, 2)
        assert sorted(part for part, _ in problem.seen) == [*range(30)]
        found.append((trace, curve.seconds, curve.losses, curve.staleness))
        assert len(curve.losses) == 6 and curve.seconds == sorted(curve.seconds)
    assert found[0] == found[1]


def test_a_gradient_is_as_old_as_the_trace_says_and_too_old_ones_are_dropped():
    trace = follow(3, 1, (1.0, 1.0, 4.0), steps=10)
    # What others applied between two events of a worker is the staleness of the second one.
    places = [
        [place for place, event in enumerate(trace.events) if event.worker == worker]
        for worker in range(3)
    ]
    ages = [[b - a - 1 for a, b in zip([-1, *own], own, strict=False)] for own in places]
    bounds = {most: learner.Settings(3, False, most) for most in (99, 4)}
    curves = {
        most: learner.learn(trace, Quadratic(), bound, lambda _: 0.05, 1)
        for most, bound in bounds.items()
    }
    for worker in range(3):
        assert sorted(curves[99].staleness[worker].elements()) == sorted(ages[worker])
    assert max(ages[0]) <= 4 < min(ages[2]) and curves[99].dropped == [0, 0, 0]
    # With a bound the slow worker's are dropped; those of others are as young as without what was
    # dropped.
    assert curves[4].dropped[:2] == [0, 0] and curves[4].dropped[2] > 0
    assert all(age <= 4 for worker in range(2) for age in curves[4].staleness[worker])
    too_old = sum(n for age, n in curves[4].staleness[2].items() if age > 4)
    assert too_old == curves[4].dropped[2]


def test_the_page_has_the_times_that_are_modelled(capsys):
    page = (EVIDENCE / "servers.md").read_text(encoding="utf-8")
    written = page.partition(parameter_server.BEGIN)[2].partition(parameter_server.END)[0]
    assert parameter_server.times_table(parameter_server.times()) in written
    for name in ("servers_loss.png", "servers_times.png"):
        assert f"({name})" in written and (EVIDENCE / name).is_file()
    given = [
        "--workers",
        "2",
        "--slow",
        "1:1.5",
        "--steps",
        "4",
        "--compute",
        "0.1",
        "--model-elements",
        "1000000",
    ]
    assert parameter_server.main(given) == 0
    shown = capsys.readouterr().out
    assert "1 million parameters" in shown and "| 1 takes 1.5 x | ps-async |" in shown


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_measurement_through_the_script_runs(capsys):
    assert measured.main(["--quick"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert len(rows) == 4 and all(float(row.split("|")[2].split()[0]) > 0 for row in rows)

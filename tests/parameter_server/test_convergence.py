"""Gradients that are old still lead to the optimum, as fast as theory promises of the rule by which
servers apply them.

The rule is x <- x - eta_k g_k with g_k a gradient at weights that were read d_k updates ago, and
eta_k the learning rate divided by 1 + d_k. AdamW without memory (both betas 0) and with an eps far
above any gradient is this rule: its step is lr g / (|g| + eps). So what is tested here is what
servers run, no stand-in for it.
"""

import math

import pytest
import torch

from benchmarks.servers import learner, modelled
from megatron_merak.cluster import DEVICES, Cluster, Link

EPS = 1e6  # that makes AdamW plain: of gradients below 10, a relative 1e-5 is lost
LINK = Link("fast", 0.0, 1e15)
STRAGGLERS = (1.0, 1.0, 1.3, 2.0, 3.1)


class Logistic:
    """The mean of log(1 + exp(-b a.x)) over samples with |a| <= 1, so that no gradient is longer
    than 1; fp64.
    """

    def __init__(self, samples=64, size=6):
        generator = torch.Generator().manual_seed(3)
        features = torch.randn(samples, size, generator=generator, dtype=torch.float64)
        self.features = features / features.norm(dim=1).max()
        noisy = self.features @ torch.linspace(-4, 4, size).double() + torch.randn(
            samples, generator=generator
        )
        self.signed = self.features * noisy.sign()[:, None]
        self.start, self.size = torch.zeros(size), size
        self.optimum = self.start.double()
        for _ in range(30):
            p = torch.sigmoid(-self.signed @ self.optimum)
            hessian = (self.signed * (p * (1 - p))[:, None]).T @ self.signed
            self.optimum += torch.linalg.solve(hessian, self.signed.T @ p)

    def losses(self, x):
        """Of each sample."""
        return torch.nn.functional.softplus(-self.signed @ x.double())

    def gradient(self, x, chosen):
        """Of the mean over some samples, fp32."""
        return -(
            self.signed[chosen].T @ torch.sigmoid(-self.signed[chosen] @ x.double())
        ).float() / len(chosen)


def order(slow, steps):
    """The workers whose gradients one server applies, in turn, and how old each gradient is."""
    cluster = Cluster(DEVICES["cpu"], 1, LINK, LINK)
    setup = modelled.Setup(len(slow), 1, cluster, 1, 1.0, slow, server_bandwidth=1e15)
    workers = [event.worker for event in modelled.follow(setup, "ps-async", steps).events]
    last, ages = dict.fromkeys(range(len(slow)), -1), []
    for place, worker in enumerate(workers):
        ages.append(place - last[worker] - 1)
        last[worker] = place
    return list(zip(workers, ages, strict=True))


def train(start, gradient, turns, rate, workers, **settings):
    """Let a server apply gradient(x, k) of the k-th turn, each at the weights that its worker has.
    What each gradient was of, and the weights at the end."""
    given = learner.Settings(workers, False, max_staleness=4 * workers, **settings)
    servers = learner.Servers(start, 1, given)
    weights, seen = [start.clone() for _ in range(workers)], []
    for number, (worker, _) in enumerate(turns):
        seen.append(weights[worker])
        weights[worker] = servers.push(worker, 0, gradient(seen[-1], number), rate(number))
    ages = [age for worker in servers.staleness for age in worker.elements()]
    assert sorted(ages) == sorted(age for _, age in turns) and not any(servers.dropped)
    return seen, servers.weights()


def plain(start, gradient, turns, rate, workers):
    return train(
        start, gradient, turns, lambda number: rate * EPS, workers, betas=(0.0, 0.0), eps=EPS
    )


def test_the_rule_is_delayed_gradient_descent():
    problem, turns, rate = Logistic(), order(STRAGGLERS, 12), 0.7
    seen, end = plain(problem.start, lambda x, k: problem.gradient(x, [k]), turns, rate, 5)
    path = [problem.start.double()]
    for number, (_, age) in enumerate(turns):
        read = path[number - age]
        torch.testing.assert_close(seen[number].double(), read, rtol=1e-4, atol=1e-5)
        path.append(path[-1] - rate / (1 + age) * problem.gradient(read, [number]).double())
    torch.testing.assert_close(end.double(), path[-1], rtol=1e-4, atol=1e-5)
    assert {age for _, age in turns} >= {*range(7)}


@pytest.mark.parametrize("whole", [True, False], ids=["all samples", "one sample"])
def test_regret_is_below_the_bound_for_delayed_gradients(whole):
    """Langford, Smola and Zinkevich 2009 (https://arxiv.org/abs/0911.0491): a delay costs no more
    than how far updates move the weights meanwhile. By their argument, for convex f_k, any delays
    and any step sizes,

        sum_k eta_k (f_k(y_k) - f_k(x)) <= |x_0 - x|^2 / 2 + sum_k m_k (m_k / 2 + sum of m_j, k -
        d_k <= j < k)

    where y_k is what gradient k is of, and m_k = eta_k |g_k| how far it moves the weights. By
    convexity, over sum_k eta_k it bounds how far the average of the y_k is from the optimum.
    """
    problem, turns, rate, samples = Logistic(), order(STRAGGLERS, 200), 2.0, [*range(64)]
    chosen = [samples if whole else [number * 7 % 64] for number in range(len(turns))]
    seen, _ = plain(problem.start, lambda x, k: problem.gradient(x, chosen[k]), turns, rate, 5)
    etas = [rate / (1 + age) for _, age in turns]
    lengths = [
        problem.gradient(y, each).norm().item() for y, each in zip(seen, chosen, strict=True)
    ]
    moves = [eta * length for eta, length in zip(etas, lengths, strict=True)]
    delayed = [
        move / 2 + sum(moves[k - age : k])
        for k, (move, (_, age)) in enumerate(zip(moves, turns, strict=True))
    ]
    bound = problem.optimum.norm().item() ** 2 / 2 + sum(
        map(math.prod, zip(moves, delayed, strict=True))
    )
    best = problem.losses(problem.optimum)
    regret = sum(
        eta * (problem.losses(y)[each] - best[each]).mean().item()
        for eta, y, each in zip(etas, seen, chosen, strict=True)
    )
    assert 0 < regret <= bound and max(lengths) <= 1
    average = sum(eta * y.double() for eta, y in zip(etas, seen, strict=True)) / sum(etas)
    suboptimal, at_start = (
        (problem.losses(x) - best).mean().item() for x in (average, problem.start)
    )
    if whole:
        assert 0 < suboptimal <= bound / sum(etas) < at_start / 2


@pytest.mark.parametrize("workers", [2, 4, 7])
def test_the_learning_rate_is_stable_up_to_the_sharp_bound(workers):
    """x <- x - a x_(d updates ago) converges for a < 2 cos(pi d / (2 d + 1)), and diverges above
    that (Levin and May 1976, A note on difference-delay equations). Equal workers have d = workers
    - 1, and a is the rate over workers."""
    delay, turns = workers - 1, order((1.0,) * workers, 150)
    sharp = workers * 2 * math.cos(math.pi * delay / (2 * delay + 1))
    sizes = []
    for rate in (0.95 * sharp, 1.05 * sharp):
        _, end = plain(torch.ones(1), lambda x, k: x, turns, rate, workers)
        sizes.append(abs(end.item()))
    assert sizes[0] < 0.1 and sizes[1] > 10
    assert 1.0 < sharp, "a rate that is good without delays stays so"


def test_adamw_comes_to_the_optimum_with_old_gradients_as_without():
    problem = Logistic()
    best = problem.losses(problem.optimum).mean()
    suboptimal = {}
    for slow in ((1.0,), (1.0,) * 5, STRAGGLERS):
        turns = order(slow, 600 // len(slow))
        seen, end = train(
            problem.start,
            lambda x, k: problem.gradient(x, [(k * 7 + i) % 64 for i in range(8)]),
            turns,
            lambda k: 0.5 * (1 - k / 600),
            len(slow),
        )
        suboptimal[slow] = (problem.losses(end).mean() - best).item()
    assert all(0 <= value < 1e-3 for value in suboptimal.values())

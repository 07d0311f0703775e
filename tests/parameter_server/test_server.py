"""What clients and servers say to each other: weights, gradients, versions, state, and what goes
wrong.
"""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from megatron_merak.config import OptimizerConfig
from megatron_merak.errors import CheckpointError, ServerError
from megatron_merak.optimizer.adamw import AdamW
from megatron_merak.parallel.mesh import Mesh
from megatron_merak.parameter_server.client import Contribution
from megatron_merak.parameter_server.optimizer import RestartedError, ServedAdamW
from megatron_merak.parameter_server.service import Service, Snapshots
from megatron_merak.parameter_server.snapshot import read_snapshot, snapshot_path
from megatron_merak.parameter_server.wire import NUMBERS, Message, MessageKind
from megatron_merak.plan import Grid
from megatron_merak.runtime.parameters import RankParameters
from tests.choice import later

from .served import SIZE, Job, layouts, new_buffer, serving

RATES = [1e-2, 0.1, 2e-2, 0.0]  # learning rate and weight decay of two groups


def flat(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def adamw(weights: torch.Tensor) -> AdamW:
    """What servers must do, on one rank: the same two groups."""
    buffer = new_buffer()
    buffer.data.copy_(weights)
    return AdamW(
        buffer, OptimizerConfig(adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.0)
    )


def apply(optimizer: AdamW, gradient: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    """The weights after a step of half the gradient, with rates multiplied by ``rate``."""
    optimizer.buffer.main_grad.copy_(0.5 * gradient)
    optimizer.step([(rate * RATES[0], RATES[1]), (rate * RATES[2], RATES[3])])
    return optimizer.buffer.data


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_pushed_gradients_are_steps_of_adamw_and_weights_come_back(servers):
    with serving(1, servers) as (job, _):
        client, weights = job.client(0), torch.empty(SIZE)
        client.store_state("master", flat(0))
        client.ready(steps=3)
        answer = client.pull(weights)
        assert torch.equal(weights, flat(0)) and (answer.version, answer.steps, answer.leader) == (
            0,
            3,
            0,
        )
        reference = adamw(flat(0))
        reference.steps = 3
        for step in range(3):
            answer = client.push(flat(10 + step), 0.5, RATES, weights)
            assert torch.equal(weights, apply(reference, flat(10 + step)))
            assert (answer.version, answer.steps, answer.staleness, answer.late) == (
                step + 1,
                step + 4,
                0,
                False,
            )
        for kind in ("exp_avg", "exp_avg_sq"):
            state = torch.empty(SIZE)
            client.fetch_state(kind, state)
            assert torch.equal(state, getattr(reference, kind))
        client.leave()


def test_old_gradients_count_less_and_too_old_ones_nothing():
    with serving(2, 1) as (job, servers):
        fast, slow = (job.client(worker, max_staleness=2) for worker in range(2))
        weights, others = torch.empty(SIZE), torch.empty(SIZE)
        fast.store_state("master", flat(0))
        fast.ready(0)
        slow.pull(others)
        fast.pull(weights)
        reference = adamw(flat(0))
        for step in range(2):
            fast.push(flat(step), 0.5, RATES, weights)
            apply(reference, flat(step))
        answer = slow.push(flat(5), 0.5, RATES, others)
        assert (answer.staleness, answer.late, answer.version) == (2, False, 3)
        assert torch.equal(others, apply(reference, flat(5), 1 / 3))
        for step in range(3):
            answer = fast.push(flat(step), 0.5, RATES, weights)
            assert answer.staleness == (step == 0), "only what others applied makes a gradient old"
        before = weights.clone()
        answer = slow.push(flat(6), 0.5, RATES, others)
        assert (answer.staleness, answer.late, answer.version) == (3, True, 6)
        assert torch.equal(others, before), (
            "a gradient that is too old changes nothing, and its sender gets new weights"
        )
        answer = slow.push(flat(6), 0.5, RATES, others)
        assert (answer.staleness, answer.late) == (0, False)
        fast.leave()
        slow.leave()
    record = servers[0].services[0].record
    assert (record.staleness, record.dropped) == ({0: 5, 1: 1, 2: 1, 3: 1}, 1)
    assert (
        "8 gradients" not in servers[0].summary() and "1 gradient too old" in servers[0].summary()
    )


def test_a_gradient_that_comes_a_second_time_is_applied_once():
    with serving(1, 1) as (job, _):
        client, weights = job.client(0), torch.empty(SIZE)
        client.store_state("master", flat(0))
        client.ready(0)
        client.push(flat(1), 0.5, RATES, weights)
        once = weights.clone()
        client.sequence -= 1  # the first answer was lost
        answer = client.push(flat(1), 0.5, RATES, weights)
        assert answer.version == 1 and torch.equal(weights, once)
        client.leave()


def test_workers_wait_for_each_other_and_gradients_are_added_in_their_order():
    with serving(3, 2) as (job, _), ThreadPoolExecutor(3) as pool:
        clients = [job.client(worker, sync=True) for worker in range(3)]
        clients[0].store_state("master", flat(0))
        clients[0].ready(0)

        def step(worker: int):
            mine = Contribution(0, flat(worker) * 10.0 ** (3 * worker), (worker, 0.5))
            total, weights = clients[worker].contribute(mine), torch.empty(SIZE)
            answer = clients[worker].apply(mine, (0.5, RATES), weights)
            return total, answer, weights

        results = [*pool.map(step, [2, 0, 1])]
        total = (flat(0) + 1e3 * flat(1)) + 1e6 * flat(2)
        expected = apply(adamw(flat(0)), total)
        counted = total[: 3 * SIZE // 4].double().square().sum().item()
        for sums, answer, weights in results:
            assert torch.equal(weights, expected)
            assert sums.square == pytest.approx(counted, rel=1e-6)
            assert [row[:2] for row in sums.reported] == [(0, 0.5), (1, 0.5), (2, 0.5)]
            assert (answer.version, answer.steps) == (1, 1)
        for client in clients:
            client.leave()


def test_a_step_that_overflows_anywhere_can_be_skipped():
    with serving(1, 1) as (job, _):
        client, weights = job.client(0, sync=True), torch.empty(SIZE)
        client.store_state("master", flat(0))
        client.ready(0)
        bad = flat(1)
        bad[-1] = torch.inf  # in a part that another place counts
        assert not math.isfinite(client.contribute(Contribution(0, bad, ())).square)
        answer = client.apply(Contribution(0, bad, ()), None, weights)
        assert torch.equal(weights, flat(0)) and answer.version == 0
        good = Contribution(1, flat(2), ())
        client.contribute(good)
        client.apply(good, (0.5, RATES), weights)
        assert torch.equal(weights, apply(adamw(flat(0)), flat(2)))
        client.leave()


def test_what_was_frozen_is_read_while_others_go_on():
    with serving(2, 1) as (job, _):
        first, second = job.client(0), job.client(1)
        weights, state = torch.empty(SIZE), torch.empty(SIZE)
        first.store_state("master", flat(0))
        first.ready(0)
        first.freeze()
        second.push(flat(1), 1.0, RATES, weights)
        assert not torch.equal(weights, flat(0))
        first.pull(state)
        assert torch.equal(state, flat(0))
        first.fetch_state("exp_avg", state)
        assert not state.any()
        first.thaw()
        first.pull(state)
        assert torch.equal(state, weights)
        first.leave()
        second.leave()


@pytest.mark.parametrize("completes", [True, False])
def test_workers_wait_until_none_takes_steps_and_then_for_one_that_completes_the_job(completes):
    with serving(2, 2) as (job, _), ThreadPoolExecutor(1) as pool:
        first, second = job.client(0), job.client(1)
        with pytest.raises(TimeoutError):
            (done := pool.submit(first.done)).result(0.3)
        second.done()
        done.result(10)
        assert not first.first(), "it is to complete the job, as nobody is before it"
        with pytest.raises(TimeoutError):
            (complete := pool.submit(second.first)).result(0.3)
        first.leave(completes)
        assert complete.result(10) is completes
        second.leave(True)


def test_state_that_is_fetched_is_of_one_moment_or_an_error(tmp_path):
    job = Job(1, 1, tmp_path, interval=2)
    job.server(1)
    client = job.client(0)
    held = RankParameters(new_buffer(), {}, Mesh(Grid(), 0, torch.device("cpu")))
    optimizer = ServedAdamW(held, OptimizerConfig(), client, 1, False)
    optimizer.begin_training(True)
    moments = torch.empty(SIZE)
    optimizer.hold()
    optimizer.fetch("exp_avg", moments)
    client.ends[0].connection.group = Dead()
    again = job.server(1)
    with pytest.raises(RestartedError):
        optimizer.fetch("exp_avg_sq", moments)
    optimizer.release()
    optimizer.hold()
    optimizer.fetch("exp_avg_sq", moments)
    optimizer.release()
    client.leave(True)
    again.wait()


@pytest.mark.parametrize("slow", [0, later(1)])
def test_a_slow_worker_is_waited_for_beyond_the_timeout_and_a_silent_one_is_not(
    slow, monkeypatch, capsys
):
    """The time after which whoever is silent is gone is 2 s here; the slow worker's step
    takes 5.
    """
    monkeypatch.setattr("tests.parameter_server.served.TIMEOUT", timedelta(seconds=2))
    job = Job(3, 1)
    server = job.server(3)
    clients = [job.client(worker, sync=True) for worker in range(3)]
    clients[0].store_state("master", flat(0))
    clients[0].ready(0)
    clients[2]._left.set()  # it sends no more signs of life

    def step(worker: int):
        time.sleep(5 * (worker == slow))
        return clients[worker].contribute(Contribution(0, flat(worker), (worker,)))

    with ThreadPoolExecutor(2) as pool:
        for total in pool.map(step, [0, 1]):
            assert [row[0] for row in total.reported] == [0, 1]
    for client in clients[:2]:
        client.leave()
    server.wait()
    assert (
        server.lost == [2]
        and "parameter server (rank 3): rank 2 is gone" in capsys.readouterr().out
    )


def test_workers_with_other_parameters_are_refused():
    with serving(2, 1) as (job, _):
        first = job.client(0)
        with pytest.raises(
            ServerError,
            match="other parameters, or other settings, than the workers that came before",
        ):
            job.client(1, betas=(0.9, 0.99))
        first.leave()
        job.store.set("rank 1 ended", "1")


class Line:
    """A connection on which a client has sent some messages, and then leaves."""

    def __init__(self, *messages: Message):
        self.left, self.sent = [*messages, Message(MessageKind.LEAVE, (0.0,))], []

    def receive(self) -> Message:
        return self.left.pop(0)

    def send(self, kind, numbers=(), text="") -> None:
        self.sent.append((kind, text))


def test_a_message_that_no_worker_sends_is_answered_with_a_line():
    plain = json.loads(layouts(1, 1)[0][1].to_json())
    odd = [
        "",
        "{",
        "[]",
        "5",
        "{}",
        "[" * 10**5,
        json.dumps(plain | {"elements": "x"}),
        json.dumps(plain | {"eps": None}),
    ]
    odd += [json.dumps(plain | {"betas": [0.9]}), json.dumps(plain | {"eps": float("nan")})]
    odd += [json.dumps(plain | {"groups": [[1, 2]]}), json.dumps({**plain, "more": 1})]
    messages = [Message(MessageKind.HELLO, (), text) for text in odd]
    messages += [
        Message(kind, (0.0,) * NUMBERS)
        for kind in (MessageKind.PULL, MessageKind.WAIT, MessageKind.CONTRIBUTE, MessageKind.APPLY)
    ]
    line, service = Line(*messages), Service(1, Snapshots(), None)
    service.serve(0, line)
    assert [kind for kind, _ in line.sent] == [MessageKind.ERROR] * len(
        messages
    ) and service.piece is None
    assert all(
        text.count("\n") == 0 and ("layout '" in text or "says HELLO first" in text)
        for _, text in line.sent
    )


def test_weights_that_never_come_are_an_error_for_those_who_wait():
    job = Job(2, 1)
    server, second = job.server(2), job.client(1)
    job.store.set("rank 0 ended", "1")
    with pytest.raises(ServerError, match="worker 0: it ended before the weights were there"):
        second.pull(torch.empty(SIZE))
    second.leave()
    server.wait()


def test_a_server_goes_on_from_its_snapshot_and_clients_find_it(tmp_path):
    job = Job(1, 1, tmp_path, interval=2)
    job.server(1)
    client, weights = job.client(0), torch.empty(SIZE)
    client.store_state("master", flat(0))
    client.ready(5)
    reference = adamw(flat(0))
    reference.steps = 5
    for step in range(3):
        client.push(flat(step), 0.5, RATES, weights)
    for step in range(2):
        apply(reference, flat(step))
    client.ends[0].connection.group = Dead()
    again = job.server(1)
    client.pull(weights)
    assert torch.equal(weights, reference.buffer.data), "the snapshot is of the second update"
    assert job.said == ["parameter server (rank 1) is back at update 2, 1 update behind"]
    answer = client.push(flat(7), 0.5, RATES, weights)
    assert torch.equal(weights, apply(reference, flat(7))) and (
        answer.version,
        answer.staleness,
    ) == (3, 0)
    client.leave()
    again.wait()
    assert again.services[0].record.restored == 2


def test_a_server_without_snapshots_that_is_started_again_is_an_error():
    job = Job(1, 1)
    job.server(1)
    client = job.client(0)
    client.ready(0)
    client.ends[0].connection.group = Dead()
    again = job.server(1)
    with pytest.raises(
        ServerError,
        match="--save .unset.: the server was killed, and without it there is no snapshot",
    ):
        client.pull(torch.empty(SIZE))
    client.leave()
    again.wait()


def test_weights_are_not_there_where_the_first_snapshot_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    job = Job(2, 1, tmp_path / "file" / "snapshots")
    server, first, second = job.server(2), job.client(0), job.client(1)
    with pytest.raises(ServerError, match="server-2-place-0.safetensors: it cannot be written"):
        first.ready(0)
    first.leave()
    with pytest.raises(ServerError, match="worker 0: it ended before the weights were there"):
        second.pull(torch.empty(SIZE))
    second.leave()
    server.wait()


def test_a_snapshot_that_cannot_be_written_is_told_and_training_goes_on(tmp_path, capsys):
    job = Job(1, 1, tmp_path / "snapshots")
    server, client, weights = job.server(1), job.client(0), torch.empty(SIZE)
    client.store_state("master", flat(0))
    client.ready(0)
    path = snapshot_path(tmp_path / "snapshots", 1, 0)
    before = path.read_bytes()
    path.with_suffix(".partial").mkdir()  # where the next one would be written
    reference = adamw(flat(0))
    for step in range(3):
        client.push(flat(step), 0.5, RATES, weights)
        assert torch.equal(weights, apply(reference, flat(step)))
    client.leave()
    server.wait()
    assert "server-1-place-0.safetensors: it cannot be written" in capsys.readouterr().out
    assert path.read_bytes() == before


class Dead:
    """What is left of a connection to a process that was killed; test_launch.py kills real ones."""

    def send(self, *_):
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("damage", ["missing", "cut", "of another layout", "of another job"])
def test_snapshots_that_cannot_serve_are_refused(tmp_path, damage):
    job = Job(1, 1, tmp_path)
    server, client = job.server(1), job.client(0)
    client.store_state("master", flat(0))
    client.ready(0)
    client.leave()
    server.wait()
    path = snapshot_path(tmp_path, 1, 0)
    ((_, wanted),) = layouts(1, 1)
    assert read_snapshot(path, wanted, server._job)[0].steps == 0
    word = server._job
    if damage == "missing":
        path.unlink()
    elif damage == "of another job":
        word = "another"
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        ((_, wanted),) = layouts(1, 1, eps=1e-6)
    with pytest.raises(CheckpointError, match="parameter server's snapshot .*server-1-place-0"):
        read_snapshot(path, wanted, word)

"""Products summed over ranks chunk by chunk: the numbers, and who waits for whom."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megatron_merak.parallel.chunked import TILE, SideStream, linear_all_reduce, row_chunks
from tests.ranks import run_ranks


class Works:
    """Counts as one rank of two whose terms are equal; notes what is started and waited for, in order."""

    def __init__(self):
        self.log = []

    def __call__(self, tensor):
        number = len(self.log)
        self.log.append(("start", number, tensor.clone()))
        works = self

        class Work:
            def wait(self):
                works.log.append(("wait", number, None))
                tensor.mul_(2)

        return Work()


def problem(rows, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator, dtype=dtype), torch.randn(5, 6, generator=generator, dtype=dtype)


@pytest.mark.parametrize("rows", [0, 1, TILE, TILE + 1, 5 * TILE, 5 * TILE + 3, 999])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 9])
def test_chunks_are_whole_tiles_that_cover_all_rows(rows, chunks):
    parts = row_chunks(rows, chunks)
    assert parts[0].start == 0 and parts[-1].stop == rows and 1 <= len(parts) <= chunks
    assert all(a.stop == b.start for a, b in zip(parts[:-1], parts[1:], strict=True))
    assert all(part.start % TILE == 0 for part in parts)
    tiles = [-(-(part.stop - part.start) // TILE) for part in parts]
    assert max(tiles) - min(tiles) <= 1 and (rows == 0 or min(tiles) > 0)


@pytest.mark.parametrize("chunks", [1, 3])
def test_each_sum_starts_right_after_its_product_and_all_waits_come_last(chunks):
    x, weight = problem(3 * TILE)
    works = Works()
    out = linear_all_reduce(x, weight, works, chunks)
    starts, waits = [("start", number) for number in range(chunks)], [("wait", number) for number in range(chunks)]
    assert [entry[:2] for entry in works.log] == starts + waits
    assert torch.equal(torch.cat([entry[2] for entry in works.log[:chunks]]), x @ weight.t())  # the product was there
    assert torch.equal(out, 2 * (x @ weight.t()))


def test_gradients_are_those_of_this_ranks_term():
    x, weight = (t.requires_grad_() for t in problem(2 * TILE + 1))
    upstream = torch.randn(2 * TILE + 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(linear_all_reduce(x, weight, Works(), 2), (x, weight), upstream)
    expected = torch.autograd.grad(x @ weight.t(), (x, weight), upstream)
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-13, atol=1e-13)


class Api:
    """Stands in for torch.cuda: every stream is a list of what was put on it; the host never runs ahead or waits."""

    def __init__(self):
        self.main, self.made, self.events = [], [], 0
        self.current = _Stream(self.main)

    def Stream(self):
        self.made.append([])
        return _Stream(self.made[-1])

    def Event(self):
        self.events += 1
        return _Event(self.events)

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class _Stream:
    def __init__(self, queue):
        self.queue = queue

    def wait_event(self, event):
        self.queue.append(("wait", event.number))


class _Event:
    def __init__(self, number):
        self.number = number

    def record(self, stream):
        stream.queue.append(("record", self.number))


class _Tensor(torch.Tensor):
    def record_stream(self, stream):
        stream.queue.append(("keep", None))


def test_a_side_stream_waits_for_the_product_and_the_current_one_for_the_sum():
    api = Api()
    start = SideStream(lambda tensor: api.current_stream().queue.append(("sum", None)), api)
    works = []
    for number in range(2):
        api.main.append(("product", number))
        works.append(start(torch.zeros(1).as_subclass(_Tensor)))
    for work in works:
        work.wait()
    (side,) = api.made
    assert [entry[0] for entry in api.main] == ["product", "record", "product", "record", "wait", "wait"]
    assert [entry[0] for entry in side] == ["wait", "sum", "record", "keep"] * 2
    ready, done = [e[1] for e in api.main if e[0] == "record"], [e[1] for e in api.main if e[0] == "wait"]
    assert [e[1] for e in side if e[0] == "wait"] == ready  # each sum after its own product, beside the next
    assert [e[1] for e in side if e[0] == "record"] == done  # each wait for its own sum


def _over_gloo(rank, world_size, chunks):
    whole, weights = problem(3 * TILE + 5, torch.float32)[0], torch.arange(1.0, 13.0).view(4, 3)
    x = whole.chunk(world_size, 1)[rank].clone().requires_grad_()
    weight = weights + rank
    out = linear_all_reduce(x, weight, lambda tensor: dist.all_reduce(tensor, async_op=True), chunks)
    grad = torch.autograd.grad(out.sum(), x)[0]
    expected = sum(part @ (weights + k).t() for k, part in enumerate(whole.chunk(world_size, 1)))
    torch.testing.assert_close(out.detach(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(grad, weight.sum(0).expand_as(grad))
    return out.detach()


@pytest.mark.parametrize("chunks", [1, 3])
def test_two_ranks_over_gloo(chunks):
    first, second = run_ranks(_over_gloo, 2, chunks)
    assert torch.equal(first, second)

"""Collectives on a stream of their own: who waits for whom."""

from contextlib import contextmanager

import torch

from megatron_merak.parallel.side_stream import SideStream


class Api:
    """Stands in for torch.cuda: every stream is a list of what was put on it; the host never runs
    ahead or waits.
    """

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
    assert [entry[0] for entry in api.main] == [
        "product",
        "record",
        "product",
        "record",
        "wait",
        "wait",
    ]
    assert [entry[0] for entry in side] == ["wait", "sum", "record", "keep"] * 2
    ready, done = (
        [e[1] for e in api.main if e[0] == "record"],
        [e[1] for e in api.main if e[0] == "wait"],
    )
    # each sum after its own product, beside the next
    assert [e[1] for e in side if e[0] == "wait"] == ready
    assert [e[1] for e in side if e[0] == "record"] == done  # each wait for its own sum

"""AdamW whose state is on parameter servers: a worker sends its gradient and receives weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import OptimizerConfig
from ..optimizer.base import Optimizer, Rates, StepResult
from ..optimizer.loss_scale import LossScaler
from ..parallel.host_read import read
from ..runtime.parameters import RankParameters
from .client import Answer, Client, Contribution


def wire_dtype(held: RankParameters) -> torch.dtype:
    """Of the weights that servers send: the model's, unless it uses some of them in fp32."""
    mixed = any(slot.fp32 for slot in held.buffer.slots.values())
    return torch.float32 if mixed else held.buffer.dtype


class RestartedError(Exception):
    """A server was started again while state was fetched: what came before that is of another moment."""


class ServedAdamW(Optimizer):
    """One rank of a worker.

    held: its parameters, which are not sharded. config: see `Optimizer`. client: its servers. workers: how many there
    are. sync: they step together; their gradients, of which each is one part of the sum, are added in their order and
    applied once. Else each gradient is applied when it comes.

    leader: the first worker that lives, as far as servers know.
    """

    name = "AdamW"

    def __init__(
        self,
        held: RankParameters,
        config: OptimizerConfig,
        client: Client,
        workers: int,
        sync: bool,
        scaler: LossScaler | None = None,
    ):
        super().__init__(held.buffer, config, held.mesh.model, None, scaler)
        self.held, self.client, self.workers, self.sync = held, client, workers, sync
        self.leader = 0
        self._taken = 0  # steps that this worker took
        self._in_fp32 = wire_dtype(held) == torch.float32  # weights come in fp32
        self._held: int | None = None  # restarts of servers when `hold` was called
        self._stored = False  # the servers have a master copy that was loaded
        self._on_host = self.buffer.device.type != "cpu"
        pinned = self._on_host and torch.cuda.is_available()
        self._gradient = torch.empty(self.buffer.size, pin_memory=pinned) if self._on_host else None
        self._weights = (
            torch.empty(self.buffer.size, dtype=wire_dtype(held), pin_memory=pinned) if self._on_host else None
        )

    def begin_training(self, first: bool) -> None:
        """Weights and optimizer state as the first worker has them (``first``) become the servers', and those of all
        workers. Call it once, after what there is to load was loaded."""
        if first:
            if not self._stored:
                self.client.store_state("master", self.buffer.master.detach().cpu())
            self.client.ready(self.steps)
        if self.buffer.rounds and not self._in_fp32:
            self.buffer.drop_master()
        self.pull()

    def pull(self) -> Answer:
        """Take the newest weights. Collective over the ranks of this worker."""
        return self._settled(self._take(self.client.pull, ()))

    def hold(self) -> None:
        """Until `release`, what is fetched is of one moment, and so are the weights. Collective over the ranks of this
        worker."""
        self._held = self.client.restarts
        if not self.sync:
            self.client.freeze()
        self.pull()

    def release(self) -> None:
        """Collective, as `hold` is."""
        self._held = None
        if not self.sync:
            self.client.thaw()
            self.pull()

    def refresh_master(self) -> None:
        self._stored = False

    def store(self, kind: str, flat: Tensor) -> None:
        """Let the servers have a kind of state, fp32 [buffer.size], that was loaded."""
        self.client.store_state(kind, flat.cpu())
        self._stored = self._stored or kind == "master"

    def fetch(self, kind: str, flat: Tensor) -> None:
        """Write the servers' state of a kind into ``flat``, fp32 [buffer.size]. Behind `hold` it is collective, and
        raises RestartedError on all ranks of this worker where the state of that moment is lost."""
        host = flat if flat.device.type == "cpu" else torch.empty(flat.shape)
        self.client.fetch_state(kind, host)
        if host is not flat:
            flat.copy_(host)
        if self._held is not None:
            lost = torch.tensor(float(self.client.restarts != self._held), device=self.buffer.device)
            if self.group is not None:
                dist.all_reduce(lost, group=self.group)
            if lost.item():
                raise RestartedError

    def fetch_master(self) -> None:
        """Let ``buffer.master`` have the exact weights, where the model is 16-bit: to export them."""
        if self.buffer.rounds:
            self.fetch("master", self.buffer.master)

    def reduce_and_step(
        self, sums: Tensor | None, zeros: Tensor | None, rates: Rates
    ) -> tuple[list[float], list[float], StepResult]:
        flat_rates = [value for rate in rates for value in rate]
        result = (self._together if self.sync else self._alone)(sums, flat_rates)
        return result[0], [], result[1]

    def _alone(self, sums: Tensor | None, rates: Sequence[float]) -> tuple[list[float], StepResult]:
        told, (square,) = read(sums, self.square_norm())
        norm, factor = self._clipped(square)
        if factor is None:
            answer = self.pull()
        else:
            answer = self._settled(self._take(self.client.push, (self._on_cpu(), factor, rates)))
        return told, replace(self._result(norm, factor is None), staleness=answer.staleness, late=answer.late)

    def _together(self, sums: Tensor | None, rates: Sequence[float]) -> tuple[list[float], StepResult]:
        told = [] if sums is None else read(sums)[0]
        mine = Contribution(self._taken, self._on_cpu(), told)
        total = self.client.contribute(mine)
        square = torch.tensor(total.square, dtype=torch.float64, device=self.buffer.device)
        if self.group is not None:
            dist.all_reduce(square, group=self.group)
        # Each worker's loss was divided by the number of workers: of those that are gone there is no part.
        missing = self.workers / max(len(total.told), 1)
        norm, factor = self._clipped(square.item() * missing**2)
        update = None if factor is None else (factor * missing, rates)
        self._take(lambda *given: self.client.apply(mine, update, *given), ())
        self._taken += 1
        if sums is not None:
            rows = [row[: len(told)] for row in total.told] or [told]
            told = (_in_order(torch.tensor(rows, dtype=sums.dtype)) * missing).tolist()
        return told, self._result(norm, factor is None)

    def _on_cpu(self) -> Tensor:
        if self._gradient is None:
            return self.buffer.main_grad
        return self._gradient.copy_(self.buffer.main_grad)

    @torch.no_grad()
    def _take(self, call: Callable[..., Answer], given: Iterable) -> Answer:
        """``call`` a server so that its answer is in the buffer."""
        buffer = self.buffer
        into = (buffer.master if self._in_fp32 else buffer.data).detach()
        weights = into if self._weights is None else self._weights
        answer = call(*given, weights)
        if weights is not into:
            into.copy_(weights)
        if self._in_fp32 and buffer.rounds:
            buffer.data.copy_(into)
        self.steps, self.leader = answer.steps, answer.leader
        return answer

    @torch.no_grad()
    def _settled(self, answer: Answer) -> Answer:
        """What several ranks of this worker hold, servers that do not wait updated in orders of their own: the first
        one's is everybody's."""
        for names, group in [] if self.sync else self.held.copies:
            views = [self.buffer.parameter(name) for name in names]
            joined = torch.cat([view.reshape(-1) for view in views])
            dist.broadcast(joined, group=group, group_src=0)
            for view, part in zip(views, joined.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view_as(view))
        return answer


def _in_order(rows: Tensor) -> Tensor:
    """The sum of the rows, first to last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total

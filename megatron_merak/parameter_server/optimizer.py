"""AdamW whose state is on parameter servers: a worker sends its gradient and receives weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.store import StateKind, Turn
from ..config import OptimizerConfig
from ..optimizer.base import Rates, StepResult
from ..optimizer.loss_scale import LossScaler
from ..parallel.host_read import read
from ..parallel.pieces import whole
from ..runtime.parameters import RankParameters
from ..stages.optimizer_state import Parts, RemoteOptimizer
from .client import Client, Contribution, Reply
from .piece import KINDS


def wire_dtype(parameters: RankParameters) -> torch.dtype:
    """Return the dtype of weights that servers send: the model's, or fp32 if it uses some of them
    in fp32.
    """
    mixed = any(slot.fp32 for slot in parameters.buffer.slots.values())
    return torch.float32 if mixed else parameters.buffer.dtype


class RestartedError(Exception):
    """A server restarted while state was fetched: what was fetched before is of another moment."""


class ServedAdamW(RemoteOptimizer):
    """The optimizer of one rank of a worker.

    parameters: the rank's, not sharded.
    config:     see ``Optimizer``.
    client:     its servers.
    workers:    how many there are.
    sync:       whether they take steps together: their gradients are added in the order of workers,
                and the sum is applied once. Else each gradient is applied when it arrives.

    ``leader``: the first worker that is alive, as far as servers know.
    """

    name = "AdamW"

    def __init__(
        self,
        parameters: RankParameters,
        config: OptimizerConfig,
        client: Client,
        workers: int,
        sync: bool,
        scaler: LossScaler | None = None,
    ):
        super().__init__(parameters.buffer, config, parameters.mesh.model, None, scaler=scaler)
        self.parameters = parameters
        self.client = client
        self.workers = workers
        self.sync = sync
        self.leader = 0
        self._taken = 0  # steps that this worker took
        self._in_fp32 = wire_dtype(parameters) == torch.float32  # weights come in fp32
        self._restarts_at_hold: int | None = None  # restarts of servers when `hold` was called
        self._stored = False  # the servers have a master copy that was loaded
        self._on_host = self.buffer.device.type != "cpu"
        pinned = self._on_host and torch.cuda.is_available()
        self._gradient = torch.empty(self.buffer.size, pin_memory=pinned) if self._on_host else None
        self._weights = (
            torch.empty(self.buffer.size, dtype=wire_dtype(parameters), pin_memory=pinned)
            if self._on_host
            else None
        )

    def begin_training(self, first: bool) -> None:
        """Copy weights and optimizer state of the first worker to the servers, and weights from
        there to all workers.

        first: whether this is the first worker.

        Call it once, after a checkpoint was loaded.
        """
        if first:
            if not self._stored:
                self.client.store_state("master", self.buffer.master.detach().cpu())
            self.client.ready(self.steps)
        if self.buffer.rounds and not self._in_fp32:
            self.buffer.drop_master()
        self.pull()

    def pull(self) -> Reply:
        """Copy the newest weights. Collective over the ranks of this worker."""
        return self._settled(self._take(self.client.pull, ()))

    def hold(self) -> None:
        """Freeze the state and weights that are fetched until `release`. Collective over the ranks
        of this worker.
        """
        self._restarts_at_hold = self.client.restarts
        if not self.sync:
            self.client.freeze()
        self.pull()

    def release(self) -> None:
        """Undo `hold`. Collective over the ranks of this worker."""
        self._restarts_at_hold = None
        if not self.sync:
            self.client.thaw()
            self.pull()

    def refresh_master(self) -> None:
        self._stored = False

    def store(self, kind: str, flat: Tensor) -> None:
        """Set a kind of the servers' state to one that was loaded, fp32 [buffer.size]."""
        self.client.store_state(kind, flat.cpu())
        self._stored = self._stored or kind == "master"

    def fetch(self, kind: str, flat: Tensor) -> None:
        """Copy a kind of the servers' state into ``flat``, fp32 [buffer.size].

        After `hold` it is collective, and raises RestartedError on all ranks of this worker if the
        frozen state is lost.
        """
        host = flat if flat.device.type == "cpu" else torch.empty(flat.shape)
        self.client.fetch_state(kind, host)
        if host is not flat:
            flat.copy_(host)
        if self._restarts_at_hold is not None:
            lost = torch.tensor(
                float(self.client.restarts != self._restarts_at_hold), device=self.buffer.device
            )
            if self.group is not None:
                dist.all_reduce(lost, group=self.group)
            if lost.item():
                raise RestartedError

    def kinds(self, parts: Parts) -> dict[str, StateKind]:
        """Return the servers' state as a checkpoint has it; each kind is fetched into the
        gradient's memory.
        """
        kinds = {}
        for kind in KINDS if self.buffer.rounds else KINDS[1:]:
            flat = whole(self.buffer.main_grad)
            shards = list(parts(flat, list(self.buffer.slots)))
            kinds[kind] = StateKind(
                [Turn(shards, partial(self.fetch, kind, flat), partial(self.store, kind, flat))]
            )
        return kinds

    def fetch_master(self) -> None:
        """Copy the fp32 weights of a 16-bit model into ``buffer.master``, to export them."""
        if self.buffer.rounds:
            self.fetch("master", self.buffer.master)

    def reduce_and_step(
        self, sums: Tensor | None, zeros: Tensor | None, rates: Rates
    ) -> tuple[list[float], list[float], StepResult]:
        flat_rates = [value for rate in rates for value in rate]
        result = (self._together if self.sync else self._alone)(sums, flat_rates)
        return result[0], [], result[1]

    def _alone(self, sums: Tensor | None, rates: Sequence[float]) -> tuple[list[float], StepResult]:
        values, (square,) = read(sums, self.square_norm())
        norm, factor = self._clipped(square)
        if factor is None:
            reply = self.pull()
        else:
            reply = self._settled(self._take(self.client.push, (self._on_cpu(), factor, rates)))
        return values, replace(
            self._result(norm, factor is None), staleness=reply.staleness, late=reply.late
        )

    def _together(
        self, sums: Tensor | None, rates: Sequence[float]
    ) -> tuple[list[float], StepResult]:
        values = [] if sums is None else read(sums)[0]
        contribution = Contribution(self._taken, self._on_cpu(), values)
        total = self.client.contribute(contribution)
        square = torch.tensor(total.square, dtype=torch.float64, device=self.buffer.device)
        if self.group is not None:
            dist.all_reduce(square, group=self.group)
        # Each worker's loss was divided by the number of workers: of those that are gone there is
        # no part.
        missing = self.workers / max(len(total.reported), 1)
        norm, factor = self._clipped(square.item() * missing**2)
        update = None if factor is None else (factor * missing, rates)
        self._take(lambda *arguments: self.client.apply(contribution, update, *arguments), ())
        self._taken += 1
        if sums is not None:
            rows = [list(row[: len(values)]) for row in total.reported] or [values]
            values = (_in_order(torch.tensor(rows, dtype=sums.dtype)) * missing).tolist()
        return values, self._result(norm, factor is None)

    def _on_cpu(self) -> Tensor:
        gradient = whole(self.buffer.main_grad)
        return gradient if self._gradient is None else self._gradient.copy_(gradient)

    @torch.no_grad()
    def _take(self, call: Callable[..., Reply], arguments: Iterable) -> Reply:
        """Call the servers so that their reply is in the buffer."""
        buffer = self.buffer
        into = (buffer.master if self._in_fp32 else whole(buffer.data)).detach()
        weights = into if self._weights is None else self._weights
        reply = call(*arguments, weights)
        if weights is not into:
            into.copy_(weights)
        if self._in_fp32 and buffer.rounds:
            whole(buffer.data).copy_(into)
        self.steps = reply.steps
        self.leader = reply.leader
        return reply

    @torch.no_grad()
    def _settled(self, answer: Reply) -> Reply:
        """Return the first rank's weights on all ranks that have the same ones.

        Servers that do not wait for all workers apply updates in different orders.
        """
        for names, group in [] if self.sync else self.parameters.copies:
            views = [self.buffer.parameter(name) for name in names]
            joined = torch.cat([view.reshape(-1) for view in views])
            dist.broadcast(joined, group=group, group_src=0)
            for view, part in zip(
                views, joined.split([view.numel() for view in views]), strict=True
            ):
                view.copy_(part.view_as(view))
        return answer


def _in_order(rows: Tensor) -> Tensor:
    """Return the sum of the rows, first to last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total

"""A worker of parameter servers: a job that trains beside other workers, which may come and go.

Every worker is a job with its own mesh, groups and data. With ps-sync it takes its part of every
batch; with ps-async it claims one part after the other, which all workers number together.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

from ..checkpoint.lock import DirectoryLock
from ..config import OptimizerConfig, RunConfig, of_worker, worker_note
from ..config.run import Run
from ..errors import ConfigError, DataError, DirectoryLockedError
from ..optimizer.loss_scale import LossScaler
from ..parallel.agree import broadcast_json, together
from ..parallel.interruption import Interruption
from ..parallel.launch import World, end_interrupted
from ..parallel.mesh import Mesh, SampleDivision
from ..parallel.same_software import software
from ..runtime.parameters import RankParameters
from ..stages.optimizer_state import OptimizerOf
from ..training.job import Job
from ..training.report import Report
from .client import Client
from .layout import layout_of, pieces_of
from .optimizer import RestartedError, ServedAdamW, wire_dtype
from .roles import Role
from .server import Server
from .serving import check_snapshots, joined, server_settings
from .stopping import StopRequest

_CLAIMS = "parts of batches that workers claimed"
_JOB = "what workers train, and on what"
_LOADED = "the checkpoint that the first worker loaded"
# attempts to take over a lock, and seconds between two
_ATTEMPTS = 50
_PAUSE = 0.2


class Worker:
    """The `Strategy` of a job that is one of several workers of parameter servers, on this rank.

    config: of the job, not of the worker alone.

    Without dedicated servers, this rank's own server runs beside it.
    """

    def __init__(self, config: RunConfig, world: World, role: Role):
        self.config = config
        self.role, self.store = joined(world, role)
        self.sync = config.parallel.data_parallel_strategy == "ps-sync"
        self.server: Server | None = None
        self.stop = StopRequest(self.store)

    def own(self, config: Run) -> Run:
        return of_worker(config, self.role.workers)

    def mesh(self, mesh: Mesh) -> Mesh:
        own = mesh.grid.dp
        replicas = own * self.role.workers
        division = SampleDivision(
            replicas, first=own * self.role.worker, summed=replicas if self.sync else own
        )
        return replace(mesh, division=division)

    def note(self) -> str:
        return worker_note(self.config.parallel, self.role.workers)

    def check_outputs(self) -> None:
        check_snapshots(self.config)

    def optimizer_of(self, config: RunConfig) -> OptimizerOf:
        """See `Strategy`. This rank's own server starts, before any rank builds its model."""
        if self.role.clients:
            self.server = Server(self.role, self.store, server_settings(config))
        return self.optimizer

    def run(self, job: Job, make_report: Callable[[], Report | None]) -> None:
        WorkerJob(job, self, make_report).run()

    def optimizer(
        self, parameters: RankParameters, config: OptimizerConfig, scaler: LossScaler | None
    ) -> ServedAdamW:
        """Return an optimizer of this rank's parameters, connected to its servers; an
        ``OptimizerOf``.
        """
        parallel = self.config.parallel
        buffer = parameters.buffer
        workers = self.role.workers
        most = 4 * workers if parallel.ps_max_staleness is None else parallel.ps_max_staleness
        layouts = []
        for piece in pieces_of(buffer.size, len(self.role.endpoints)):
            layout = layout_of(
                buffer,
                piece,
                dtype=str(wire_dtype(parameters)).removeprefix("torch."),
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_eps,
                workers=workers,
                sync=self.sync,
                max_staleness=most,
            )
            layouts.append((piece, layout))
        client = Client(
            self.role, self.store, layouts, timedelta(minutes=parallel.distributed_timeout_minutes)
        )
        return ServedAdamW(parameters, config, client, workers, sync=self.sync, scaler=scaler)

    def agree(self, mesh: Mesh, settings: object) -> None:
        """Raise ConfigError on all ranks of a worker whose settings, data or software differ from
        those of the first worker.

        settings: with the data, JSON-safe.
        """
        with together(mesh.control, "cpu"):
            if self.role.place == 0:
                content = json.dumps([settings, software()], sort_keys=True)
                digest = hashlib.sha256(content.encode()).hexdigest()
                first = self.store.compare_set(_JOB, "", digest).decode()
                if first != digest:
                    reason = (
                        "its flags, its data or its software differ from those of the first worker"
                    )
                    raise ConfigError(
                        "worker",
                        self.role.worker,
                        reason,
                        "Start all ranks with the same arguments and versions",
                    )

    def tell_loaded(self, iteration: int | None) -> None:
        """Publish which checkpoint to load, before the first worker's weights are on the
        servers.
        """
        if self.role.place == 0:
            self.store.set(_LOADED, json.dumps(iteration))

    def loaded(self) -> int | None:
        """Return the published checkpoint. Call it when the first worker's weights are on the
        servers.
        """
        return json.loads(self.store.get(_LOADED))

    def claim(self) -> int:
        """Return the number of the next unclaimed part of a batch, and claim it."""
        return self.store.add(_CLAIMS, 1) - 1

    def claimed(self) -> int:
        """Return how many parts of batches were claimed."""
        return self.store.add(_CLAIMS, 0)

    def leave(self, optimizer: ServedAdamW) -> None:
        """Tell the servers that the job is complete, and serve the other workers until they have
        left.
        """
        optimizer.client.leave(complete=True)
        if self.server is not None:
            self.server.wait()


class WorkerJob:
    """Runs a job's steps as one of several workers. The first worker that is alive leads: it
    prints, evaluates and saves.

    job:         of this rank, without a report.
    make_report: called on the rank that prints once its worker leads.
    """

    def __init__(self, job: Job, worker: Worker, make_report: Callable[[], Report | None]):
        self.job = job
        self.worker = worker
        self.make_report = make_report
        self.trainer = job.trainer
        self.mesh = job.mesh
        self.config = job.config
        assert isinstance(job.trainer.optimizer, ServedAdamW)
        self.optimizer = job.trainer.optimizer
        self.leads = False
        self.leading = ExitStack()
        self.start = self.consumed = 0  # iteration and samples that the run started at
        self.saved = self.evaluated = 0  # iterations of the last checkpoint and evaluation
        self.stopped = 0  # the signal for which all workers stop

    def run(self) -> None:
        """Run like ``Job.run``. Raises a MerakError on all ranks of this worker; other workers
        continue.
        """
        saves = self.config.checkpoint.save is not None and not self.config.train.skip_train
        with self.leading:
            self._lead(self.worker.role.worker == 0)
            self._resume()
            self.worker.agree(
                self.mesh, [self.config.to_dict(), self.trainer.data, self.trainer.iteration]
            )
            if not self.config.train.skip_train:
                self.job.note_later_checkpoints()
            self.start = self.saved = self.evaluated = self.trainer.iteration
            self.consumed = self.trainer.consumed_samples
            self.optimizer.begin_training(self.worker.role.worker == 0)
            with Interruption(None, end_interrupted, active=saves) as interruption:
                self.job.interruption = interruption
                if not self.config.train.skip_train:
                    self._train(interruption)
                interruption.agreed = self.stopped
                self._end()
            if self.stopped:
                self.job.interrupted(self.stopped)

    def _resume(self) -> None:
        """Load the newest undamaged checkpoint, on the first worker also into the servers; then the
        others load the same.
        """
        if self.config.checkpoint.load is None:
            return
        if self.worker.role.worker == 0:
            self.worker.tell_loaded(self.job.resume())
            return
        self.optimizer.pull()  # the first worker's weights, when they are there
        # as its first rank sees it
        loaded = broadcast_json(self.worker.loaded(), self.mesh.control, "cpu")
        if loaded is not None:
            self.job.resume(loaded, state=False)  # the first worker has loaded what servers store

    def _lead(self, leads: bool) -> None:
        if not leads or self.leads:
            return
        self.leads = True
        if self.config.checkpoint.save is not None:
            self.job.lock = self.leading.enter_context(self._lock(self.config.checkpoint.save))
        with together(self.mesh.control, "cpu"):
            self.job.report = self.make_report()
        if self.config.checkpoint.save is not None:
            self.job.store_settings(self.job.mesh.control)
        if self.worker.role.worker > 0:
            self.job.say(f"worker {self.worker.role.worker} leads: those before it are gone")

    def _lock(self, directory: str) -> DirectoryLock:
        """Lock the directory; the worker that led before may still be dying."""
        for _ in range(_ATTEMPTS if self.worker.role.worker > 0 else 0):
            try:
                return DirectoryLock(directory, self.mesh.control)
            except DirectoryLockedError:
                time.sleep(_PAUSE)
        return DirectoryLock(directory, self.mesh.control)

    def _next(self, start: int, last: int, interruption: Interruption) -> int | None:
        """Return the next step of ``last``, with ps-async the next unclaimed part of a batch; None
        at the end.

        All ranks of the worker agree on it, on who leads, and on whether they stop for a signal.
        """
        if interruption.received:
            self.worker.stop.make(interruption.received)
        answer = None
        if self.worker.role.place == 0:
            part = self.trainer.iteration
            stops = self._stops()
            if not self.worker.sync and not stops:
                part = start * self.worker.role.workers + self.worker.claim()
            answer = [part, self.optimizer.leader, stops]
        part, leader, self.stopped = broadcast_json(answer, self.mesh.control, "cpu")
        self._lead(leader == self.worker.role.worker)
        if self.stopped:
            return None
        return part if part < last * (1 if self.worker.sync else self.worker.role.workers) else None

    def _stops(self) -> int:
        """Return the signal for which this worker stops now, 0 to continue. On its first rank."""
        done = self.trainer.iteration
        number = self.worker.stop.number()
        return (
            number
            if number and (not self.worker.sync or done >= self.worker.stop.last(done))
            else 0
        )

    def _train(self, interruption: Interruption) -> None:
        job = self.job
        trainer = self.trainer
        train = self.config.train
        workers = self.worker.role.workers
        start = self.start
        last = trainer.iterations
        if train.exit_interval:
            last = min(last, (start // train.exit_interval + 1) * train.exit_interval)
        sync = self.worker.sync
        size = trainer.global_batch_size
        before = trainer.consumed_samples
        part_size = size // workers
        shape = (self.mesh.replica, workers, size) if sync else (0, 1, part_size)
        loader = job.training_data(*shape[:2], lambda consumed: shape[2])
        try:
            while (part := self._next(start, last, interruption)) is not None:
                if not sync:
                    trainer.iteration = part // workers
                    trainer.consumed_samples = self.consumed + (part - start * workers) * part_size
                batches = next(loader, None) if sync else loader.at(trainer.consumed_samples)
                if batches is None:
                    reason = f"the training data ends after {trainer.consumed_samples} samples"
                    raise DataError(
                        "--train-iters", train.train_iters, reason, "Lower it, or give more data"
                    )
                job.train_step(batches, before, part_of=None if sync else size)
                before = trainer.consumed_samples
                if self.leads:
                    self._after_step(last)
        finally:
            loader.close()
        if not self.stopped:
            self._stand_at(last)

    def _stand_at(self, iteration: int) -> None:
        """Set the position of the run: all parts of batches before it are taken."""
        self.trainer.iteration = iteration
        self.trainer.consumed_samples = (
            self.consumed + (iteration - self.start) * self.trainer.global_batch_size
        )

    def _after_step(self, last: int) -> None:
        """Save and evaluate when an interval has passed, since this worker does not see
        all steps.
        """
        train = self.config.train
        done = self.trainer.iteration
        checkpoint = self.config.checkpoint
        if done >= last:
            return  # the last ones follow when all workers are done
        if (
            checkpoint.save_interval
            and done // checkpoint.save_interval > self.saved // checkpoint.save_interval
        ):
            self._save()
        if (
            train.eval_interval
            and done // train.eval_interval > self.evaluated // train.eval_interval
        ):
            self.job.evaluate("valid")
            self.evaluated = done

    def _save(self) -> None:
        """Write a checkpoint; repeat it if a server was lost meanwhile, since its state must be of
        one moment.
        """
        self._stand_at(self.trainer.iteration)
        written = None
        while written is None:
            self.optimizer.hold()
            try:
                written = self.job.save()
            except RestartedError:
                self.job.say(
                    "a parameter server was started again, so the checkpoint is written anew"
                )
            self.optimizer.release()
        self.saved = written

    def _end(self) -> None:
        """Complete the job on the leading worker, when no worker takes steps any more and the
        weights are final.

        The others wait for that; if the leader is killed meanwhile, the next one takes over.
        """
        optimizer = self.optimizer
        optimizer.client.done()
        if not broadcast_json(optimizer.client.first(), self.mesh.control, "cpu"):
            self._lead(True)
            optimizer.pull()
            if self.stopped and not self.worker.sync:
                claimed = broadcast_json(self.worker.claimed(), self.mesh.control, "cpu")
                self._stand_at(self.start + claimed // self.worker.role.workers)
            if self.config.checkpoint.save is not None and self.saved != self.trainer.iteration:
                self._save()
            optimizer.fetch_master()
            if not self.stopped:
                self.job.close()
        self.worker.leave(optimizer)

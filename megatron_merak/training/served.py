"""A worker of parameter servers: a job that trains beside other workers, which may come and go.

Every worker is a job with its own mesh, groups and data. With ps-sync it takes its part of every batch; with ps-async
it claims one part after the other, which all workers number together.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ..checkpoint.lock import DirectoryLock
from ..config import SNAPSHOT_INTERVAL, OptimizerConfig, ParallelConfig, RunConfig
from ..config.servers import snapshot_directory
from ..counting import counted
from ..errors import ConfigError, DataError, DirectoryLockedError
from ..optimizer.loss_scale import LossScaler
from ..parallel.agree import broadcast_json, together
from ..parallel.interruption import Interrupted, Interruption
from ..parallel.launch import World, end_interrupted
from ..parallel.mesh import Mesh
from ..parallel.roles import Role
from ..parallel.same_software import software
from ..parameter_server.client import Client
from ..parameter_server.layout import layout_of, pieces_of
from ..parameter_server.optimizer import RestartedError, ServedAdamW, wire_dtype
from ..parameter_server.server import Server, Settings
from ..parameter_server.stopping import StopRequest
from ..runtime.parameters import RankParameters
from .console import put
from .job import Job
from .outputs import check_snapshots
from .report import Report

_CLAIMS = "parts of batches that workers claimed"
_JOB = "what workers train, and on what"
_LOADED = "the checkpoint that the first worker loaded"
# attempts to take over a lock, and seconds between two
_ATTEMPTS = 50
_PAUSE = 0.2
_LOOK = 0.5  # seconds between two checks of a server for signals


def role_of(parallel: ParallelConfig) -> Callable[[int, int], Role] | None:
    """Return the function by which ``launch`` finds the role of a rank; None without parameter servers."""
    if not parallel.served:
        return None
    return lambda rank, size: Role(rank, size, parallel.ranks_of_replica, parallel.num_parameter_servers)


def server_settings(config: RunConfig) -> Settings:
    """Return the settings of ranks that serve."""
    parallel = config.parallel
    save = config.checkpoint.save
    directory = None if save is None else snapshot_directory(save)
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    return Settings(directory, parallel.ps_snapshot_interval or SNAPSHOT_INTERVAL, timeout)


def serve(config: RunConfig, world: World) -> None:
    """Run a rank that only serves, until all workers have left or died.

    Raises the server's error, and Interrupted if this rank got a signal, for which the workers have stopped.
    """
    check_snapshots(config)
    role, store = _served(world)
    own = store.clone()  # type: ignore[attr-defined]  # which torch's stubs leave out
    stop = StopRequest(own)
    with Interruption(None, end_interrupted, active=config.checkpoint.save is not None) as interruption:
        server = Server(role, store, server_settings(config))
        if world.rank == 0:
            servers = counted(role.servers, "parameter server")
            workers = counted(role.workers, "worker")
            put(f"megatron_merak: {servers} for {workers}", sys.stdout)
        while not server.wait(_LOOK):
            if interruption.received:
                stop.make(interruption.received)
        put(server.summary(), sys.stdout)
        interruption.agreed = interruption.received
    if interruption.agreed:
        raise Interrupted(interruption.agreed)


def mesh_of_worker(mesh: Mesh, config: RunConfig, role: Role) -> Mesh:
    """Return the mesh of a worker's ranks, which knows the number of workers."""
    sync = config.parallel.data_parallel_strategy == "ps-sync"
    return replace(mesh, worker=role.worker, workers=role.workers, steps_together=sync)


def _served(world: World) -> tuple[Role, dist.Store]:
    """Return this rank's role in a job with parameter servers, and the job's store: such a job has both."""
    assert world.role is not None and world.store is not None
    return world.role, world.store


class Worker:
    """This rank's part in a job with parameter servers.

    config: of the job, not of the worker alone.

    Without dedicated servers, this rank's own server runs beside it.
    """

    def __init__(self, config: RunConfig, world: World):
        self.config = config
        self.role, self.store = _served(world)
        self.sync = config.parallel.data_parallel_strategy == "ps-sync"
        self.server = Server(self.role, self.store, server_settings(config)) if self.role.clients else None
        self.stop = StopRequest(self.store)

    def optimizer(self, parameters: RankParameters, config: OptimizerConfig, scaler: LossScaler | None) -> ServedAdamW:
        """Return an optimizer of this rank's parameters, connected to its servers; an ``OptimizerOf``."""
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
        client = Client(self.role, self.store, layouts, timedelta(minutes=parallel.distributed_timeout_minutes))
        return ServedAdamW(parameters, config, client, workers, sync=self.sync, scaler=scaler)

    def agree(self, mesh: Mesh, data: object) -> None:
        """Raise ConfigError on all ranks of a worker whose settings, data or software differ from those of the first
        worker.
        """
        with together(mesh.control, "cpu"):
            if self.role.place == 0:
                content = json.dumps([self.config.to_dict(), data, software()], sort_keys=True)
                digest = hashlib.sha256(content.encode()).hexdigest()
                first = self.store.compare_set(_JOB, "", digest).decode()
                if first != digest:
                    reason = "its flags, its data or its software differ from those of the first worker"
                    raise ConfigError(
                        "worker", self.role.worker, reason, "Start all ranks with the same arguments and versions"
                    )

    def tell_loaded(self, iteration: int | None) -> None:
        """Publish which checkpoint to load, before the first worker's weights are on the servers."""
        if self.role.place == 0:
            self.store.set(_LOADED, json.dumps(iteration))

    def loaded(self) -> int | None:
        """Return the published checkpoint. Call it when the first worker's weights are on the servers."""
        return json.loads(self.store.get(_LOADED))

    def claim(self) -> int:
        """Return the number of the next unclaimed part of a batch, and claim it."""
        return self.store.add(_CLAIMS, 1) - 1

    def claimed(self) -> int:
        """Return how many parts of batches were claimed."""
        return self.store.add(_CLAIMS, 0)

    def leave(self, optimizer: ServedAdamW) -> None:
        """Tell the servers that the job is complete, and serve the other workers until they have left."""
        optimizer.client.leave(complete=True)
        if self.server is not None:
            self.server.wait()


class WorkerJob:
    """Runs a job's steps as one of several workers. The first worker that is alive leads: it prints, evaluates and
    saves.

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
        """Run like ``Job.run``. Raises a MerakError on all ranks of this worker; other workers continue."""
        saves = self.config.checkpoint.save is not None and not self.config.train.skip_train
        with self.leading:
            self._lead(self.worker.role.worker == 0)
            self._resume()
            self.worker.agree(self.mesh, [self.trainer.data, self.trainer.iteration])
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
        """Load the newest undamaged checkpoint, on the first worker also into the servers; then the others load the
        same.
        """
        if self.config.checkpoint.load is None:
            return
        if self.worker.role.worker == 0:
            self.worker.tell_loaded(self.job.resume())
            return
        self.optimizer.pull()  # the first worker's weights, when they are there
        loaded = broadcast_json(self.worker.loaded(), self.mesh.control, "cpu")  # as its first rank sees it
        if loaded is not None:
            self.job.resume(loaded)

    def _lead(self, leads: bool) -> None:
        if not leads or self.leads:
            return
        self.leads = True
        if self.config.checkpoint.save is not None:
            self.job.lock = self.leading.enter_context(self._lock(self.config.checkpoint.save))
        with together(self.mesh.control, "cpu"):
            self.job.report = self.make_report()
        if self.config.checkpoint.save is not None:
            self.job.store_settings()
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
        """Return the next step of ``last``, with ps-async the next unclaimed part of a batch; None at the end.

        All ranks of the worker agree on it, on who leads, and on whether they stop for a signal.
        """
        if interruption.received:
            self.worker.stop.make(interruption.received)
        answer = None
        if self.worker.role.place == 0:
            part = self.trainer.iteration
            stops = self._stops()
            if not self.worker.sync and not stops:
                part = start * self.mesh.workers + self.worker.claim()
            answer = [part, self.optimizer.leader, stops]
        part, leader, self.stopped = broadcast_json(answer, self.mesh.control, "cpu")
        self._lead(leader == self.worker.role.worker)
        if self.stopped:
            return None
        return part if part < last * (1 if self.worker.sync else self.mesh.workers) else None

    def _stops(self) -> int:
        """Return the signal for which this worker stops now, 0 to continue. On its first rank."""
        done = self.trainer.iteration
        number = self.worker.stop.number()
        return number if number and (not self.worker.sync or done >= self.worker.stop.last(done)) else 0

    def _train(self, interruption: Interruption) -> None:
        job = self.job
        trainer = self.trainer
        train = self.config.train
        workers = self.mesh.workers
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
                    raise DataError("--train-iters", train.train_iters, reason, "Lower it, or give more data")
                job.train_step(batches, before)
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
        self.trainer.consumed_samples = self.consumed + (iteration - self.start) * self.trainer.global_batch_size

    def _after_step(self, last: int) -> None:
        """Save and evaluate when an interval has passed, since this worker does not see all steps."""
        train = self.config.train
        done = self.trainer.iteration
        checkpoint = self.config.checkpoint
        if done >= last:
            return  # the last ones follow when all workers are done
        if checkpoint.save_interval and done // checkpoint.save_interval > self.saved // checkpoint.save_interval:
            self._save()
        if train.eval_interval and done // train.eval_interval > self.evaluated // train.eval_interval:
            self.job.evaluate("valid")
            self.evaluated = done

    def _save(self) -> None:
        """Write a checkpoint; repeat it if a server was lost meanwhile, since its state must be of one moment."""
        self._stand_at(self.trainer.iteration)
        written = None
        while written is None:
            self.optimizer.hold()
            try:
                written = self.job.save()
            except RestartedError:
                self.job.say("a parameter server was started again, so the checkpoint is written anew")
            self.optimizer.release()
        self.saved = written

    def _end(self) -> None:
        """Complete the job on the leading worker, when no worker takes steps any more and the weights are final.

        The others wait for that; if the leader is killed meanwhile, the next one takes over.
        """
        optimizer = self.optimizer
        optimizer.client.done()
        if not broadcast_json(optimizer.client.first(), self.mesh.control, "cpu"):
            self._lead(True)
            optimizer.pull()
            if self.stopped and not self.worker.sync:
                claimed = broadcast_json(self.worker.claimed(), self.mesh.control, "cpu")
                self._stand_at(self.start + claimed // self.mesh.workers)
            if self.config.checkpoint.save is not None and self.saved != self.trainer.iteration:
                self._save()
            optimizer.fetch_master()
            if not self.stopped:
                self.job.close()
        self.worker.leave(optimizer)

"""The loop of a pretraining job, whatever its model: resume, train, evaluate, save, report."""

import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..arguments import deviation_report
from ..checkpoint import store
from ..checkpoint.behind import Behind
from ..checkpoint.directory import Iterations, read_manifest
from ..checkpoint.full_disk import Saving
from ..checkpoint.lock import DirectoryLock
from ..checkpoint.recoverable import furthest
from ..config import RunConfig, check_sizes
from ..data.build import Datasets
from ..data.identity import difference, identity, sample_digests
from ..data.loader import BatchLoader
from ..data.stream import RankRows, Stream, StreamSamples
from ..data.stream_loader import StreamLoader
from ..errors import (
    DataError,
    DoubtfulResultError,
    UnexpectedResultError,
)
from ..parallel.agree import broadcast_json, gather_json, together
from ..parallel.interruption import Interrupted, Interruption
from ..parallel.launch import World, end_interrupted
from ..parallel.mesh import Mesh
from ..parallel.nodes import Nodes, notices
from ..parallel.position import tell
from ..pipeline_parallel.ops import Schedule
from ..pipeline_parallel.passes import resize
from ..pipeline_parallel.pictures.files import write
from ..plan import Plan, plan_table
from ..planner.growth import growth_table
from ..stages.devices import peak_device, stand_in
from ..stages.step_report import StepReport
from .increments import IncrementsBehind
from .load_check import absent
from .pictures import draw_curve, step_view
from .report import Progress, Report, Throughput
from .saves_behind import SavesBehind
from .settings_file import store_settings
from .skips import SkippedSteps
from .stragglers import Stragglers
from .streamed import Streamed
from .trainer import Trainer


def agree_on_data(data: Mapping[str, Mapping | None], datasets: Datasets, mesh: Mesh) -> None:
    """Raise DataError on every rank if hosts have different copies of the data.

    data:     see ``data.identity``.
    datasets: values of some samples are compared, too.
    """
    remedy = "Provide the same files on all hosts"
    everywhere = gather_json(data, mesh.control, "cpu")
    for rank, theirs in enumerate(everywhere):
        for part, first in everywhere[0].items():
            text = difference(theirs[part], first)
            if text or first is not None and theirs[part]["order"] != first["order"]:
                reason = (
                    f"rank {rank} reads other {part} data than rank 0: "
                    f"{text or 'samples in another order'}"
                )
                raise DataError("data set", f"({part})", reason, remedy)
    if mesh.control is None:
        return
    with together(mesh.control, "cpu"):
        own = sample_digests(datasets)
    values = gather_json(own, mesh.control, "cpu")
    for rank, theirs in enumerate(values):
        for part, first in values[0].items():
            if theirs[part] != first:
                pairs = zip(theirs[part] or (), first or (), strict=True)
                sample, expected = next((one, other) for one, other in pairs if one != other)
                place = sample.partition(":")[0]
                reason = (
                    f"sample {place} has other values on rank {rank} ({sample}) than on "
                    f"rank 0 ({expected})"
                )
                raise DataError("data set", f"({part})", reason, remedy)


def opening(
    config: RunConfig,
    plan: Plan,
    world: World,
    nodes: Nodes,
    notes: Sequence[str] = (),
    of_plan: str = "",
) -> str:
    """Return what the first rank prints at the start.

    notes:   further lines.
    of_plan: what the plan does not say.
    """
    parts = [
        f"megatron_merak on {world}",
        f"Times of training steps are {world.clock.label}: this machine computes, its speed "
        "plays no part"
        if world.clock.label
        else "",
        deviation_report(config),
        stand_in(world),
        "\n".join((*config.ignored(), *notes)),
        "\n".join(notices(plan.grid, nodes)),
        of_plan,
        plan_table(plan),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def throughput(
    config: RunConfig, plan: Plan, world: World, flops: float, replicas: int
) -> Throughput:
    """Return the work of a sample.

    flops:    of the plan's step, forward and backward, over all ranks.
    replicas: of the model that train together; the plan may have some of them only.
    """
    device = peak_device(world)
    peak = None if device is None else device.flops(config.train.dtype)
    per_sample = flops / plan.global_batch_size
    ranks = replicas * plan.grid.size // plan.grid.dp
    return Throughput(plan.sequence_length, per_sample, ranks, peak, clock=world.clock.label)


class Job:
    """The training loop around a Trainer.

    ``report``: None except on the rank that prints, where the job's creator sets it.
    """

    def __init__(self, trainer: Trainer, datasets: Datasets):
        self.config = trainer.config
        self.plan = trainer.plan
        self.mesh = trainer.mesh
        self.trainer = trainer
        self.datasets = datasets
        # the settings as they were given, which --save stores
        self.settings: RunConfig = trainer.config
        self.report: Report | None = None
        trainer.data = identity(datasets)
        if isinstance(datasets.train, Stream):
            trainer.streamed = Streamed(datasets.train, self.config.streams.stream_lanes)
        agree_on_data(trainer.data, datasets, self.mesh)
        limit = self.config.train.max_consecutive_skipped_steps
        scaler = trainer.optimizer.scaler
        self.skips = SkippedSteps(limit, trainer.model.buffer, self.mesh.control, scaler=scaler)
        self.lock: DirectoryLock | None = None
        self.interruption: Interruption | None = None
        self.saving = Saving(
            self.config.checkpoint.on_full_disk, self.mesh.control, self.say, self._received
        )
        self.saves_behind: SavesBehind | None = None
        if self.config.checkpoint.async_save:
            self.saves_behind = SavesBehind(
                trainer, self._confirm_directory, self._received, self._tell
            )
        self._loaded: int | None = None  # the checkpoint whose state this is
        self.stragglers: Stragglers | None = None
        if self.config.logging.log_straggler:
            self.stragglers = Stragglers(self.config.logging, self.mesh)
        interval = self.config.checkpoint.save_increment_interval
        if interval is not None:
            trainer.increments = IncrementsBehind(
                trainer.model,
                interval,
                self.config.checkpoint.on_full_disk,
                self._received,
                run=broadcast_json(secrets.token_hex(8), self.mesh.control, "cpu"),
            )

    def run(self) -> None:
        """Train from the checkpoint of --load, if any; --save is locked meanwhile. Raises
        MerakError on every rank.
        """
        if self.config.checkpoint.save is None:
            self._run()
            return
        with DirectoryLock(self.config.checkpoint.save, self.mesh.control) as self.lock:
            self.store_settings(self.mesh.control)
            self._run()

    def store_settings(self, group: dist.ProcessGroup | None) -> None:
        """Write the settings into the directory of --save on the rank that prints. Raises
        CheckpointError on every rank.

        group: all ranks of the job.
        """
        with together(group, "cpu"):
            if self.report is not None and self.config.checkpoint.save is not None:
                store_settings(self.settings, self.config.checkpoint.save)

    def _run(self) -> None:
        self.resume()
        if not self.config.train.skip_train:
            saves = self.config.checkpoint.save is not None
            self.note_later_checkpoints()
            with Interruption(self.mesh.control, end_interrupted, active=saves) as interruption:
                self.interruption = interruption
                self._train(interruption)
            if interruption.agreed:
                self.interrupted(interruption.agreed)
        self.close()

    def _received(self) -> int:
        """Return a signal for which the run does not stop yet, 0 for none."""
        interruption = self.interruption
        return 0 if interruption is None or interruption.agreed else interruption.received

    def interrupted(self, number: int) -> None:
        """End the run after it was saved for a signal: report how to continue, and raise
        Interrupted.
        """
        text = ""
        options = self.config.checkpoint
        if self.report is not None:
            again = (
                "start it again with the same flags"
                if options.load == options.save
                else f"--load {options.save}"
            )
            text = (
                f"interrupted by {signal.Signals(number).name} after iteration "
                f"{self.trainer.iteration:,}, "
            )
            text += f"which was saved; to go on, {again}"
            self.report.close()
        raise Interrupted(number, text)

    def close(self) -> None:
        """Do what follows training: save the model, evaluate, close the report."""
        self.finish()
        for kind in ("valid", "test"):
            self.evaluate(kind)
        if self.report is not None:
            curve = self.config.logging.curve
            if curve is not None and self.report.draw(
                curve, partial(draw_curve, self.report.records, curve)
            ):
                self.report.print(f"loss curve: {curve}")
            self.report.close()

    def finish(self) -> None:
        """Called when training is over, before the last evaluation."""

    def resume(self, step: int | None = None, state: bool = True) -> int | None:
        """Load the checkpoint of --load and return its iteration, if there is one.

        step:  the one to load, in place of --ckpt-step.
        state: see ``Trainer.load``.

        Raises CheckpointError on every rank.
        """
        options = self.config.checkpoint
        step = options.ckpt_step if step is None else step
        if options.load is None:
            return None
        if step is None and store.latest(options.load, self.mesh.control) is None:
            if options.exit_on_missing_checkpoint:
                raise absent(options.load)
            self.say(f"no checkpoint in {options.load}: starting at iteration 0")
            return None
        began = time.perf_counter()
        loaded = self.trainer.load(options.load, step, self.say, state=state)
        self._timed("resume", time.perf_counter() - began, load=str(options.load))
        repeated = self.trainer.repeated
        steps = f", and the steps to iteration {loaded}" if repeated else ""
        self.say(
            f"loaded the checkpoint of iteration {loaded - repeated} from {options.load}{steps}"
        )
        if not (repeated or options.finetune or options.no_load_optim):
            self._loaded = loaded
        newest = None if step is None else furthest(options.load, self.mesh.control)
        if step is not None and newest is not None and newest > step:
            self.say(
                f"{options.load} also holds iteration {newest}, where a resume without "
                "--ckpt-step goes on"
            )
        return loaded

    def note_later_checkpoints(self) -> None:
        """Say if --save holds checkpoints of an earlier run that a resume would prefer. Raises
        CheckpointError on every rank.
        """
        options = self.config.checkpoint
        # told already
        if options.save is None or options.ckpt_step is not None and options.load == options.save:
            return
        newest = furthest(options.save, self.mesh.control) or 0
        if newest > self.trainer.iteration:
            text = (
                f"{options.save} already holds iteration {newest} of an earlier run, where a "
                "resume goes on"
            )
            self.say(
                f"{text} until this run has saved a later one; --save elsewhere keeps them apart"
            )

    def _timed(self, what: str, seconds: float, **values: float | str) -> None:
        """Tell trackers how long something took that has just ended, on the rank that prints."""
        if self.report is not None:
            self.report.timed(what, self.trainer.iteration, seconds, **values)

    def say(self, text: str) -> None:
        """Print a line, on the rank that prints."""
        if self.report is not None:
            self.report.print(text)

    def training_data(self, replica: int, replicas: int, size: Callable[[int], int]) -> BatchLoader:
        """Return one replica's part of each batch, of so many replicas. Raises DataError.

        size: returns the samples of the batch after so many samples.
        """
        if self.datasets.train is None:
            raise DataError(
                "--split",
                self.config.data.split,
                "it leaves no training data",
                "Give the first part a weight",
            )
        train: object = self.datasets.train
        if self.trainer.streamed is not None:
            rows = self._rows(replica, replicas)
            consumed = self.trainer.consumed_samples
            train = self.trainer.streamed.open(rows, consumed, self.mesh.control)
        return self._loader(
            train,
            replica,
            replicas,
            size,
            consumed_samples=self.trainer.consumed_samples,
        )

    def _rows(self, replica: int, replicas: int) -> RankRows:
        return RankRows(self.plan.micro_batch_size, replica, replicas)

    def _loader(
        self,
        dataset,
        replica: int,
        replicas: int,
        size: Callable[[int], int],
        consumed_samples: int,
    ) -> BatchLoader:
        workers = self.config.data.num_workers
        kind: type[BatchLoader] = BatchLoader
        if isinstance(dataset, StreamSamples):
            kind = StreamLoader
            workers = max(workers, 1)
        return kind(
            dataset,
            self.plan.micro_batch_size,
            dp_rank=replica,
            dp_size=replicas,
            size=size,
            consumed_samples=consumed_samples,
            workers=workers,
            pinned=self.mesh.device.type == "cuda",
        )

    def _train(self, interruption: Interruption) -> None:
        train = self.config.train
        trainer = self.trainer
        loader = self.training_data(self.mesh.dp_rank, self.plan.grid.dp, trainer.batch_sizes.size)
        check_sizes(train, trainer.batch_sizes, self.plan.grid.dp, trainer.consumed_samples)
        phases = [] if train.train_samples is None else trainer.phases_left()
        if table := growth_table(self.plan, phases):
            self.say(f"{table}\n")
        try:
            with ExitStack() as stack:
                for behind in self._behind():
                    stack.enter_context(behind)
                self._begin_increments()
                self._steps(loader, interruption)
        finally:
            self._tell()
            loader.close()

    def _behind(self) -> list[Behind]:
        """Return what writes beside training."""
        saves = self.saves_behind
        increments = self.trainer.increments
        return [each.behind for each in (saves, increments) if each is not None]

    def _begin_increments(self) -> None:
        """Let increments follow the checkpoint of this state, which is written where --save does not
        have it.
        """
        options = self.config.checkpoint
        trainer = self.trainer
        if trainer.increments is None or trainer.iteration >= trainer.iterations:
            return
        assert options.save is not None, "increments need --save"
        is_there = self._loaded == trainer.iteration and options.load is not None
        if not (is_there and os.path.realpath(str(options.load)) == os.path.realpath(options.save)):
            self.say("increments follow a checkpoint of the state that the run begins with")
            self.save()
            if self.saves_behind is not None:
                self.saves_behind.behind.finish()
        save_id = ""
        with together(self.mesh.control, "cpu"):
            if self.mesh.rank == 0:
                path = Iterations(Path(options.save)).locate(trainer.iteration)
                assert path is not None, "it was saved, or loaded from there"
                save_id = read_manifest(path)[1].save_id
        save_id = broadcast_json(save_id, self.mesh.control, "cpu")
        trainer.increments.begin(options.save, (trainer.iteration, save_id), trainer.meta())

    def _steps(self, loader: BatchLoader, interruption: Interruption) -> None:
        """Train, save and evaluate until the run ends."""
        train = self.config.train
        checkpoint = self.config.checkpoint
        trainer = self.trainer
        saved = trainer.iteration
        while trainer.iteration < trainer.iterations:
            batches = self._next(loader)
            if batches is None:
                flag = "--train-iters" if train.train_samples is None else "--train-samples"
                length = train.train_iters if train.train_samples is None else train.train_samples
                reason = f"the training data ends at {loader.consumed_samples} samples"
                raise DataError(flag, length, reason, "Lower it, or give more data")
            interruption.before_step()
            try:
                self.train_step(batches, trainer.consumed_samples)
            except (UnexpectedResultError, DoubtfulResultError):  # nothing was updated
                if checkpoint.save is not None and saved != trainer.iteration:
                    self.save()
                raise
            self._tell()
            stops = interruption.after_step() > 0
            if checkpoint.save_interval and trainer.iteration % checkpoint.save_interval == 0:
                saved = self.save()
            if stops:
                break
            if (
                train.eval_interval
                and trainer.iteration % train.eval_interval == 0
                and trainer.iteration < trainer.iterations
            ):
                self.evaluate("valid")
            if train.exit_interval and trainer.iteration % train.exit_interval == 0:
                break
        if checkpoint.save is not None and saved != trainer.iteration:
            self.save()

    def _next(self, loader: BatchLoader) -> list[dict[str, torch.Tensor]] | None:
        """Return the next step, None at the end of the data. Raises on every rank what one meets in a
        stream, of which it reads a part of its own.
        """
        if not isinstance(loader, StreamLoader):
            return next(loader, None)
        batches = None
        with together(self.mesh.control, "cpu"):
            batches = next(loader)
        while loader.samples.left_out:
            tell(f"megatron_merak: {loader.samples.left_out.popleft()}")
        return batches

    def train_step(
        self, batches: list[dict[str, torch.Tensor]], before: int, part_of: int | None = None
    ) -> None:
        """Run and report one step.

        before:  samples that the job had consumed at this rank's last report.
        part_of: size of the batch that the step has a part of; None if it has all of one.
        """
        trainer = self.trainer
        executor = self.trainer.model.executor(len(batches))
        drawn = (
            self.config.logging.timeline is not None and trainer.iteration + 1 == trainer.iterations
        )
        timed = drawn or self.stragglers is not None
        executor.trace = [] if timed else None
        result, seconds = self._timed_step(batches)
        if self.stragglers is not None:
            self.stragglers.add(executor.last.computing())
        if self.report is not None:
            progress = Progress(
                trainer.iteration,
                trainer.iterations,
                trainer.consumed_samples,
                trainer.consumed_samples - before,
                batch=part_of,
            )
            self.report.step(progress, seconds, result)
        interval = self.config.logging.log_interval
        last = trainer.iteration == trainer.iterations
        if self.stragglers is not None and (last or trainer.iteration % interval == 0):
            self.say(self.stragglers.report(trainer.iteration))
        self._count_skipped(result.skipped, batches)
        if drawn and executor.trace is not None:
            self._draw_timeline(resize(self.plan.schedule, len(batches)), executor.trace)

    def _timed_step(self, batches: list[dict[str, torch.Tensor]]) -> tuple[StepReport, float]:
        """Return what a step tells, and the seconds that it took."""
        clock = self.mesh.clock
        began = clock.now()
        with clock.kernels():
            result = self.trainer.step(batches)
        return result, clock.now() - began

    def timed_steps(self, count: int) -> list[float]:
        """Return the seconds of so many steps of the planned batch, all of them on the first
        samples. Nothing is reported or saved. Raises DataError.
        """
        trainer = self.trainer
        size = trainer.global_batch_size
        loader = self.training_data(self.mesh.dp_rank, self.plan.grid.dp, lambda consumed: size)
        try:
            batches = self._next(loader)
        finally:
            loader.close()
        if batches is None:
            reason = f"the training data has fewer than {size} samples"
            raise DataError("--global-batch-size", size, reason, "Lower it, or give more data")
        # fp16 skips the first steps of a run until it has found a scale
        trainer.optimizer.scaler.scale = 1.0
        seconds = [self._timed_step(batches)[1] for _ in range(count)]
        trainer.model.gatherer.finish()
        return seconds

    def _count_skipped(self, skipped: bool, batches: list[dict[str, torch.Tensor]]) -> None:
        trainer = self.trainer

        def first() -> str:
            # others update the weights too, which may have moved on
            if self.mesh.replicas > self.mesh.grid.dp:
                return ""
            return trainer.model.first_not_finite(trainer.model.from_samples(batches))

        if told := self.skips.count(skipped, first):
            self.say(f"iteration {trainer.iteration}: {told}")

    def _draw_timeline(self, schedule: Schedule, trace: list) -> None:
        view = step_view(schedule, trace, self.mesh)
        path = self.config.logging.timeline
        if self.report is not None:
            self.report.measured([view])
            if path is not None and self.report.draw(path, partial(write, [view], path)):
                self.report.print(f"pipeline timeline: {path}")

    def save(self) -> int:
        """Write a checkpoint; return its iteration. What happens on a full disk, --on-full-disk
        says.

        Raises CheckpointError and NumericsError on every rank, and Interrupted for a signal while
        it waits for space.
        """
        options = self.config.checkpoint
        assert options.save is not None, "without --save there is no checkpoint"
        increments = self.trainer.increments
        if increments is not None:
            increments.flush()
        self._save(options.save)
        if increments is not None:
            increments.follow_checkpoint()
        return self.trainer.iteration

    def _save(self, directory: str) -> None:
        options = self.config.checkpoint
        if self.saves_behind is not None:
            began = time.perf_counter()
            self.saves_behind.save(directory)
            self._timed("save", time.perf_counter() - began, behind="yes")
            return
        self.saving.run(directory, partial(self._write, directory))
        if options.save_retain_interval:
            store.prune(
                directory,
                options.save_retain_interval,
                self.mesh.control,
                saved=self.trainer.iteration,
            )

    def _write(self, directory: str) -> None:
        began = time.perf_counter()
        self._confirm_directory(self.mesh.control, self.say)
        path = self.trainer.save(directory)
        seconds = time.perf_counter() - began
        self.say(f"saved {path} in {seconds:.1f} s")
        self._timed("save", seconds, path=str(path))

    def _confirm_directory(
        self, group: dist.ProcessGroup | None, say: Callable[[str], object]
    ) -> None:
        """Make the directory of --save anew where it was removed.

        group: all ranks of the job.
        say:   called with a line for the user, on every rank.
        """
        assert self.lock is not None, "the directory is locked for the run"
        if self.lock.confirm_over(group):
            say(
                f"{self.config.checkpoint.save} was removed under the run, with all checkpoints in it: it is made "
                "anew"
            )
            self.store_settings(group)

    def _tell(self) -> None:
        """Print what the threads that save have said."""
        for behind in self._behind():
            while not behind.lines.empty():
                self.say(behind.lines.get())

    def evaluate(self, kind: str) -> None:
        """Report the loss on a part of the data, "valid" or "test", if it exists."""
        iterations = self.config.train.eval_iters
        trainer = self.trainer
        dataset = getattr(self.datasets, kind)
        if dataset is None or iterations == 0:
            return
        if isinstance(dataset, Stream):
            rows = self._rows(self.mesh.dp_rank, self.plan.grid.dp)
            dataset = dataset.open(rows, dataset.beginning())
        loader = self._loader(
            dataset,
            self.mesh.dp_rank,
            self.plan.grid.dp,
            lambda consumed: trainer.global_batch_size,
            consumed_samples=0,
        )
        began = time.perf_counter()
        losses = []
        try:
            for _ in range(iterations):
                batches = self._next(loader)
                if batches is None:
                    break
                losses.append(trainer.model.mean_loss(batches))
        finally:
            loader.close()
        known = [loss for loss in losses if loss is not None]
        if self.report is not None and known:
            loss = sum(known) / len(known)
            perplexity = math.exp(min(loss, 700))
            self.report.note(kind, trainer.iteration, loss=loss, perplexity=perplexity)
            self._timed("evaluate", time.perf_counter() - began, kind=kind, loss=loss)
            name = {"valid": "validation", "test": "test"}[kind]
            values = f"lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E}"
            self.report.print(f" {name} loss at iteration {trainer.iteration} | {values} |")

"""Which states a directory can give: its checkpoints, and the steps behind each that increments have.

A checkpoint is followed by the steps of a run that began at it, or that saved it, as far as no step
is missing. Of all that can be reached the furthest state is taken; where two lead to it, the one
with fewer steps to repeat. What turns out to be damaged is passed over: a checkpoint with all that
needs it, an increment with the steps behind it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron_merak.checkpoint.directory import Iterations, iteration_of, read_manifest
from megatron_merak.checkpoint.files import disk_errors, verify_tensors
from megatron_merak.checkpoint.increments import (
    RUN,
    Increment,
    Increments,
    read_increment,
    run_of,
    runs_of,
)
from megatron_merak.errors import CheckpointError, DamagedError
from megatron_merak.parallel.agree import broadcast_json, gather_json, together

_REMEDY = "Check --load and --ckpt-step"


@dataclass(frozen=True)
class StepChain:
    """A checkpoint, and the steps behind it.

    checkpoint: its iteration.
    last:       the last step, or that of the checkpoint.
    paths:      the directories of steps, in order, relative to the one that has the checkpoints.
    note:       why there are no further ones; "" if there never were.
    """

    checkpoint: int
    last: int
    paths: tuple[str, ...] = ()
    note: str = ""


class Recoverable:
    """The states of a directory, and which is the best. Collective over ``group``.

    iteration: the only one that is wanted; None: the newest.

    Raises `CheckpointError` on every rank for one that cannot be read or is another version's.
    """

    def __init__(self, root: Path, group: dist.ProcessGroup | None, iteration: int | None = None):
        self.root = root
        self.iteration = iteration
        self.messages: list[str] = []
        self._group = group
        first = group is None or dist.get_rank(group) == 0
        found: list[tuple] = []
        faults: list[CheckpointError] = []
        with together(group, "cpu"), disk_errors(root, _REMEDY):
            if first:
                found = [(c.checkpoint, c.last, c.paths, c.note) for c in chains(root, faults)]
        found, told = broadcast_json((found, [fault.fault for fault in faults]), group, "cpu")
        self.chains = [StepChain(one, last, tuple(paths), note) for one, last, paths, note in found]
        self.messages += told
        self._verified: set[str] = set()

    def best(self) -> StepChain:
        """Return the best chain, whose increments are undamaged; the checkpoint is not read.

        Raises `DamagedError` on every rank if all are damaged, or a step that ``iteration`` needs,
        and `CheckpointError` if there is no such iteration.
        """
        while True:
            chain = max(self._wanted(), key=_order, default=None)
            if chain is None:
                self._raise_absent()
            damaged = self._damaged(chain)
            if damaged is None:
                return chain
            last, reason = damaged
            if self.iteration is not None:
                raise DamagedError("increment", self.root, reason, _REMEDY)
            self.messages.append(reason)
            # also of the other checkpoints that the step follows
            self.chains = [
                replace(each, last=last, note="")
                if each.checkpoint <= last < each.last and set(each.paths) & set(chain.paths)
                else each
                for each in self.chains
            ]

    def drop(self, chain: StepChain, error: DamagedError) -> None:
        """Pass over a chain whose checkpoint is damaged. Raises it for an ``iteration``."""
        if self.iteration is not None:
            raise error
        self.messages.append(error.fault)
        self.chains = [each for each in self.chains if each.checkpoint != chain.checkpoint]

    def increments(self, chain: StepChain) -> list[Increment]:
        """Return what the directories of a chain say."""
        found: list[Increment] = []
        with together(self._group, "cpu"), disk_errors(self.root, _REMEDY):
            found = [read_increment(self.root / path) for path in chain.paths]
        return found

    def _wanted(self) -> Iterator[StepChain]:
        for chain in self.chains:
            if self.iteration is None:
                yield chain
            elif chain.checkpoint <= self.iteration <= chain.last:
                yield replace(chain, last=self.iteration)

    def _raise_absent(self) -> NoReturn:
        if self.messages and not self.chains:
            reason = f"all of its checkpoints are damaged: {self.messages[0]}"
            raise DamagedError("checkpoint directory", self.root, reason, "Restore one from a copy")
        if self.iteration is None:
            reason = "it has no complete checkpoint"
            raise CheckpointError("checkpoint directory", self.root, reason, _REMEDY)
        states = ", ".join(map(described, sorted(self.chains, key=_order, reverse=True)))
        reason = (
            f"it has no complete checkpoint of iteration {self.iteration}, nor the steps to it "
            f"(complete are: {states or 'none'})"
        )
        raise CheckpointError("checkpoint directory", self.root, reason, _REMEDY)

    def _damaged(self, chain: StepChain) -> tuple[int, str] | None:
        """Return the last step before a damaged one, and what is wrong; None: all are undamaged."""
        group = self._group
        rank = 0 if group is None else dist.get_rank(group)
        world = 1 if group is None else dist.get_world_size(group)
        files = [
            (number, increment, name, digests)
            for increment in self.increments(chain)
            for number in range(increment.first, increment.last + 1)
            if chain.checkpoint < number <= chain.last
            for name, digests in sorted(increment.files(number).items())
            if f"{increment.path}/{name}" not in self._verified
        ]
        own: tuple[int, str] | None = None
        with together(group, "cpu"):
            for number, increment, name, digests in files[rank::world]:
                try:
                    manifest = increment.manifest
                    written = manifest.files[name]
                    verify_tensors(increment.path / name, written, digests, manifest.save_id)
                except DamagedError as error:
                    own = (number - 1, error.fault)
                    break
        found = [each for each in gather_json(own, group, "cpu") if each is not None]
        if found:
            last, reason = min(found)
            return last, reason
        self._verified.update(f"{increment.path}/{name}" for _, increment, name, _ in files)
        return None


def _order(chain: StepChain) -> tuple[int, int]:
    return chain.last, chain.checkpoint


def described(chain: StepChain) -> str:
    """Return what a chain reaches: "20", or "20 to 35"."""
    steps = f" to {chain.last}" if chain.last > chain.checkpoint else ""
    return f"{chain.checkpoint}{steps}"


def chains(root: Path, faults: list[CheckpointError], strict: bool = True) -> list[StepChain]:
    """Return each complete checkpoint of a directory with the steps behind it.

    faults: collects what is wrong with others.
    strict: raise `CheckpointError` for what cannot be read, or is another version's.

    Local to one rank.
    """
    checkpoints = []
    iterations = Iterations(root)
    for path in iterations.candidates(faults) if strict else iterations.newest_first(faults):
        manifest = read_manifest(path)[1]
        checkpoints.append((manifest.iteration, manifest.save_id, manifest.meta.get(RUN)))
    runs = [_run(path, strict) for path in runs_of(root)]
    found: dict[int, StepChain] = {}
    for iteration, save_id, token in checkpoints:
        reached = [StepChain(iteration, iteration)]
        for run, increments, damage in runs:
            begins = any(each.base == (iteration, save_id) for each in increments)
            if begins or (run == token and increments):
                reached.append(_followed(root, iteration, increments, damage))
        best = max(reached, key=lambda each: (each.last, each.note))
        found.setdefault(iteration, best)
    return [*found.values()]


def furthest(root: Path | str, group: dist.ProcessGroup | None = None) -> int | None:
    """Return the newest step that a directory's manifests promise, or None: what the group's first
    rank sees, on every rank.
    """
    newest = None
    with together(group, "cpu"), disk_errors(Path(root), _REMEDY):
        if group is None or dist.get_rank(group) == 0:
            newest = max((each.last for each in chains(Path(root), [], strict=False)), default=None)
    return broadcast_json(newest, group, "cpu")


def has_increments(root: Path | str, group: dist.ProcessGroup | None) -> bool:
    """Return whether the group's first rank sees any, on every rank."""
    found = False
    with together(group, "cpu"), disk_errors(Path(root), _REMEDY):
        if group is None or dist.get_rank(group) == 0:
            found = any(Increments(path).numbers() for path in runs_of(Path(root)))
    return broadcast_json(found, group, "cpu")


def _run(
    directory: Path, strict: bool
) -> tuple[str | None, list[Increment], list[tuple[int, str]]]:
    """Return the run of a directory, its increments in order, and (first step, what is wrong) of
    damaged ones.
    """
    faults: list[CheckpointError] = []
    own = Increments(directory)
    complete = own.candidates(faults) if strict else own.newest_first(faults)
    increments = [*map(read_increment, complete)]
    known = {each.first: each for each in reversed(increments)}
    damage = []
    for fault in faults:
        path = Path(str(fault.value))
        number = own.number_of(path)
        number = own.number_of(path.parent) if number is None else number
        damage.append((number or 0, str(fault)))
    return run_of(directory), [known[number] for number in sorted(known)], damage


def _followed(
    root: Path, iteration: int, increments: Sequence[Increment], damage: Sequence[tuple[int, str]]
) -> StepChain:
    """Return a checkpoint with the increments of a run that follow it."""
    last = iteration
    paths = []
    note = ""
    for increment in increments:
        if increment.last <= last:
            continue
        if increment.first > last + 1:
            note = f"The steps {last + 1} to {increment.first - 1} are in no increment of {root}."
            break
        paths.append(increment.path.relative_to(root).as_posix())
        last = increment.last
    wrong = [text for number, text in damage if number > last]
    return StepChain(iteration, last, tuple(paths), " ".join([*wrong, note]).strip())


def passed(root: Path, saved: int | None) -> Callable[[int], object] | None:
    """Return what removes the increments that a checkpoint makes superfluous, given its iteration;
    None if the newest complete one makes none so.

    saved: as for `Iterations.remove_older`.
    """
    if not runs_of(root):
        return None
    complete = map(iteration_of, Iterations(root).newest_first())
    newest = next((n for n in complete if saved is None or n <= saved), None)
    if newest is None or not any(map(list, _superfluous(root, newest))):
        return None

    def remove(good: int) -> None:
        for directory, numbers, whole in _superfluous(root, good):
            increments = Increments(directory)
            # the last first: what a kill leaves has no gap
            for number in reversed(numbers):
                names = increments.names(number)
                for path in (names.plain, names.fresh, names.old):
                    increments.drop(path)
            if whole and not any(directory.iterdir()):
                directory.rmdir()

    return remove


def _superfluous(root: Path, good: int) -> list[tuple[Path, list[int], bool]]:
    """Return (directory of a run, first steps of what can go, whether all of it can).

    A run whose steps go beyond the checkpoint, and which has not saved it, is another one's, and
    all of it stays. The run that has saved it may be writing and renaming its own meanwhile (a
    checkpoint is completed behind training), so that none of these is read.
    """
    path = Iterations(root).locate(good)
    if path is None:
        return []
    manifest = read_manifest(path)[1]
    found = []
    for directory in runs_of(root):
        increments = Increments(directory)
        numbers = increments.numbers()
        older = [number for number in numbers if number <= good]
        if run_of(directory) == manifest.meta.get(RUN):
            if older:
                found.append((directory, older, False))
            continue
        newest = next(increments.newest_first(), None)
        last = 0 if newest is None else read_increment(newest).last
        if max([last, *numbers]) <= good:
            found.append((directory, older, True))
    return found

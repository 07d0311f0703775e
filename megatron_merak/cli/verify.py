"""Read every byte of checkpoints and compare it with their manifests.

    merak-verify DIRECTORY ...     a --save directory, an output_dir of MerakTrainer, or a single checkpoint

Prints one line per checkpoint, newest first, and per directory of increments. The exit status is 1 if one is damaged,
if there is none, or if DIRECTORY is not there.
Interrupted saves are ignored; what a running job removes meanwhile is named, and is no damage. Needs no GPU and no
model, and changes nothing.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config.command_line import CommandParser
from ..errors import CheckpointError
from .door import command
from .words import described


def checkpoints(path: Path, faults: list[CheckpointError]) -> Iterator[Path]:
    """``path`` itself if it has the name of a checkpoint or of increments, else those in it;
    ``faults``: of those not complete.
    """
    from ..checkpoint.directory import Iterations
    from ..checkpoint.found import is_checkpoint
    from ..checkpoint.increments import Increments, first_of, run_of, runs_of
    from ..checkpoint.unit_directories import Units

    if is_checkpoint(path) or first_of(path) is not None:
        yield path
        return
    yield from Units(path).newest_first(faults)
    yield from Iterations(path).newest_first(faults)
    for run in runs_of(path) if run_of(path) is None else (path,):
        yield from Increments(run).newest_first(faults)


def verify(path: Path) -> None:
    """Raises CheckpointError."""
    from ..checkpoint import directory as directories
    from ..checkpoint import increments, unit, unit_directories

    if increments.first_of(path) is not None:
        increments.verify_increment(path)
    elif directories.iteration_of(path) >= 0:
        directories.verify(path)
    else:
        unit.verify(path, unit.read(path, unit_directories.step_of(path)))


def verified(path: Path) -> Path | None:
    """Verify a checkpoint, which a run may meanwhile complete, and so rename, or remove.

    Returns its path, None for a removed one. Raises CheckpointError.
    """
    try:
        verify(path)
    except CheckpointError:
        if path.is_dir():
            raise
        published = path.with_name(path.name.removesuffix(".new"))
        return None if published == path or not published.is_dir() else verified(published)
    return path


@command
def main(arguments: Sequence[str] | None = None) -> int:
    text = described(__doc__, "merak-verify")
    parser = CommandParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIRECTORY")
    directories = parser.parse_args(arguments).directories
    from ..checkpoint.foreign import foreign
    from ..checkpoint.found import DIRECTORY, REMEDY, check_directory

    count = 0
    absent: list[CheckpointError] = []
    faults: list[CheckpointError] = []
    for directory in directories:
        try:
            check_directory(directory)
        except CheckpointError as error:
            absent.append(error)
            continue
        before = (count, len(faults))
        try:
            for path in checkpoints(directory, faults):
                try:
                    undamaged = verified(path)
                except CheckpointError as error:
                    faults.append(error)
                    count += 1
                    continue
                if undamaged is None:
                    print(f"{path}: not verified: a run has removed it meanwhile")
                else:
                    print(f"{undamaged}: undamaged")
                    count += 1
        except CheckpointError as error:
            faults.append(error)
        other = foreign(directory, DIRECTORY) if count == before[0] else None
        if other is not None:
            # its directories have our names, and are no damaged ones of ours
            del faults[before[1] :]
            absent.append(other)
    for fault in faults:
        print(f"damaged: {fault}")
    for mistake in absent:
        print(mistake)
    if not count and not faults and not absent:
        for directory in directories:
            reason = "there is no checkpoint in it"
            print(CheckpointError(DIRECTORY, directory, reason, REMEDY))
    return int(bool(faults) or bool(absent) or not count)

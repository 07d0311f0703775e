"""Predicted steps beside measured ones: what directories of runs say of the planner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..cluster import read_profile
from ..counting import counted
from ..durable import replaced
from ..errors import ConfigError
from ..plan import time_text
from ..planner.tables import align
from ..report.predictions import DeviceFactor, HeldPrediction, factors, predictions_of

NAME = "calibrate"
INTO = "--into"


def calibrate(arguments: Sequence[str]) -> None:
    """Print the starts of runs with prediction and median, and a factor for each device.

    arguments: directories that --run-dir wrote; --into and a profile of merak-probe, which gets the
               factor, so that plans allow for it.

    Raises ConfigError and ReportError.
    """
    words = list(arguments)
    profile = _taken(words)
    if flags := [word for word in words if word.startswith("-")]:
        reason = f"it takes directories, and {INTO} with a profile"
        raise ConfigError(NAME, flags[0], reason, "Leave it out")
    if not words:
        raise ConfigError(NAME, "(no directory)", "it reads runs", "Name directories of --run-dir")
    held = [each for word in words for each in predictions_of(Path(word))]
    rows: list[Sequence[str]] = [("layout", "steps", "predicted", "measured", "of predicted")]
    for each in held:
        times = (time_text(each.predicted), time_text(each.measured))
        rows.append((each.layout, str(each.steps), *times, f"{each.ratio:.2f}"))
    print("\n".join(align(rows)))
    print()
    found = factors(held)
    for factor in found:
        spread = f" ({factor.least:.2f} to {factor.most:.2f})" if factor.starts > 1 else ""
        starts = counted(factor.starts, "start")
        print(f"{factor.device}: steps take {factor.factor:.2f} of predicted{spread}, {starts}")
    if profile is not None:
        _store(profile, held, found)


def _taken(words: list[str]) -> str | None:
    """Remove --into and its file from the words, and return the file; None without the flag."""
    if INTO not in words:
        return None
    place = words.index(INTO)
    if place + 1 == len(words):
        raise ConfigError(INTO, "(no file)", "it names a profile", "Name a file of merak-probe")
    path = words[place + 1]
    del words[place : place + 2]
    return path


def _store(path: str, held: Sequence[HeldPrediction], found: Sequence[DeviceFactor]) -> None:
    profile = read_profile(path)
    planned = sorted({each.planned for each in held})
    if len(found) > 1:
        reason = f"the runs are of {counted(len(found), 'device')}, which have a factor each"
        raise ConfigError(INTO, path, reason, "Name runs of one device")
    if planned != [profile.device.name]:
        reason = f"it is of {profile.device.name}, and the runs were planned for {planned[0]}"
        raise ConfigError(INTO, path, reason, "Name a profile of their device")
    (factor,) = found
    with replaced(Path(path)) as file:
        file.write(replace(profile, step_factor=factor.factor).to_json().encode())
    print(f"wrote {path}: plans with --device-profile {path} allow for {factor.factor:.2f}")

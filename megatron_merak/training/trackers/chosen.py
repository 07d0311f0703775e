"""The trackers that --report-to and its companions choose, and what keeps them from ending a run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ...config import LoggingConfig, flag_name
from ...config.run import Run
from ...errors import ConfigError
from ...extras import installed_by, is_installed
from .mlflow import MLflow
from .spans import Spans
from .tensorboard import TensorBoard
from .tracker import Tracker
from .wandb import Wandb, check_wandb

# Of each tracker: the library that must be there.
LIBRARIES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "opentelemetry": "opentelemetry.exporter.otlp.proto.http",
}


def chosen(config: LoggingConfig) -> tuple[str, ...]:
    """Return the names of a run's trackers: those of --report-to, and those whose own settings are
    given.
    """
    implied = []
    if config.tensorboard_dir is not None:
        implied.append("tensorboard")
    if config.wandb_project is not None:
        implied.append("wandb")
    return tuple(dict.fromkeys((*implied, *config.report_to)))


def check_trackers(config: LoggingConfig) -> None:
    """Check that a run's trackers can begin. Raises ConfigError."""
    of_wandb = ("wandb_exp_name", "wandb_entity", "wandb_save_dir")
    for field in of_wandb:
        if getattr(config, field) is not None and "wandb" not in chosen(config):
            remedy = "Add --wandb-project, or leave it out"
            reason = "has no effect without --wandb-project"
            raise ConfigError(flag_name(field), getattr(config, field), reason, remedy)
    for name in chosen(config):
        if not is_installed(LIBRARIES[name]):
            flag, value = _asked_by(config, name)
            library = LIBRARIES[name].partition(".")[0]
            remedy = f"Install it: {installed_by('tracking')}"
            raise ConfigError(flag, value, f"{library} is not installed", remedy)
    if "wandb" in chosen(config):
        check_wandb()


def _asked_by(config: LoggingConfig, name: str) -> tuple[str, str]:
    if name in config.report_to:
        return "--report-to", name
    field = "tensorboard_dir" if name == "tensorboard" else "wandb_project"
    return flag_name(field), getattr(config, field)


def trackers_of(config: LoggingConfig, run: Run, say: Callable[[str], object]) -> list[Tracker]:
    """Begin a run's trackers. Raises ConfigError where one cannot.

    run: the settings of the run, of which trackers keep what was given.
    say: prints a line for the user.
    """
    settings = settings_of(run)
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(str(config.tensorboard_dir)),
        "wandb": lambda: Wandb(config, settings, save=run.checkpoint.save),
        "mlflow": lambda: MLflow(settings),
        "opentelemetry": Spans,
    }
    found: list[Tracker] = []
    for name in chosen(config):
        try:
            found.append(Lasting(makers[name](), say))
        except Exception as error:  # of whatever kind its library has
            for begun in found:
                begun.close()
            flag, value = _asked_by(config, name)
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ConfigError(flag, value, reason, "Set it up, or leave it out") from error
    return found


def settings_of(run: Run) -> dict[str, Any]:
    """Return the settings of a run by name, without those that are unset."""
    found: dict[str, Any] = {}
    for section in vars(run).values():
        if dataclasses.is_dataclass(section):
            fields = {
                field.name: getattr(section, field.name) for field in dataclasses.fields(section)
            }
            found |= {name: value for name, value in fields.items() if value not in (None, ())}
    return found


class Lasting(Tracker):
    """A tracker that is left out from its first error on, which the user is told."""

    def __init__(self, tracker: Tracker, say: Callable[[str], object]):
        self.name = tracker.name
        self.place = tracker.place
        self._tracker: Tracker | None = tracker
        self._say = say
        self._iteration = 0

    def note(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        tracker = self._tracker
        self._iteration = iteration
        if tracker is not None:
            self._try(lambda: tracker.note(kind, iteration, values))

    def span(
        self, what: str, iteration: int, seconds: float, values: Mapping[str, float | str]
    ) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._try(lambda: tracker.span(what, iteration, seconds, values))

    def close(self) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._try(tracker.close)

    def _try(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # training goes on whatever a library raises
            self._tracker = None
            where = f"{self.place} cannot be written" if self.place else f"{self.name} failed"
            self._say(
                f"{where} ({' '.join(str(error).split())}): {self.name} has nothing after iteration "
                f"{self._iteration}"
            )

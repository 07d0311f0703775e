"""Typed errors: every mistake of a user as what, value, reason and remedy."""


class MerakError(Exception):
    """A user-visible failure.

    Attributes: ``what`` (the flag or the thing that is wrong), ``value`` (what it was), ``reason``
    and ``remedy``
    (sentences without a final full stop). ``trace`` is the traceback of an exception of another
    kind, for which all ranks raise this error; else it is empty. ``status``: with which a command
    ends that raises it.
    """

    trace = ""
    status = 1

    def __init__(self, what: str, value: object, reason: str, remedy: str):
        super().__init__(what, value, reason, remedy)
        self.what = what
        self.value = value
        self.reason = reason
        self.remedy = remedy

    @property
    def fault(self) -> str:
        """What is wrong, for another message: without the remedy, and without a full stop."""
        return f"{self.what} {self.value}: {self.reason}"

    def __str__(self) -> str:
        return f"{self.fault}. {self.remedy}."


class ConfigError(MerakError):
    """A flag or a combination of flags that cannot run."""


class AbsentError(ConfigError, AttributeError):
    """A name that this object lacks and its plain counterpart has; ``hasattr`` is False."""


class LaunchError(MerakError):
    """The process was started with an environment, world size or device that does not fit."""


class HangError(MerakError):
    """A rank that others wait for in vain: it hangs, is stopped, or has ended."""


class PlanError(MerakError):
    """No plan, or a hand-written plan that does not describe the model."""


class ScheduleError(MerakError):
    """A pipeline schedule that is incomplete, misordered or deadlocks."""


class DataError(MerakError):
    """A data set, index or tokenizer that cannot be read or does not fit the model."""


class CheckpointError(MerakError):
    """A checkpoint that is missing, incomplete, damaged or does not fit the model."""


class DamagedError(CheckpointError):
    """A checkpoint that is not, byte for byte, what was written, or holds numbers that are not
    finite.
    """


class FullDiskError(CheckpointError):
    """A file system without the space that a save needs, or a quota that is used up."""


class DirectoryLockedError(CheckpointError):
    """A directory that another job writes to."""


class NumericsError(MerakError):
    """Gradients or weights that are not finite, where training cannot go on."""


class UnexpectedResultError(NumericsError):
    """A result that was computed again and is wrong, or is right and not finite. The status is
    Megatron-LM's.
    """

    status = 17


class DoubtfulResultError(NumericsError):
    """An unexpected result that only another device can confirm. The status is Megatron-LM's."""

    status = 16


class ServerError(MerakError):
    """An error that a parameter server reported."""


class ReportError(MerakError):
    """A run's directory from which no report can be made: missing, without facts or damaged."""


class TraceError(MerakError):
    """A model whose forward cannot be captured as one graph, or would be captured wrongly."""

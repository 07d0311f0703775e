"""What a tracker is told."""

from collections.abc import Mapping


class Tracker:
    """Takes what a run reports, on one rank. Its methods may raise whatever their library raises.

    name:  for the user.
    place: where its numbers are, for the user; "" where its library says it.
    """

    name = ""
    place = ""

    def note(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Take values of an iteration; kind is 'train', 'valid' or 'test'."""

    def span(
        self, what: str, iteration: int, seconds: float, values: Mapping[str, float | str]
    ) -> None:
        """Take the time of a part of a run that has just ended.

        what: 'resume', 'step', 'save' or 'evaluate'.
        """

    def close(self) -> None:
        """Write what is left."""

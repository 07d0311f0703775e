"""Report how many batch shapes were captured: at the end, and during training if they are many."""

import warnings

MANY = 16


class Captures:
    """Watches the captures of an engine.

    engine: a CapturedModel.
    aloud:  whether this rank prints.
    """

    def __init__(self, engine, aloud: bool):
        self.engine = engine
        self.aloud = aloud
        self._warned = False

    def look(self) -> None:
        """Warn once when ``MANY`` programs were captured."""
        count, _ = self.engine.captures
        if count >= MANY and self.aloud and not self._warned:
            text = (
                f"{count} programs were captured so far, one for each shape of a batch, and each "
                "took a trace of the "
                "model. Set pad_to_multiple_of or length_buckets, or let the data_collator pad, "
                "so that shapes are few"
            )
            warnings.warn(text, stacklevel=2)
        self._warned |= count >= MANY

    def summary(self) -> str:
        captured, derived = self.engine.captures
        return (
            f"Programs captured, one for each shape of a batch: {captured}; "
            f"derived from those of other lengths: {derived}."
        )

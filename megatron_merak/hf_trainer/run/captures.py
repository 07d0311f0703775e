"""What the shapes of batches cost: how many were captured, told at the end, and while training where they are many."""

import warnings

MANY = 16


class Captures:
    """Watches an engine, a CapturedModel, on a rank that speaks (``aloud``)."""

    def __init__(self, engine, aloud: bool):
        self.engine, self.aloud, self._warned = engine, aloud, False

    def look(self) -> None:
        """Warn, once, when ``MANY`` programs were captured."""
        count, _ = self.engine.captures
        if count >= MANY and self.aloud and not self._warned:
            text = (
                f"{count} programs were captured so far, one for each shape of a batch, and each took a trace of the "
                "model. Set pad_to_multiple_of or length_buckets, or let the data_collator pad, so that shapes are few"
            )
            warnings.warn(text, stacklevel=2)
        self._warned |= count >= MANY

    def summary(self) -> str:
        captured, derived = self.engine.captures
        return (
            f"Programs captured, one for each shape of a batch: {captured}; "
            f"derived from those of other lengths: {derived}."
        )

"""Placements of the stages of searched schedules: one per rank, several in turn, or two down the
ranks and back.
"""

from dataclasses import dataclass

_MOST = 3  # stages of a rank, unless another number is asked for


@dataclass(frozen=True)
class StageHomes:
    """``home[s]`` is the rank of stage s."""

    name: str
    home: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return max(self.home) + 1

    @property
    def chunks(self) -> int:
        """The stages of each rank."""
        return len(self.home) // self.ranks


def placements(
    ranks: int, chunks: int | None = None, most: int | None = None
) -> tuple[StageHomes, ...]:
    """Return the placements that are worth a search, the simplest first.

    ranks:  pipeline ranks.
    chunks: stages of each; None: one to three.
    most:   largest number of stages; None: any.
    """
    usual = []
    for count in range(1, _MOST + 1) if chunks is None else (chunks,):
        if most is not None and count * ranks > most:
            break
        if count == 1:
            usual.append(StageHomes("one stage per rank", tuple(range(ranks))))
        elif ranks > 1 or chunks is not None:
            usual.append(
                StageHomes(f"{count} stages per rank, interleaved", tuple(range(ranks)) * count)
            )
        if count == 2 and ranks > 1:
            usual.append(
                StageHomes("2 stages per rank, V-shaped", (*range(ranks), *reversed(range(ranks))))
            )
    return tuple(usual)

"""Numbers in sentences."""

from collections.abc import Sequence

_NAMED = 8


def counted(number: int, noun: str) -> str:
    """A number and what it counts, as in "1 rank" and "1,024 ranks".

    number: how many there are
    noun:   in the singular
    """
    ending = "es" if noun.endswith("tch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks by their numbers, as in "rank 3" and "ranks 0, 2"; of many the first eight and how many
    more.

    ranks: at least one, in order
    """
    named = ", ".join(str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"

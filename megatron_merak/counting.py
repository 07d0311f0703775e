"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """A number and what it counts, as in "1 rank" and "1,024 ranks".

    number: how many there are
    noun:   in the singular
    """
    ending = "es" if noun.endswith("tch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"

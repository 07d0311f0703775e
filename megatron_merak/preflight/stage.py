"""The look as the first stage of a job: it goes on, or ends with what is wrong."""

from ..errors import LaunchError
from ..parallel.ranks import Ranks
from .judge import judge
from .look import look
from .table import summary


def passed(ranks: Ranks, directory: str) -> str:
    """Return in a line what was found, where nothing is wrong; raise LaunchError on every rank
    alike where something is. Collective over all ranks.

    directory: that the job saves to; empty: none.
    """
    found = look(ranks.world, ranks.control, ranks.nodes, directory)
    problems = judge(found)
    if not problems:
        return f"preflight: {summary(found)}: nothing is wrong"
    first = problems[0]
    more = f". {len(problems) - 1} more: merak-preflight lists them" if len(problems) > 1 else ""
    remedy = f"{first.remedy}{more}, or start without the preflight"
    raise LaunchError(first.what, first.value, first.reason, remedy)

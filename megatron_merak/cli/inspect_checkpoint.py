"""Show what is in a checkpoint, or what differs between two.

    merak-inspect DIRECTORY             a --save directory or an output_dir of MerakTrainer (its newest complete
                                        checkpoint), or a single checkpoint, iter_N or checkpoint-N
    merak-inspect A --diff B            from A to B: tensors, settings of the runs, and what changed most;
                                        the two may be of different layouts

Shows what the manifest says; only --health and --diff read tensors, one at a time, and bytes are not compared with
digests: merak-verify does that. The exit status is 1 if there is no such checkpoint or it cannot be read. Needs no
GPU and no model, and changes nothing.
"""

import argparse
import json
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.command_line import CommandParser
from ..errors import ConfigError
from .door import command
from .inspected_facts import Picked, difference_of, facts_of, health_of, tensors_of
from .inspected_text import difference_text, inspected_text
from .words import described

if TYPE_CHECKING:
    from ..checkpoint.found import FoundCheckpoint

ALL = "*"
HEALTH_ROWS = 3
DIFF_ROWS = 10


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser(
        description=described(__doc__, "merak-inspect"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIRECTORY", help="a checkpoint, or a directory of several"
    )
    parser.add_argument(
        "--ckpt-step",
        type=int,
        metavar="N",
        help="the checkpoint of a directory that has several, B too [the newest]",
    )
    parser.add_argument(
        "--tensors",
        nargs="?",
        const=ALL,
        metavar="PATTERN",
        help="list tensors: name, shape, data type, number of parts; all, or those that match a "
        "pattern such as '*.weight' or 'model/*embed*', which --health and --diff keep to [no]",
    )
    reading = parser.add_mutually_exclusive_group()
    reading.add_argument(
        "--health",
        action="store_true",
        help="read the tensors: numbers that are not finite, range and root mean square of each "
        "kind of state and of its most extreme tensors [no]",
    )
    reading.add_argument(
        "--diff", type=Path, metavar="B", help="compare with this checkpoint [none]"
    )
    parser.add_argument(
        "--most",
        type=int,
        metavar="N",
        help=f"tensors of each kind that --health [{HEALTH_ROWS}] and --diff [{DIFF_ROWS}] show",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object [no]")
    options = parser.parse_args(arguments)
    if options.most is not None and options.most < 0:
        raise ConfigError("--most", options.most, "it is negative", "Give 0 or more")
    if options.diff is None:
        _inspect(options)
    else:
        _compare(options)
    return 0


def _inspect(options: argparse.Namespace) -> None:
    from ..checkpoint.found import find

    found = find(options.directory, options.ckpt_step)
    picked = _picked(options.tensors, [found])
    facts = facts_of(found)
    if options.tensors is not None:
        facts["tensors"] = tensors_of(found, picked)
    if options.health:
        most = HEALTH_ROWS if options.most is None else options.most
        facts["health"] = health_of(found, picked, most)
    if options.json:
        _print_json(facts)
    else:
        print(inspected_text(facts))


def _compare(options: argparse.Namespace) -> None:
    from ..checkpoint.difference import difference
    from ..checkpoint.found import find, is_checkpoint
    from .inspected_run import changed, of_one, settings

    one = find(options.directory, options.ckpt_step)
    step = None if is_checkpoint(options.diff) else options.ckpt_step
    other = find(options.diff, step, "--diff")
    picked = _picked(options.tensors, [one, other])
    most = DIFF_ROWS if options.most is None else options.most
    kinds = difference(one, other, picked)
    ours = settings(one)
    theirs = settings(other)
    facts = {
        "first": facts_of(one),
        "second": facts_of(other),
        "settings": [
            {"name": name, "first": before, "second": after}
            for name, before, after in changed(ours, theirs)
        ],
        "settings_of_one": of_one(ours, theirs),
        "kinds": {kind: difference_of(each, most) for kind, each in kinds.items()},
    }
    if options.json:
        _print_json(facts)
    else:
        print(difference_text(facts))


def _picked(pattern: str | None, founds: Sequence["FoundCheckpoint"]) -> Picked:
    """Return whether a tensor, by kind and name, matches the pattern. Raises ConfigError if none
    does.
    """
    wanted = ALL if pattern is None else pattern

    def picked(kind: str, name: str) -> bool:
        return fnmatchcase(name, wanted) or fnmatchcase(f"{kind}/{name}", wanted)

    tensors = [found.manifest.tensors for found in founds]
    if not any(picked(kind, name) for each in tensors for kind in each for name in each[kind]):
        where = " or ".join(str(found.path) for found in founds)
        remedy = "Give another pattern; --tensors alone lists all names"
        if pattern is not None:
            raise ConfigError("--tensors", pattern, f"no tensor of {where} matches", remedy)
    return picked


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(_finite(facts), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    """Return a value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

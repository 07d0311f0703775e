"""Flags of Megatron-LM as those of merak-pretrain: what is kept, renamed, added, without effect, or
refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..arguments import Flag, build_parser, convert, flags, read, shown, unknown_flags
from ..config import Config
from ..config.settings import checked
from ..errors import ConfigError
from ..megatron_flags import RENAMED, TAKEN, changes_numbers
from ..shell.left import is_left

LAYERS = "--num-layers-per-virtual-pipeline-stage"
STAGES = "--num-virtual-stages-per-pipeline-rank"
INTERLEAVED = ("--pipeline-schedule", "interleaved")
# Flags that are kept and do something else here, and how so.
_OTHERWISE: Mapping[str, str] = MappingProxyType(
    {
        "--load": "convert a checkpoint of Megatron-LM by merak-convert first; without any, the run "
        "starts at iteration 0",
        "--tp-comm-overlap": "the cost model chooses what overlaps tensor-parallel collectives",
        "--recompute-granularity selective": "the input of each MLP's second matrix is "
        "recomputed; attention stores no "
        "scores in any case",
    }
)


@dataclass(frozen=True)
class ScriptFlag:
    """A flag as it stands in a script: its name and values; without a name, a variable that stands
    alone.
    """

    name: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name, *self.values) if self.name else self.values)

    @property
    def unknown(self) -> bool:
        """Whether a value is only known where the script runs."""
        return any(map(is_left, self.values))


@dataclass
class Converted:
    """The flags here, and what became of those of a script: (what was given, what is told of it) in
    each list.

    flags: one after the other, with their values.
    kept: number of flags that are as they were.
    refused: what changes numbers, or what the command does; lost: what does not.
    """

    flags: list[ScriptFlag] = field(default_factory=list)
    kept: int = 0
    renamed: list[tuple[str, str]] = field(default_factory=list)
    added: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)


def converted(tokens: Sequence[str], ranks: int | None = None) -> Converted:
    """Return what becomes of a command line of pretrain_gpt.py.

    tokens: the words behind the program.
    ranks: number of ranks of the job; None if it is not known.
    """
    result = Converted()
    ours = {flag.name: flag for flag in flags(Config)}
    script_flags = list(_script_flags(tokens, ours))
    for each in script_flags:
        if not each.name:
            result.flags.append(each)
            result.notes.append(
                (str(each), "it is not known here, and what it holds is not converted")
            )
        elif each.name in (LAYERS, STAGES):
            _virtual_stages(each, script_flags, result)
        elif each.name in ours:
            _keep(each, ours[each.name], result)
        elif (why := _without_effect(each, script_flags)) is not None:
            result.dropped.append((str(each), why))
        elif each.name in RENAMED:
            _rename(each, script_flags, ours, result)
        else:
            (error,) = unknown_flags([each.name], [*ours], Config)
            told = result.refused if changes_numbers(each.name) else result.lost
            told.append((str(each), consequence(error)))
    _add_defaults(result)
    _understood(result, ours, ranks)
    return result


def consequence(error: ConfigError) -> str:
    """What follows for a command line without the flag of ``error``, and what could be used."""
    if error.reason == "is not known":
        return f"it is no flag of Megatron-LM or of merak-pretrain. {error.remedy}"
    remedy = error.remedy.removeprefix("Leave it out: ")
    remedy = "there is no such setting" if remedy == "Leave it out" else remedy
    return re.sub(r"^Leave it out, or (\w)", lambda match: match.group(1).upper(), remedy)


def _script_flags(tokens: Sequence[str], ours: Mapping[str, Flag]) -> Iterator[ScriptFlag]:
    """Flags with their values; a variable behind a flag that has all its values stands alone."""
    name = ""
    values: list[str] = []
    for token in tokens:
        if re.match(r"--[A-Za-z]", token):
            if name or values:
                yield ScriptFlag(name, tuple(values))
            name, equals, value = token.partition("=")
            values = [_unquoted(value)] if equals else []
        elif is_left(token[:1]) and (not name or _complete(name, values, ours)):
            yield from [ScriptFlag(name, tuple(values))] if name else []
            yield ScriptFlag("", (token,))
            name = ""
            values = []
        else:
            values.append(_unquoted(token))
    if name or values:
        yield ScriptFlag(name, tuple(values))


def _complete(name: str, values: Sequence[str], ours: Mapping[str, Flag]) -> bool:
    """Whether a flag has all the values that it takes."""
    if name in ours and (ours[name].kind is bool or "bare" in ours[name].metadata):
        return True
    if name in TAKEN and not TAKEN[name].values or " " in RENAMED.get(name, ""):
        return True
    return bool(values) and not (name in ours and ours[name].kind is tuple)


def _unquoted(value: str) -> str:
    """A value without quotes that the program gets, as of "--split '99,1,0'"; Megatron-LM reads
    numbers past them.
    """
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _keep(each: ScriptFlag, flag: Flag, result: Converted) -> None:
    try:
        check(flag, each)
    except ConfigError as error:
        result.refused.append((str(each), f"it {error.reason}. {error.remedy}"))
        return
    result.flags.append(each)
    result.kept += 1
    note = _OTHERWISE.get(each.name) or _OTHERWISE.get(str(each))
    result.notes += [(str(each), note)] if note else []


def check(flag: Flag, each: ScriptFlag) -> None:
    """Raise ConfigError unless the values are legal for a flag, or are known only where the script
    runs.
    """
    if each.unknown:
        return
    if flag.kind is bool:
        if each.values:
            raise ConfigError(flag.name, each.values[0], "is a switch", "Give it alone")
        return
    if not each.values and "bare" in flag.metadata:
        return
    if not each.values or (len(each.values) > 1 and flag.kind is not tuple):
        raise ConfigError(
            flag.name, " ".join(each.values), "needs one value", "Give its value after it"
        )
    section = next(section for section in _sections() if flag.field in section.__dataclass_fields__)
    value = convert(flag, each.values if flag.kind is tuple else each.values[0])
    checked(section, section.__dataclass_fields__[flag.field], value)


def _sections() -> Iterator[Any]:
    return (entry.type for entry in Config.__dataclass_fields__.values())


def _without_effect(each: ScriptFlag, script_flags: Sequence[ScriptFlag]) -> str | None:
    """Why a flag changes nothing; None if it does, or is no such flag."""
    taken = TAKEN.get(each.name)
    if taken is None or (
        taken.beside and all(other.name != taken.beside for other in script_flags)
    ):
        return None
    fits = (
        each.values[:1] in [(value,) for value in taken.values] if taken.values else not each.values
    )
    return taken.why if fits and len(each.values) <= 1 else None


def _rename(
    each: ScriptFlag,
    script_flags: Sequence[ScriptFlag],
    ours: Mapping[str, Flag],
    result: Converted,
) -> None:
    name, *value = RENAMED[each.name].split()
    now = ScriptFlag(name, tuple(value) or each.values)
    other = next((other for other in script_flags if other.name == name), None)
    if other == now:
        result.dropped.append((str(each), f"{now} says the same"))
    elif other is not None:
        result.refused.append((str(each), f"{other} says otherwise. Use one of the two"))
    else:
        before = result.kept
        _keep(now, ours[name], result)
        if result.kept > before:
            result.kept = before
            result.renamed.append((str(each), str(now)))


def _virtual_stages(
    each: ScriptFlag, script_flags: Sequence[ScriptFlag], result: Converted
) -> None:
    """Layers of a virtual stage become stages of a rank, and either asks for the interleaved
    schedule.
    """
    if each.name == STAGES:
        result.flags += [each, ScriptFlag(INTERLEAVED[0], INTERLEAVED[1:])]
        result.kept += 1
        result.added.append(
            (" ".join(INTERLEAVED), f"Megatron-LM interleaves wherever there is {STAGES}")
        )
        return
    numbers = {"--pipeline-model-parallel-size": 1} | {
        RENAMED.get(other.name, other.name): int(other.values[0])
        for other in script_flags
        if len(other.values) == 1 and other.values[0].isdecimal()
    }
    names = ("--num-layers", "--pipeline-model-parallel-size", LAYERS)
    layers, ranks, of_stage = (numbers.get(name, 0) for name in names)
    if not (layers and ranks and of_stage) or layers % (ranks * of_stage):
        formula = "--num-layers / --pipeline-model-parallel-size / layers of a virtual stage"
        result.refused.append(
            (str(each), f"Use {' '.join(INTERLEAVED)} {STAGES} V, with V = {formula}")
        )
        return
    stages = layers // (ranks * of_stage)
    how = f"{layers} layers / {ranks} pipeline ranks / {of_stage} layers = {stages}"
    if stages == 1 or ranks == 1:
        result.dropped.append((str(each), f"there is one stage per pipeline rank: {how}"))
        return
    now = [ScriptFlag(INTERLEAVED[0], INTERLEAVED[1:]), ScriptFlag(STAGES, (str(stages),))]
    result.flags += now
    result.renamed.append((str(each), f"{now[0]} {now[1]}: {how}"))


def _add_defaults(result: Converted) -> None:
    """Say what Megatron-LM does where a script says nothing and the default of the optimizer is
    another here.
    """
    names = {each.name for each in result.flags}
    for flag in flags(Config):
        if flag.section == "optimizer" and flag.differs and flag.name not in names:
            result.flags.append(ScriptFlag(flag.name, (shown(flag.metadata["megatron"]),)))
            here = f"the default of Megatron-LM; here it is {shown(flag.default)}"
            result.added.append((str(result.flags[-1]), here))


def _understood(result: Converted, ours: Mapping[str, Flag], ranks: int | None) -> None:
    """Read the flags as merak-pretrain does, and check them for the number of ranks where that and
    all values are known; what it would refuse is told."""
    loose = any(not each.name for each in result.flags)
    unknown = loose or any(each.unknown for each in result.flags)
    words = [
        word
        for each in result.flags
        if each.name
        for word in (each.name, *_stand_in(each, ours[each.name]))
    ]
    try:
        config = read(build_parser(), words, Config)[0]
    except ConfigError as error:
        line = (error.what, f"it {error.reason}. {error.remedy}")
        (result.notes if loose else result.refused).append(line)
        return
    if ranks is None or unknown:
        return
    try:
        config.validate(ranks, training=False)
    except ConfigError as error:
        result.refused.append((f"{error.what} {error.value}", f"it {error.reason}. {error.remedy}"))


def _stand_in(each: ScriptFlag, flag: Flag) -> tuple[str, ...]:
    """The values of a flag, with a legal one for what is known only where the script runs."""
    if each.unknown and "choices" in flag.metadata:
        return flag.metadata["choices"][:1]
    if not each.unknown or flag.kind not in (int, float):
        return each.values
    least = flag.metadata.get("least", 0)
    return (str(max(1, least)),) if flag.kind is int or least >= 1 else ("0.5",)

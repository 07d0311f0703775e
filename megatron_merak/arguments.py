"""The command line, generated from the configuration: a field is a flag, the string below it the
flag's help.

Each entry script has its own configuration class; ``Config`` is pretrain_gpt.py's, and the default.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from .config import Config, HFConfig, RunConfig, flag_name, nearest, value_type
from .config.checks import has_effect
from .config.command_line import CommandParser, mistake
from .config.file import FLAG, FileSetting, contents_of
from .config.settings import checked
from .errors import ConfigError, MerakError
from .megatron_flags import RENAMED, TAKEN, remedy, without_effect
from .other_flags import MEANT

Run = TypeVar("Run", bound=RunConfig)

SCRIPTS: Mapping[type[RunConfig], str] = MappingProxyType(
    {Config: "pretrain_gpt.py", HFConfig: "pretrain_hf.py"}
)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: the section and field it sets, its type, default, constraints and help text."""

    section: str
    field: str
    kind: type
    default: Any
    metadata: Mapping[str, Any]
    text: str

    @property
    def name(self) -> str:
        return flag_name(self.field)

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def differs(self) -> bool:
        """Whether the default is not Megatron-LM's."""
        return "megatron" in self.metadata


def shown(value: Any) -> str:
    """Return a setting's value as the help, the documentation and the start of a run print it."""
    if value is None or value == ():
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(value) if isinstance(value, tuple) else str(value)


def field_texts(cls: type) -> dict[str, str]:
    """Return the string literal below each field of ``cls``, including inherited fields."""
    texts: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts


def sections(config: type[RunConfig] = Config) -> Iterator[tuple[str, Any]]:
    """Return the name and dataclass of each section of the configuration."""
    for field in dataclasses.fields(config):
        yield field.name, field.type


def flags(config: type[RunConfig] = Config) -> tuple[Flag, ...]:
    """Return every flag, section by section."""
    hashable: Any = config  # which mypy denies of the class of a dataclass
    return _flags(hashable)


@functools.cache
def _flags(config: type[RunConfig]) -> tuple[Flag, ...]:
    declared = []
    for section, cls in sections(config):
        texts = field_texts(cls)
        for field in dataclasses.fields(cls):
            kind = value_type(cls, field.name)
            declared.append(
                Flag(
                    section,
                    field.name,
                    kind,
                    field.default,
                    metadata=field.metadata,
                    text=texts[field.name],
                )
            )
    return tuple(declared)


def deviations(config: type[RunConfig] = Config) -> list[tuple[str, Any, Any]]:
    """Yield (flag, our default, Megatron-LM's default) of each default that differs."""
    return [
        (flag.name, flag.default, flag.metadata["megatron"])
        for flag in flags(config)
        if flag.differs
    ]


def deviation_report(config: RunConfig) -> str:
    """Return the defaults in effect in ``config`` that are not Megatron-LM's, one per line; "" if
    there are none.
    """
    lines = []
    for flag in flags(type(config)):
        section = getattr(config, flag.section)
        if (
            flag.differs
            and getattr(section, flag.field) == flag.default
            and has_effect(flag.metadata, section)
        ):
            ours = shown(flag.default)
            theirs = shown(flag.metadata["megatron"])
            lines.append(f"  {flag.name} {ours} (Megatron-LM: {theirs}). {flag.text}")
    return "\n".join(["Defaults that differ from Megatron-LM's:", *lines]) if lines else ""


def changed(config: RunConfig) -> dict[str, tuple[str, str]]:
    """Return the settings in ``config`` that are not the defaults, and the defaults, by flag."""
    settings = {}
    for flag in flags(type(config)):
        value = getattr(getattr(config, flag.section), flag.field)
        if flag.required or value != flag.default:
            settings[flag.name] = (
                shown(value),
                "required" if flag.required else shown(flag.default),
            )
    return settings


def help_text(flag: Flag) -> str:
    """Return the flag's text, its default, and Megatron-LM's if it differs."""
    if flag.required:
        return f"{flag.text} [required]"
    theirs = f"; Megatron-LM: {shown(flag.metadata['megatron'])}" if flag.differs else ""
    return f"{flag.text} [{shown(flag.default)}{theirs}]"


def build_parser(
    description: str | None = None, config: type[RunConfig] = Config
) -> argparse.ArgumentParser:
    """Return a parser of all flags, one group per section; a tool may add its own flags before
    ``read``.
    """
    parser = CommandParser(
        usage="torchrun --nproc-per-node RANKS %(prog)s FLAGS",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The default is shown in brackets, with Megatron-LM's where it differs.",
    )
    metavars = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}
    for section, cls in sections(config):
        group = parser.add_argument_group(section, inspect.getdoc(cls))
        for flag in (flag for flag in flags(config) if flag.section == section):
            options: dict[str, Any] = {
                "help": help_text(flag).replace("%", "%%"),
                "dest": flag.field,
            }
            if flag.kind is bool:
                options["action"] = "store_true"
            else:
                choices = flag.metadata.get("choices")
                options["metavar"] = (
                    "{" + ",".join(choices) + "}" if choices else metavars[flag.kind]
                )
            if flag.kind is tuple:
                options["nargs"] = "+"
            if "bare" in flag.metadata:
                options |= {"nargs": "?", "const": flag.metadata["bare"]}
            group.add_argument(flag.name, **options)
    group = parser.add_argument_group("configuration file")
    text = (
        "YAML file of settings: names of flags without the dashes, alone or under the names "
        "of the sections above. "
    )
    group.add_argument(
        FLAG, metavar="FILE", help=f"{text}The command line takes precedence. [unset]"
    )
    return parser


def convert(flag: Flag, text: Any) -> Any:
    """Convert the text of a value to the flag's type. Raises ConfigError."""
    if flag.kind is int:
        # underscores are those of int(), with which Megatron-LM reads whole numbers
        if not re.fullmatch(r"[+-]?[0-9](_?[0-9]){0,17}", text):
            raise ConfigError(
                flag.name, text, "is not a whole number", "Write it in digits, like 1024"
            )
        return int(text)
    if flag.kind is float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
            raise ConfigError(flag.name, text, "is not a number", "Write it like 0.1 or 1e-4")
        return float(text)
    return tuple(text) if flag.kind is tuple else text


def unknown_flags(
    tokens: Sequence[str], known: Sequence[str], config: type[RunConfig]
) -> list[ConfigError]:
    """Return one error for each token that is no flag.

    Flags of Megatron-LM and other scripts are known by name; for others the nearest of ``known`` is
    proposed.
    """
    errors = []
    elsewhere = {
        flag.name: script
        for other, script in SCRIPTS.items()
        if other is not config
        for flag in flags(other)
    }
    for token in (token.partition("=")[0] for token in tokens if re.match(r"-[^0-9.]", token)):
        if token in elsewhere:
            leave = "Leave it out: --model decides it" if config is HFConfig else "Leave it out"
            errors.append(
                ConfigError("flag", token, f"is a flag of {elsewhere[token]} only", leave)
            )
        elif token in RENAMED:
            errors.append(
                ConfigError("flag", token, "has another name here", f"Use {RENAMED[token]}")
            )
        elif (instead := remedy(token)) is not None:
            reason = "is a Megatron-LM flag that megatron_merak does not have yet"
            errors.append(ConfigError("flag", token, reason, instead))
        elif token in MEANT:
            errors.append(ConfigError("flag", token, "is not known", MEANT[token]))
        else:
            close = nearest("--" + token.lstrip("-").replace("_", "-"), known)
            hint = f"The nearest is {close}" if close else "See --help for all flags"
            errors.append(ConfigError("flag", token, "is not known", hint))
    stray = ConfigError(
        "argument", " ".join(tokens), "belongs to no flag", "Leave it out; switches take no value"
    )
    return errors or [stray]


def expanded(argv: Sequence[str], config: type[RunConfig] | None = None) -> list[str]:
    """Return a command line with the settings of its ``--config`` file before its flags, which
    therefore win.

    argv:   the command line; without ``--config`` it is returned as it is.
    config: the class that it is for; None: the one that the command line or the file requests by
            naming a model.

    Raises ConfigError for a file that cannot be read, and for a setting in it that is unknown or
    has a wrong value.
    """
    left = list(argv)
    rest = []
    paths = []
    while left:
        token = left.pop(0)
        name, equals, path = token.partition("=")
        if name != FLAG:
            rest.append(token)
            continue
        if not equals and (not left or left[0].startswith("--")):
            raise ConfigError(
                FLAG, "(no value)", "expected one argument", "Give its value after it"
            )
        paths.append(path if equals else left.pop(0))
    if len(paths) > 1:
        raise ConfigError(
            FLAG, " ".join(paths), "is given more than once", "Put the settings into one file"
        )
    if not paths:
        return rest
    contents = contents_of(paths[0])
    if config is None:
        named = any(token.partition("=")[0] == "--model" for token in rest)
        named = named or any(each.field == "model" for each in contents.settings)
        config = HFConfig if named else Config
    names = [section for section, _ in sections(config)]
    for section, where in contents.sections.items():
        if section not in names:
            close = nearest(section, names)
            hint = f"The nearest is {close}" if close else f"Use {', '.join(names)}, or no sections"
            setting = FileSetting(section, "", None, False, where=where)
            raise setting.error("is not the name of a section", hint)
    tokens = [token for setting in contents.settings for token in _typed(setting, config)]
    at = next((place for place, token in enumerate(rest) if token.startswith("-")), len(rest))
    return [*rest[:at], *tokens, *rest[at:]]


def _typed(setting: FileSetting, config: type[RunConfig]) -> list[str]:
    """Return a setting of a file as command-line words. Raises ConfigError."""
    flag = next((flag for flag in flags(config) if flag.field == setting.field), None)
    if (
        flag is None
        and setting.value is None
        and not setting.section
        and setting.field in dict(sections(config))
    ):
        return []  # a section without settings
    if flag is None:
        name = flag_name(setting.field)
        if name in TAKEN and (not TAKEN[name].values or setting.value in TAKEN[name].values):
            raise setting.error(f"changes nothing: {TAKEN[name].why}", "Leave it out")
        (error,) = unknown_flags([name], [flag.name for flag in flags(config)], config)
        raise setting.error(error.reason, error.remedy)
    if setting.section not in ("", flag.section):
        raise setting.error(
            f"is in the section {setting.section}",
            f"Put it into {flag.section}, or outside of sections",
        )
    value = setting.value
    if value is None or value == ():
        if flag.default not in (None, ()):
            raise setting.error("has no value", "Give one, or leave it out")
        return []
    kinds: dict[type, str] = {
        bool: "true or false",
        tuple: "a list",
        str: "text",
        int: "a whole number",
        float: "a number",
    }
    expected = kinds[flag.kind]
    if isinstance(value, bool) != (flag.kind is bool) or isinstance(value, tuple) != (
        flag.kind is tuple
    ):
        hints: dict[type, str] = {str: "Put it in quotes", tuple: "Write it like [a, b]"}
        raise setting.error(
            f"is not {expected}", hints.get(flag.kind, f"Give {expected}"), _shown(value)
        )
    if flag.kind in (int, float) and (setting.quoted or re.match(r"[+-]?0[0-9]", str(value))):
        raise setting.error(
            f"is not {expected}", f"Give {expected}, without quotes and leading zeros", value
        )
    if isinstance(value, tuple) and (
        dashed := next((item for item in value if re.match(r"-[^0-9.]", item)), None)
    ):
        raise setting.error(
            "looks like a flag", "Use a value that does not begin with a dash", dashed
        )
    try:
        cls = dict(sections(config))[flag.section]
        checked(cls, cls.__dataclass_fields__[flag.field], convert(flag, value))
    except ConfigError as error:
        raise setting.error(error.reason, error.remedy, error.value) from None
    if flag.kind is bool:
        return [flag.name] if value else []
    return [flag.name, *value] if isinstance(value, tuple) else [f"{flag.name}={value}"]


def _shown(value: bool | str | tuple[str, ...]) -> str:
    """Return a value as a configuration file has it."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else value
        if isinstance(value, str)
        else str(list(value))
    )


def read(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    config: type[Run] = Config,  # type: ignore[assignment]  # there are no defaults of type variables
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Run, argparse.Namespace]:
    """Return the configuration in ``argv``, and the values of flags that a tool added to
    ``parser``.

    config:   the class that ``parser`` was built for.
    defaults: by field, instead of the field's own.

    There may be a ``--config`` file, and flags of Megatron-LM that change nothing (see ``expanded``
    and ``without_effect``, which reports them). Raises ConfigError; its notes are on further
    unknown flags.
    """
    switches = [flag.name for flag in flags(config) if flag.kind is bool]
    try:
        namespace, rest = parser.parse_known_args(without_effect(expanded(argv, config))[0])
    except argparse.ArgumentError as error:
        if error.argument_name in switches:
            raise ConfigError(
                f"{error.argument_name}", "with a value", "is a switch", "Give it alone"
            ) from None
        raise mistake(error.argument_name, error.message) from None
    if rest:
        known = [name for name in parser._option_string_actions if name.startswith("--")]
        first, *others = unknown_flags(rest, known, config)
        for other in others:
            first.add_note(str(other))
        raise first
    values: dict[str, dict[str, Any]] = {section: {} for section, _ in sections(config)}
    for flag in flags(config):
        if hasattr(namespace, flag.field):
            values[flag.section][flag.field] = convert(flag, getattr(namespace, flag.field))
            delattr(namespace, flag.field)
        elif flag.field in defaults:
            values[flag.section][flag.field] = defaults[flag.field]
    missing = [
        flag.name
        for flag in flags(config)
        if flag.required and flag.field not in values[flag.section]
    ]
    if missing:
        raise ConfigError(
            ", ".join(missing), "(missing)", "needs a value", "Give it on the command line"
        )
    return config.from_dict(values), namespace


def parse(
    argv: Sequence[str] | None = None,
    description: str | None = None,
    config: type[Run] = Config,  # type: ignore[assignment]  # there are no defaults of type variables
    defaults: Callable[
        [type[RunConfig], Sequence[str]], Mapping[str, Any]
    ] = lambda config, argv: {},
) -> Run:
    """Return the configuration on the command line; a mistake in it is printed to stderr, and the
    exit status is 2.

    defaults: the values of fields that ``argv`` leaves out, instead of their own; may raise a
              MerakError.
    """
    parser = build_parser(description, config)
    argv = sys.argv[1:] if argv is None else argv
    try:
        argv = expanded(argv, config)
        return read(parser, argv, config, defaults(config, argv))[0]
    except MerakError as error:
        parser.exit(2, "\n".join([str(error), *getattr(error, "__notes__", ())]) + "\n")

"""Configuration files: YAML whose keys are settings, alone or under their sections, as texts with
positions.

Values keep the text that was written, since YAML 1.1 reads 1e-5 as a text, and 010 as 8; the reader
of a setting knows its type.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..errors import ConfigError

FLAG = "--config"
_LONGEST = 1 << 20  # bytes of a file of settings; a device may have no end
_PLAIN = "tag:yaml.org,2002:"
_SCALARS = tuple(f"{_PLAIN}{name}" for name in ("str", "int", "float", "bool", "null", "timestamp"))


@dataclass(frozen=True)
class FileSetting:
    """A setting in a configuration file.

    key:     as written.
    section: the key above it; "" at the top.
    value:   True or False, None for null, else the text, or the texts of a list.
    quoted:  whether the text is in quotes.
    where:   file and line.
    """

    key: str
    section: str
    value: bool | None | str | tuple[str, ...]
    quoted: bool
    where: str

    @property
    def field(self) -> str:
        """The key as the name of a field."""
        return self.key.removeprefix("--").replace("-", "_")

    def error(self, reason: str, remedy: str, value: object = None) -> ConfigError:
        """Return an error that names file, line and key, and the value if it is passed."""
        if value is None:
            return ConfigError(f"{FLAG} {self.where}:", self.key, reason, remedy)
        return ConfigError(f"{FLAG} {self.where}: {self.key}", value, reason, remedy)


@dataclass(frozen=True)
class Contents:
    """The content of a configuration file: settings in order, and the position of every section."""

    settings: tuple[FileSetting, ...]
    sections: Mapping[str, str]


def contents_of(path: str) -> Contents:
    """Return the content of a file. Raises ConfigError if it cannot be read or is no such mapping.

    path: the YAML file.
    """
    import yaml  # here, since most commands name no file

    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ValueError(f"it has more than {_LONGEST:,} bytes")
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(FLAG, path, reason, "Name a YAML file") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        reason = f"it is not YAML ({getattr(error, 'problem', None) or error})"
        raise ConfigError(
            FLAG, f"{path}{line}", reason, "Write a setting per line, such as 'lr: 1e-4'"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            FLAG, path, "it is nested too deeply", "Write a setting per line, such as 'lr: 1e-4'"
        ) from error
    if root is None:
        return Contents((), MappingProxyType({}))
    if not isinstance(root, yaml.MappingNode) or root.tag != f"{_PLAIN}map":
        raise ConfigError(
            FLAG, path, "it is not a mapping", "Write a setting per line, such as 'lr: 1e-4'"
        )
    sections: dict[str, str] = {}
    settings = tuple(_settings(root, path, "", sections))
    before: dict[str, FileSetting] = {}
    for each in settings:
        first = before.setdefault(each.field, each)
        if first is not each:
            raise each.error(f"is also given in {first.where}", "Give it once")
    return Contents(settings, MappingProxyType(sections))


def _settings(
    mapping: Any, path: str, section: str, sections: dict[str, str]
) -> Iterator[FileSetting]:
    """Yield the settings of a mapping, and of its sections, which contain no further ones."""
    for key, value in mapping.value:
        where = f"{path}, line {key.start_mark.line + 1}"
        if key.id != "scalar" or key.tag != f"{_PLAIN}str":
            shown = key.value if key.id == "scalar" else f"({key.id})"
            raise ConfigError(
                f"{FLAG} {where}:",
                shown,
                "is not a name",
                "Use the name of a flag, without the dashes",
            )
        setting = FileSetting(key.value, section, None, False, where=where)
        if value.id == "mapping" and not section and value.tag == f"{_PLAIN}map":
            if key.value in sections:
                raise setting.error(
                    f"is also given in {sections[key.value]}", "Put its settings together"
                )
            sections[key.value] = where
            yield from _settings(value, path, key.value, sections)
        else:
            yield FileSetting(key.value, section, *_value(value, setting), where)


def _value(node: Any, setting: FileSetting) -> tuple[bool | None | str | tuple[str, ...], bool]:
    """Return the value of a node, and whether it is in quotes. Raises ConfigError for unsupported
    nodes.
    """
    if node.id == "sequence" and node.tag == f"{_PLAIN}seq":
        items = [_value(item, setting)[0] if item.id == "scalar" else None for item in node.value]
        texts = tuple(item for item in items if isinstance(item, str))
        if len(texts) != len(items):
            raise setting.error(
                "has an entry that is not text or a number", "Write a list like [0.3, a, 0.7, b]"
            )
        return texts, False
    if node.id == "mapping" and node.tag == f"{_PLAIN}map":
        raise setting.error("is a mapping", "Give a value, a list, true or false")
    if node.id != "scalar" or node.tag not in _SCALARS:
        raise setting.error(f"has the tag {node.tag}", "Give a value without a tag")
    if node.tag == f"{_PLAIN}null":
        return None, False
    if node.tag == f"{_PLAIN}bool" and node.value.lower() in ("true", "false"):
        return node.value.lower() == "true", False
    return node.value, node.style is not None


def text_of(settings: dict[str, dict[str, Any]], head: str) -> str:
    """Return the YAML of settings by section, for ``contents_of``.

    settings: ``RunConfig.to_dict()``.
    head:     lines for the beginning, which become comments.
    """
    import yaml

    body = yaml.safe_dump(settings, sort_keys=False, default_flow_style=False, width=10**6)
    return "".join(f"# {line}\n" for line in head.splitlines()) + body

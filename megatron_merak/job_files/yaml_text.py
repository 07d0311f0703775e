"""Documents of YAML as text: in their own order, scripts as blocks."""

from collections.abc import Mapping
from typing import Any


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """Return documents as one text, separated by lines of three dashes."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as blocks, and indents lists."""

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, indentless=False)

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000)

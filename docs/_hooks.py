"""Hooks of MkDocs: files outside docs/ that pages link to become pages, and public names are found
in the package.

A page links to ``../examples/grpo.py`` as it does in a clone. The site has that file as
``source/examples/grpo.md``: a Markdown file as it is, any other in a code block. ``:::
megatron_merak.Engine`` names what ``megatron_merak`` imports when it is first used; mkdocstrings
reads sources and needs the module that defines it.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*~* *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".slurm": "bash",
    ".json": "json",
    ".yaml": "yaml",
    ".toml": "toml",
}
PUBLIC = re.compile(r"^::: megatron_merak\.(\w+)$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Relative targets of the links of a page, without anchors; links in code blocks do
    not count.
    """
    found = (target for _, target, _ in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def page_of(path: str) -> str:
    """The page of a file of the repository: ``docs/trl.md`` is trl.md, ``examples/grpo.py``
    source/examples/grpo.md.
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def file_of(page: str) -> str:
    """The file of the repository that a page shows."""
    if not page.startswith("source/"):
        return f"docs/{page}"
    path = page.removeprefix("source/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def linked() -> list[str]:
    """Files outside docs/ that pages link to, also by way of each other, and all examples."""
    left = [path.relative_to(ROOT).as_posix() for path in sorted(DOCS.rglob("*.md"))]
    found = {path.relative_to(ROOT).as_posix(): None for path in sorted(ROOT.glob("examples/*.py"))}
    while left:
        path = left.pop(0)
        for target in links((ROOT / path).read_text(encoding="utf-8")):
            other = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if other.startswith(("docs/", "../")) or other in found or not (ROOT / other).is_file():
                continue
            found[other] = None
            left += [other] if other.endswith(".md") else []
    return list(found)


def as_page(path: str) -> str:
    """A file as Markdown."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n`````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n`````\n"


def on_config(config):
    """Pages of files that the nav does not name follow under Examples."""
    named = set(re.findall(r"source/[\w./-]+", str(config.nav)))
    (examples,) = (entry["Examples"] for entry in config.nav if "Examples" in entry)
    examples += [
        {path.removeprefix("examples/"): page_of(path)}
        for path in linked()
        if page_of(path) not in named
    ]
    return config


def on_files(files, config):
    for path in linked():
        files.append(File.generated(config, page_of(path), content=as_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    here = file_of(page.file.src_uri)

    def moved(match: re.Match) -> str:
        before, target, after = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if re.match(r"[a-z]+:", target) or not (ROOT / path).is_file() or not _is_page(path):
            return match.group()
        return (
            before
            + posixpath.relpath(page_of(path), posixpath.dirname(page.file.src_uri) or ".")
            + after
        )

    code = list(FENCE.finditer(markdown))
    parts, end = [], 0
    for fence in code:
        parts += [LINK.sub(moved, markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return PUBLIC.sub(_defined, "".join([*parts, LINK.sub(moved, markdown[end:])]))


def _is_page(path: str) -> bool:
    return path.endswith(".md") or not path.startswith("docs/")


def _defined(match: re.Match) -> str:
    """``::: megatron_merak.Engine`` as ``::: megatron_merak.engine.engine.Engine``, by the table of
    the package.
    """
    tree = ast.parse((ROOT / "megatron_merak" / "__init__.py").read_text(encoding="utf-8"))
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "_PUBLIC"
    )
    name = match.group(1)
    module = ast.literal_eval(table).get(name)
    return f"::: megatron_merak.{module}.{name}" if module else match.group()

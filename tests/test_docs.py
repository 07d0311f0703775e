"""The documentation: links resolve, pages are in the nav, code compiles, commands have flags that
exist and say what the pages show. The long tests run what pages run, and build the site."""

import ast
import doctest
import functools
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

import megatron_merak
from megatron_merak import MerakArguments, MerakTrainer
from megatron_merak.arguments import build_parser, read
from megatron_merak.cli import commands as cli
from megatron_merak.cli.launcher import without_flag
from megatron_merak.config import Config, HFConfig
from megatron_merak.errors import MerakError
from tests.pages import (
    DOCS,
    QUOTING,
    ROOT,
    SMALL,
    SOURCE,
    TRAINING,
    WRITTEN,
    Block,
    answers,
    blocks,
    commands,
    prepare,
    quoted,
    shown,
    words,
)

PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/multi_node/README.md")
]
PAGES += sorted(DOCS.rglob("*.md"))
CONSOLE = [block for page in WRITTEN for block in blocks(page, "console")]
SESSIONS = [block for page in WRITTEN for block in blocks(page, "pycon")]
SCRIPTS = [block for page in WRITTEN for block in blocks(page, "python")]
SHELL = [block for page in WRITTEN for block in blocks(page, "bash")]
SHELL = [
    block
    for block in SHELL
    if block.mark != "other program" and not block.mark.startswith(("file: ", "example: "))
]
QUOTED = [block for block in blocks("troubleshooting", "text")]
QUOTES = [
    block for page in QUOTING for block in blocks(page, "python") if block.mark.startswith(SOURCE)
]
# Files whose first words show commands, most of them as what --help prints.
SHOWING = sorted(
    [*ROOT.glob("*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("megatron_merak/cli/*.py")]
)
NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?([eE][+-]?\d+)?")


def place(block: Block) -> str:
    return f"{block.page}: {block.text.splitlines()[0][:60]}"


def prose(path: Path) -> str:
    """A page without its code."""
    text = re.sub(
        r"^( *)(`{3,}).*?^\1\2$",
        "",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub and the site give to the headings of a page."""
    text = re.sub(
        r"^( *)(`{3,}).*?^\1\2$",
        "",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings
    )
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_anchors_resolve(path):
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        other = (path.parent / target).resolve() if target else path
        assert other.exists(), f"{path.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(other), (
                f"{path.name} links to {target}#{anchor}; there are {sorted(anchors(other))}"
            )


@pytest.mark.parametrize("block", QUOTES, ids=lambda block: block.mark)
def test_quoted_source_is_that_of_the_package(block):
    assert block.text == quoted(block), "python -m tests.pages writes it"


@pytest.mark.parametrize("page", QUOTING)
def test_files_in_tables_are_there(page):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:megatron_merak|csrc|tests|docs|tools)/[\w/.*]*)`", text)
    assert named and not [name for name in named if not list(ROOT.glob(name))]


def test_every_page_is_in_the_nav():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"[:-] ([\w/.-]+\.md)\b", nav)
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    assert sorted(name for name in named if not name.startswith("source/")) == pages
    assert all(
        (ROOT / name.removeprefix("source/")).is_file()
        for name in named
        if name.startswith("source/")
    )


def test_public_names_are_in_the_reference():
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = {f"::: megatron_merak.{name}" for name in megatron_merak.__all__}
    for room in ("engine", "trl"):
        tree = ast.parse(
            (ROOT / "megatron_merak" / room / "__init__.py").read_text(encoding="utf-8")
        )
        (names,) = (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign))
        listed |= {
            f"::: megatron_merak.{room}.{name}"
            for name in names
            if name not in megatron_merak.__all__
        }
    listed |= {"::: megatron_merak.tensor_parallel", "::: megatron_merak.errors"}
    names = ("ModelParallelConfig", "parallel_state", "tensor_parallel")
    listed |= {f"::: megatron_merak.megatron.{name}" for name in names}
    assert set(re.findall(r"^::: .*$", page, re.MULTILINE)) == listed


def test_arguments_are_in_the_configuration():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    own = set(MerakArguments.__annotations__)
    assert own <= set(re.findall(r"`(\w+)`", page)), own - set(re.findall(r"`(\w+)`", page))


def test_versions_are_those_of_the_package():
    page = (DOCS / "supported.md").read_text(encoding="utf-8")
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("torch", "transformers", "trl"):
        (requirement,) = re.findall(rf"`({name}[<>=][^`]*)`", page)
        assert f'"{requirement}"' in declared


@pytest.mark.parametrize("block", SCRIPTS, ids=place)
def test_python_compiles(block):
    compile(block.text, block.page, "exec")


def flags_of(line: str) -> None:
    """Raises where a command line of ours has a flag that its program does not know."""
    given = [word for word in words(line) if word != "..."]
    program = given.pop(0)
    if program == "torchrun":
        given = (
            given[given.index("megatron_merak") + 1 :]
            if "megatron_merak" in given
            else ["pretrain"]
        )
        program = f"merak-{given.pop(0)}"
    if program in TRAINING:
        kind = Config if program == "merak-pretrain" else HFConfig
        required = (
            SMALL.split()[: 2 * 5]
            if kind is Config
            else "--model . --seq-length 8 --micro-batch-size 1".split()
        )
        try:
            read(build_parser("", kind), [*required, *without_flag(given)], kind)
        except MerakError as error:
            assert error.what not in ("flag", "argument"), f"{line}: {error}"
        return
    name = program.removeprefix("merak-")
    if "--emit" in given and "--" in given:  # of the command, and what ranks run
        at = given.index("--")
        flags_of(" ".join([f"merak-{given[at + 1]}", *given[at + 2 :]]))
        given = given[:at]
        name = "launch --emit x"
    elif name == "launch" and TRAINING.keys() & {f"merak-{word}" for word in given}:
        at = next(n for n, word in enumerate(given) if f"merak-{word}" in TRAINING)
        flags_of(" ".join([f"merak-{given[at]}", *given[at + 1 :]]))
        given = given[:at]
    options = set(re.findall(r"--[\w-]+", " ".join(given)))
    command = [
        sys.executable,
        "-m",
        "megatron_merak",
        *name.split(),
        *(["show"] if name == "plan" else []),
        "--help",
    ]
    help_of = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert options <= set(re.findall(r"--[\w-]+", help_of)), line


@pytest.mark.parametrize("block", SHELL, ids=place)
def test_shell_commands_have_flags_that_exist(block):
    lines = commands(block.text)
    lines = [re.sub(r"^(\w+=\S+ )+", "", line) for line in lines]
    programs = {line.split()[0] for line in lines}
    assert programs <= {"pip", "export", "make", "torchrun"} | {
        f"merak-{name}" for name in cli.COMMANDS
    }
    targets = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for line in lines:
        if line.startswith(("merak-", "torchrun ")):
            flags_of(line)
        elif line.startswith("make "):
            assert line.split()[1] in targets


@pytest.mark.parametrize("path", SHOWING, ids=lambda path: path.name)
def test_commands_of_several_lines_can_be_copied(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""
    for before, line in pairwise(text.splitlines()):
        of_command = re.match(r"( +|\w[\w .]*:  +)\S", before)
        if of_command and line.strip().startswith("--"):
            assert before.endswith("\\"), f"{before}\n{line}"


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the files that pages show and name."""
    monkeypatch.chdir(tmp_path)
    prepare()
    return tmp_path


@pytest.mark.parametrize(
    "block", [each for each in CONSOLE if not each.mark.startswith("run")], ids=place
)
def test_commands_say_what_is_shown(block, workplace):
    assert shown(block) == block.text, "python -m tests.pages writes what commands say now"


@pytest.mark.parametrize("block", QUOTED, ids=place)
def test_quoted_messages_are_those_of_the_code(block):
    """What a message says between its names, in <>, is text of the package, in few pieces."""
    assert not said_in_pieces("it has no such sentence anywhere", 3)
    for message in block.text.splitlines():
        for part in (
            part.strip(" .;,") for part in re.split(r"<[^>]*>|\. (?=[A-Z])|: |[()]", message)
        ):
            assert said_in_pieces(part, 3), f"no error of the package says {part!r}"


@functools.cache
def source() -> str:
    """The source of the package, strings that follow each other joined."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "megatron_merak").rglob("*.py"))
    return "\n".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in texts)


def said_in_pieces(text: str, most: int) -> bool:
    """Whether the package has ``text``, or pieces of two words and more that make it up."""
    if len(text) < 6 or text in source():
        return True
    spaces = [match.start() for match in re.finditer(" ", text)][1:]
    return most > 1 and any(
        text[:at] in source() and said_in_pieces(text[at + 1 :], most - 1) for at in spaces[::-1]
    )


def train(model, sample, trainer=MerakTrainer, **arguments):
    args = MerakArguments(
        "runs/x", use_cpu=True, max_steps=1, report_to="none", disable_tqdm=True, **arguments
    )
    trainer(model, args, train_dataset=[sample] * 8).train()


def session(block: Block, long: bool) -> None:
    """Run a Python session as a doctest, with the lines that are marked long or without."""
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    names = {
        "MerakArguments": MerakArguments,
        "MerakTrainer": MerakTrainer,
        "megatron_merak": megatron_merak,
    }
    names |= {"train": train, "config": config, "tokens": torch.arange(16)}
    names["LlamaForCausalLM"] = transformers.LlamaForCausalLM
    test = doctest.DocTestParser().get_doctest(block.text, names, block.page, None, None)
    if not long:
        test.examples = [each for each in test.examples if "# long" not in each.source]
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@pytest.mark.parametrize("block", SESSIONS, ids=place)
def test_python_says_what_is_shown(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session(block, long=False)


@pytest.mark.long
@pytest.mark.parametrize("block", [each for each in SESSIONS if "# long" in each.text], ids=place)
def test_models_and_losses_are_refused_as_shown(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session(block, long=True)


@pytest.mark.long
def test_the_quickstart_runs(tmp_path):
    """Its commands in their order, in one folder. Numbers may differ, but for those of the plan."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for block in blocks("quickstart"):
        if block.mark.startswith("run: "):
            (tmp_path / block.mark.removeprefix("run: ")).write_text(block.text, encoding="utf-8")
        if block.mark != "run":
            continue
        ((command, output),) = answers(block.text)
        program, *given = words(command)
        start = (
            ["-m", "torch.distributed.run"]
            if program == "torchrun"
            else ["-m", "megatron_merak", "pretrain"]
        )
        done = subprocess.run(
            [sys.executable, *start, *given],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        said = iter([NUMBER.sub("#", line) for line in done.stdout.splitlines()])
        for line in output.splitlines():
            assert line == "..." or NUMBER.sub("#", line) in said, (
                f"{line!r} is not in\n{done.stdout}"
            )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "runs/two_lines/trained")
    assert model.num_parameters() == 205376


@pytest.mark.long
def test_the_site_is_built_strictly_and_needs_no_network(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    pages = {
        path.relative_to(tmp_path / "site").as_posix()
        for path in (tmp_path / "site").rglob("*.html")
    }
    written = {
        path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")
    }
    assert written | {"source/examples/grpo.py.html"} <= pages
    index = (tmp_path / "site" / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {"), "pages opened from disk cannot search"
    loads = re.compile(
        r"<(?:script|link|img|iframe|source|video|audio|embed|object)\b[^>]*\b(?:src|href|data)=\"?([^\" >]+)"
    )
    for page in pages:
        text = (tmp_path / "site" / page).read_text(encoding="utf-8")
        assert [url for url in loads.findall(text) if re.match(r"(https?:)?//", url)] == [], page
        assert "::: megatron_merak" not in text and "assets/iframe-worker.js" in text
    for sheet in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), (
            sheet
        )
    reference = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert all(
        f"<code>{name}</code>" in reference or name in reference for name in megatron_merak.__all__
    )


def test_the_source_distribution_has_the_documentation():
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8")
    for folder in ("docs", "tools", "examples", "tests"):
        assert f"graft {folder}\n" in manifest
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "mkdocs.yml"):
        assert (ROOT / name).is_file() and name in manifest

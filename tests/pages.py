"""The pages of docs/ and the README: their blocks, their commands, and the site as `make docs` builds it."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import pytest

from icebear.app.cli import options as cli_options
from icebear.app.cli.main import main

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
GENERATED = {ROOT / "docs" / "api.md", ROOT / "docs" / "tables.md"}
README = ROOT / "README.md"
PAGES = [README, *sorted({*(ROOT / "docs").glob("*.md")} - GENERATED)]
TESTED = [README, ROOT / "docs" / "tutorial.md"]
"""Pages whose blocks `make test` runs, the README first; what the others show has tests of its own, and `make dist`
runs their blocks."""
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[\w ]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    language: str
    mark: str
    code: str

    @property
    def runs(self):
        """One marked `hours` is of a table that took hours, `elsewhere` of what is run by another page or test."""
        return self.mark not in ("hours", "elsewhere")


@cache
def anchors(page):
    """As GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@cache
def blocks(page):
    return [Block(match["language"], match["mark"] or "", match["code"]) for match in BLOCK.finditer(page.read_text())]


def commands(console):
    """Each command of a console block as words, with the block's variables in place."""
    lines = [line[2:] for line in console.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    values = dict(match.groups() for line in lines if (match := re.fullmatch(r'(\w+)="(.*?)"(?: +#.*)?', line)))
    words = [shlex.split(line, comments=True) for line in lines if not re.match(r"\w+=", line)]
    return [[re.sub(r"^\$(\w+)$", lambda name: values[name[1]], word) for word in line] for line in words]


def read(words, verb=main, above=None):
    """The verb and the names of the options of `icebear WORDS`. Raises where the command line does not take them."""
    name, *rest = words
    command = verb.get_command(None, name)
    context = click.Context(verb, above, **verb.context_settings)  # commands remember its names of the help option
    if isinstance(command, click.Group):
        below, names = read(rest, command, context)
        return f"{name} {below}", names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cli_options, "is_given", lambda option: False
        )  # a store may be made by an earlier command of the page
        command.make_context(name, list(rest), context)
    return name, {word for word in rest if word.startswith("--")}


@cache
def run_by(page):
    """What a page runs, as `read` has it."""
    consoles = [block.code for block in blocks(page) if block.language == "console" and block.runs]
    words = [words for code in consoles for words in commands(code)]
    return [read(rest) for name, *rest in words if name == "icebear"]


def runs_on_a_page(words, pages=PAGES):
    """Whether one of the pages runs this command, with these options at least."""
    verb, options = read(words)
    return any(verb == other and options <= others for page in pages for other, others in run_by(page))


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_site(folder, notebook_page):
    """Builds the site in `folder` from a copy of docs/; `notebook_page(path)` is the Markdown of a notebook."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("README.md", "zensical.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("api", "tables"):
        (folder / "docs" / f"{name}.md").write_text(script(name).page())
    for path in NOTEBOOKS:
        (folder / "docs" / "notebooks" / f"{path.stem}.md").write_text(notebook_page(path))
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"

"""Every command and every Python block of the README and of docs/ runs, and says what the page says it says."""

import importlib.util
import inspect
import io
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner

import icebear
from icebear.app.cli.main import main
from icebear.concepts.models import loading
from icebear.steering import side_effects as pricing
from icebear.steering.flipping import search as flipping

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[\w ]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
FEW = {"--samples": 1, "--limit": 20, "limit=": 20}
"""What a block marked `long` does less of. One marked `hours` is of a table that took hours, `elsewhere` of what is run
by another page or test."""


@dataclass(frozen=True)
class Block:
    language: str
    mark: str
    code: str


def blocks(page):
    return [Block(found["language"], found["mark"] or "", found["code"]) for found in BLOCK.finditer(page.read_text())]


def commands(console):
    """Each command of a console block as words, with the block's variables in place."""
    lines = [line[2:] for line in console.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    given = dict(found.groups() for line in lines if (found := re.fullmatch(r'(\w+)="(.*?)"(?: +#.*)?', line)))
    words = [shlex.split(line, comments=True) for line in lines if not re.match(r"\w+=", line)]
    return [[re.sub(r"^\$(\w+)$", lambda name: given[name[1]], word) for word in line] for line in words]


def lowered(code):
    for option, count in FEW.items():
        code = re.sub(rf"({option} ?)\d+", rf"\g<1>{count}", code)
    return code


@pytest.fixture(scope="module")
def once(smol):
    """The model is there, and the same flip is found and priced once for all pages."""
    load = cache(loading.load_model)

    def kept(run):
        known = {}

        def keep(*args, **options):
            told = inspect.signature(run).bind(*args, **options)
            told.apply_defaults()
            asked = str([value for value in told.arguments.values() if value is not None and not callable(value)])
            if asked not in known:
                known[asked] = run(*args, **options)
            return known[asked]

        return keep

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loading, "load_model", lambda name=smol.name, **options: smol if name == smol.name else load(name)
        )
        patch.setattr(flipping, "flip", kept(flipping.flip))
        patch.setattr(pricing, "price", kept(pricing.price))
        yield


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page, once, folder, tmp_path, monkeypatch):
    """In a folder of its own, with the examples."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(folder / "examples")
    names, said = {}, ""
    for block in blocks(page):
        long = block.mark == "long"
        code = lowered(block.code) if long else block.code
        if block.language == "python":
            said = python(code, names)
        elif block.language == "console":
            unrun = block.mark in ("hours", "elsewhere")
            said = "".join(command(words, folder, unrun) for words in commands(code))
        elif block.language == "text" and said and not block.mark:
            assert_said(code, said)
        if long or block.language == "text":
            said = ""


def python(code, names):
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(code, "a page", "exec"), names)
    return output.getvalue()


def command(words, folder, unrun):
    """What `icebear` prints; `icebear index` goes on where the folder's index is. Of what is `unrun` the command
    line is only read; of what sets up or builds, which other tests and CI run, it is only seen that it is there."""
    name, *rest = words
    if name == "make":
        subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, check=True, capture_output=True)
    elif name != "icebear":
        assert name == "python3" or name.endswith("/pip"), f"{name} is nothing that pages should run"
    elif unrun:
        read(main, rest)
    elif rest[0] not in ("app", "mcp"):  # they do not end; test_browser.py and test_agents.py start them
        if rest[0] == "index":
            for path in (folder / "wiki.db", *folder.glob("wiki.db.*.faiss")):
                Path(path.name.replace("wiki", "icebear", 1)).symlink_to(path)
        result = CliRunner().invoke(main, rest)
        assert result.exit_code == 0, (words, result.output, result.exception)
        return result.stdout
    return ""


def read(verb, words):
    """Raises where the command line does not take the words."""
    name, *rest = words
    found = verb.commands[name]
    return read(found, rest) if hasattr(found, "commands") else found.make_context(name, rest)


def assert_said(shown, said):
    """The words of each line of `shown` are in the output, together and in this order, wherever it breaks lines."""
    words, at = said.split(), 0
    for line in shown.splitlines():
        wanted = line.replace("─", "").split()
        places = (at for at in range(at, len(words) - len(wanted) + 1) if alike(wanted, words[at : at + len(wanted)]))
        found = next(places, None)
        assert found is not None, f"Not printed:\n{line}\n\nbut:\n{said}"
        at = found + len(wanted)


def alike(wanted, words):
    """The same but for numbers, which are as near as other processors give them."""
    if NUMBER.sub("#", " ".join(wanted)) != NUMBER.sub("#", " ".join(words)):
        return False
    numbers = zip(*(NUMBER.findall(" ".join(part)) for part in (wanted, words)), strict=True)
    return all(as_number(other) == pytest.approx(as_number(one), rel=0.03, abs=0.011) for one, other in numbers)


def as_number(text):
    return float(text.replace(",", ""))


def test_other_words_and_other_numbers_are_seen():
    assert_said("L29.ffn.860 +3.76\n ' ice'\n", "L29.ffn.860 +3.75\n\n ' ice'  1")
    for shown in ("L29.ffn.860 -3.76", "L29.ffn.86 +3.76", "' snow'", "' ice'\nL29.ffn.860", "+3.76 ' ice'  ' ice'"):
        with pytest.raises(AssertionError):
            assert_said(shown, "L29.ffn.860 +3.76 ' ice'")


# --- what pages name ------------------------------------------------------------------------------------


def verbs():
    """That some page runs."""
    consoles = [block.code for page in PAGES for block in blocks(page) if block.language == "console"]
    return {words[1] for code in consoles for words in commands(code) if words[0] == "icebear"}


def test_every_verb_is_on_a_page():
    assert set(main.commands) - {"demo"} <= verbs()
    assert "make demo" in (ROOT / "README.md").read_text()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_that_a_page_names_are_there(page):
    text = BLOCK.sub("", page.read_text())
    for path in re.findall(
        r"`((?:app|actmax|steering|concepts|db|icebear|tests|docs|benchmarks|examples)/[\w./-]*)`", text
    ):
        assert (ROOT / path).exists(), path
    for name, path in re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", text):
        assert re.search(rf"^(?:def |class )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), (name, path)


@cache
def anchors(page):
    """As GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            there = (page.parent / path) if path else page
            assert there.exists(), link
            assert not anchor or anchor in anchors(there), link


# --- what is written by commands ------------------------------------------------------------------------


def script(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_is_current_and_whole():
    page = script("api").page()
    assert page == (ROOT / "docs" / "api.md").read_text(), "out of date: python docs/api.py"
    assert {f"### {name}" for name in icebear.__all__} <= set(page.splitlines())


def test_the_drawing_of_the_imports_is_current_and_every_arrow_goes_down():
    imports = script("imports")
    found = imports.graph()
    assert imports.picture(found) == (ROOT / "docs" / "imports.svg").read_text(), "out of date: python docs/imports.py"
    height, order = imports.heights(found), list(imports.ROOMS)
    for box, direct in found.items():
        for other in direct:
            assert height[box] > height[other]
            assert order.index(box.split("/")[0]) <= order.index(other.split("/")[0])


def test_a_circle_is_not_drawn(tmp_path, monkeypatch):
    imports = script("imports")
    (tmp_path / "concepts").mkdir()
    (tmp_path / "concepts" / "a.py").write_text("from icebear.concepts.b import x")
    (tmp_path / "concepts" / "b.py").write_text("def f():\n    from icebear.concepts import a")
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="import one another: concepts/a, concepts/b"):
        imports.graph()


def test_the_site_is_built(tmp_path):
    """With every link in place; nothing of it comes from the web."""
    config = (ROOT / "zensical.toml").read_text()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("README.md", "zensical.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for notebook in (tmp_path / "docs" / "notebooks").glob("*.ipynb"):  # not run here; test_notebooks.py does
        if not notebook.with_suffix(".md").exists():
            notebook.with_suffix(".md").write_text(script("notebooks").page(nbformat.read(notebook, as_version=4)))
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sources = [page.name for page in PAGES[1:]]
    sources += [f"notebooks/{notebook.name}" for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb")]
    for name in (source.replace(".ipynb", ".md") for source in sources):
        assert f'"{name}"' in config, f"{name} is in no nav"
        built = (tmp_path / "site" / name.removesuffix(".md").removesuffix("index") / "index.html").read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://(?!zensical)', built)
        assert "--8<--" not in built

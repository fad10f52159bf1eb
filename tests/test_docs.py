"""Every command and every Python block of the README and of docs/ runs, and says what the page says it says."""

import inspect
import io
import json
import re
import subprocess
import tomllib
from contextlib import redirect_stdout
from functools import cache, wraps
from itertools import pairwise
from pathlib import Path
from weakref import WeakKeyDictionary

import nbformat
import pytest
from click.testing import CliRunner
from conftest import CAMEL, ICE_BEAR, index_small
from few import UNCOUNTED, few, few_of
from pages import (
    BLOCK,
    GENERATED,
    NOTEBOOKS,
    PAGES,
    README,
    ROOT,
    TESTED,
    Block,
    anchors,
    blocks,
    build_site,
    commands,
    read,
    runs_on_a_page,
    script,
)

import icebear
from icebear.actmax import writes
from icebear.app.cli.main import main
from icebear.claims import under_conditions
from icebear.concepts.answers import counterfactuals
from icebear.concepts.vocabulary import lens
from icebear.db.store import Store
from icebear.models.loading import loading
from icebear.models.model import Model
from icebear.steering.concept import finding
from icebear.steering.flipping import flip as flipping
from icebear.steering.monitor import fitting

NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
RESULTS = ("results.md", "replicate.md")
"""Pages that are looked up, not read."""
FEW = {"--samples": 1, "--limit": 20, "--more": 20, "--nodes": 10, "limit=": 20, "nodes=": 6, "steps=": 3}
"""What a block marked `long` does less of; of several methods or tasks it takes the first one."""


def lowered(code):
    for option, count in FEW.items():
        code = re.sub(rf"({option} ?)\d+", rf"\g<1>{count}", code)
    return re.sub(r"(--(?:methods|tasks) [^ ,]+),[^ ]+", r"\1", code)


REMEMBERED = (
    (flipping, "flip"),
    (finding, "read"),
    (counterfactuals, "suggest_counterfactuals"),
    (writes, "writes"),
    (under_conditions, "check_claim"),
    (fitting, "monitor"),
)
"""What several commands and blocks of pages compute of the same arguments."""


def remembered(compute, results):
    @wraps(compute)
    def call(*args, **options):
        key = key_of(compute, *args, **options)
        if key not in results:
            results[key] = compute(*args, **options)
        return results[key]

    return call


def key_of(compute, *args, **options):
    bound = inspect.signature(compute).bind(*args, **options)
    bound.apply_defaults()
    return tuple(map(identity, bound.arguments.values()))


def identity(value):
    """What is the same for arguments that give the same."""
    if callable(value) or value == {}:  # as if it were not given
        return None
    if isinstance(value, list | tuple):
        return tuple(map(identity, value))
    if isinstance(value, Store):
        return value.path.resolve()
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


@pytest.fixture(scope="module")
def once(smol, desert, desert_by_heads):
    """The model is there, and what is the same on several pages is computed once for all. Counterfactuals are tried
    with fewer words, cards read fewer texts, circuits are run by fewer edges."""
    ways = {False: desert, True: desert_by_heads}
    found = {
        key_of(flipping.flip, smol, ICE_BEAR, " desert", source=CAMEL, heads=heads): recipe
        for heads, recipe in ways.items()
    }
    measured = writes.writes
    load = cache(loading.load_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counterfactuals, "RUNS", 24)
        patch.setattr(lens, "LENS_TEXTS", 6)
        patch.setattr(lens, "_CONTEXTS", WeakKeyDictionary())
        patch.setattr(writes, "writes", wraps(measured)(lambda *args: measured(*args[:4], 2)))
        patch.setattr(
            loading,
            "load_model",
            wraps(load)(lambda name=smol.name, **options: smol if name == smol.name else load(name)),
        )
        for place, name in REMEMBERED:
            memory = remembered(getattr(place, name), found if name == "flip" else {})
            if name in icebear.__all__:
                patch.setattr(icebear, name, memory)  # before its module, from which the package takes it
            patch.setattr(place, name, memory)
        index_small(patch)
        yield


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    few_of(PAGES, *TESTED),
    ids=lambda page: page.stem,
)
def test_every_block_of_a_page_runs(page, once, folder, tmp_path, monkeypatch):
    """In a folder of its own, with the examples. Where no output is shown, with few contexts, draws and new tokens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(folder / "examples")
    names, text = {}, ""
    for block, after in pairwise([*blocks(page), Block("", "", "")]):
        long = block.mark == "long"
        code = lowered(block.code) if long else block.code
        with monkeypatch.context() as patch:
            if long or after.language != "text" or after.mark:
                few(patch, UNCOUNTED)
                patch.setattr(Model, "_generated", short(Model._generated))
            if block.language == "python":
                text = python(code, names) if block.runs else ""
            elif block.language == "console":
                runs = lambda words: block.runs and not (long and page == README and runs_elsewhere(words))  # noqa: E731
                text = "".join(command(words, folder, runs(words)) for words in commands(code))
        if block.language == "text" and text and not block.mark:
            assert_said(code, text)
        if long or block.language == "text":
            text = ""


def short(generated):
    return lambda model, batch, tokens, *rest: generated(model, batch, min(tokens, 10), *rest)


def python(code, names):
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(code, "a page", "exec"), names)
    return output.getvalue()


def runs_elsewhere(words):
    """Whether another page than the README runs it."""
    return words[0] == "icebear" and runs_on_a_page(words[1:], PAGES[1:])


def command(words, folder, runs):
    """What `icebear` prints; `icebear index` goes on where the folder's index is. A command that does not run is only
    read; of what sets up or builds, which other tests and CI run, it is only seen that it is there."""
    name, *rest = words
    if name == "make":
        subprocess.run(["make", "--dry-run", *rest], cwd=ROOT, check=True, capture_output=True)
    elif name != "icebear":
        assert Path(name).name in ("python", "python3", "pip"), f"{name} is nothing that pages should run"
    elif not runs:
        read(rest)
    elif rest[0] not in ("app", "mcp", "serve"):  # they do not end; other tests start them
        if rest[0] == "index":
            for path in (folder / "wiki.db", *folder.glob("wiki.db.*.faiss")):
                link = Path(path.name.replace("wiki", "icebear", 1))
                if not link.is_symlink():
                    link.symlink_to(path)
        result = CliRunner().invoke(main, rest)
        assert result.exit_code == 0, (words, result.output, result.exception)
        return result.stdout
    return ""


def assert_said(shown, text):
    """The words of each line of `shown` are in the output, together and in this order, wherever it breaks lines."""
    words, at = text.split(), 0
    for line in shown.splitlines():
        wanted = line.replace("─", "").split()
        places = (at for at in range(at, len(words) - len(wanted) + 1) if alike(wanted, words[at : at + len(wanted)]))
        result = next(places, None)
        assert result is not None, f"Not printed:\n{line}\n\nbut:\n{text}"
        at = result + len(wanted)


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


def test_the_page_for_agents_has_what_is_shipped():
    shipped = (ROOT / "icebear" / "AGENTS.md").read_text().split("\n", 2)[2]
    assert shipped in (ROOT / "docs" / "agents.md").read_text()
    assert len(list(filter(None, BLOCK.search(shipped)["code"].splitlines()))) == 12


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_pages_can_be_read():
    """In a quarter of an hour each: words outside of blocks. Results are looked up."""
    lengths = {page.name: len(BLOCK.sub("", page.read_text()).split()) for page in PAGES}
    assert {name: length for name, length in lengths.items() if length > 2500 and name not in RESULTS} == {}


def test_the_readme_shows_the_screen_of_its_page():
    """Which runs the command that the README then only parses."""
    shown = [block.code for block in blocks(ROOT / "docs" / "explain.md") if block.language == "text"]
    assert next(block.code for block in blocks(README) if block.language == "text") == shown[0]


def test_what_pages_and_notebooks_import_is_there():
    """Without running them."""
    code = [block.code for page in PAGES for block in blocks(page) if block.language == "python"]
    cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    lines = "\n".join(code + [cell.source for cell in cells]).splitlines()
    for line in {line.strip() for line in lines if re.match(r"\s*from icebear[\w.]* import [\w, ]+$", line)}:
        exec(line, {})


def test_every_command_of_a_page_is_taken(monkeypatch):
    """Without running it; those of the results' tables too."""
    monkeypatch.chdir(ROOT)
    consoles = [block.code for page in PAGES for block in blocks(page) if block.language == "console"]
    sections = tomllib.loads((ROOT / "docs" / "results" / "tables.toml").read_text())["section"]
    consoles += [f"$ {table['command']}" for part in sections for table in part["table"] if "command" in table]
    for name, *words in (words for code in consoles for words in commands(code)):
        if name == "icebear":
            read(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_that_a_page_names_are_there(page):
    text = BLOCK.sub("", page.read_text())
    for path in re.findall(
        r"`((?:app|actmax|steering|concepts|db|icebear|tests|docs|benchmarks|examples)/[\w./-]*)`", text
    ):
        assert (ROOT / path).exists(), path
    for name, path in re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", text):
        assert re.search(rf"^(?:def |class )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), (name, path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            there = (page.parent / path) if path else page
            assert there.exists() or there in GENERATED, link
            assert not anchor or anchor in anchors(there), link


# --- the site -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Notebooks are not run for it."""
    page = script("notebooks").page
    return build_site(tmp_path_factory.mktemp("site"), lambda path: page(nbformat.read(path, as_version=4)))


ON_SITE = ["api", *(page.stem for page in PAGES[1:]), *(f"notebooks/{path.stem}" for path in NOTEBOOKS)]


@pytest.mark.parametrize("page", ON_SITE)
def test_every_page_is_in_the_navigation(page):
    assert f'"{page}.md"' in (ROOT / "zensical.toml").read_text()


@pytest.mark.release
def test_every_page_is_on_the_site_and_takes_nothing_from_the_web(site):
    for page in ON_SITE:
        built = (site / page.removesuffix("index") / "index.html").read_text()
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://(?!zensical)', built), page
        assert "--8<--" not in built, page


@pytest.mark.release
def test_the_page_of_old_checkpoints_is_the_one_with_its_word_in_a_heading(site):
    """By which the search lists it first."""
    items = json.loads((site / "search.json").read_text())["items"]
    named = {item["location"] for item in items if "HookedTransformer" in item["title"]}
    assert {location.split("/")[0] for location in named} == {"old-checkpoints"}


def test_public_functions_document_each_parameter_and_the_result():
    for name in icebear.__all__:
        function = getattr(icebear, name)
        text = inspect.getdoc(function) or ""
        assert text, name
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            sections = [title for title in ("Parameters", "Returns", "Yields") if f"\n{title}\n---" in text]
            assert "Parameters" in sections, name
            assert signature.return_annotation == "None" or {"Returns", "Yields"} & {*sections}, name
            for parameter in signature.parameters:
                assert re.search(rf"\b{parameter}\b", text), f"{name}: {parameter}"


def test_every_public_name_is_on_the_api_page():
    headings = re.findall(r"^### `?(\w+)", script("api").page(), re.MULTILINE)
    assert set(icebear.__all__) == set(headings)


@pytest.mark.release
def test_every_public_name_is_on_the_api_page_of_the_site(site):
    headings = re.findall(r'<h3 id="\w+">(\w+)', (site / "api" / "index.html").read_text())
    assert set(icebear.__all__) == set(headings)

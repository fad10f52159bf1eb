"""Every notebook runs from a clean checkout, keeps what it claims, and its page answers to clicks."""

import shutil
from contextlib import chdir, redirect_stdout
from io import StringIO

import nbformat
import pytest
from conftest import index_small
from few import UNCOUNTED, few
from IPython.core.displayhook import CapturingDisplayHook
from IPython.core.interactiveshell import InteractiveShell
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pages import NOTEBOOKS, build_site, script

from icebear.actmax import writes
from icebear.concepts.stages import stage_measurements
from icebear.evaluation import faithfulness
from icebear.models.model import Model

notebooks = script("notebooks")
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@by_name
def test_a_notebook_is_kept_without_outputs_and_ends_with_its_claim(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert cells[0].source.startswith("# ")
    assert "find_spec" in code[0].source
    assert "%pip install --quiet -e" in code[0].source
    assert sum("%pip" in cell.source for cell in code) == 1
    assert cells[-1].source.splitlines()[-1].startswith("assert ")
    assert sum(cell.cell_type == "markdown" for cell in cells) >= len(code) - 1


def executed(path):
    """As `notebooks.executed`, in this process, which has imported everything and has the model."""
    notebook, shell, text = nbformat.read(path, as_version=4), InteractiveShell(), StringIO()
    with chdir(path.parent), redirect_stdout(text):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                shell.display_trap.hook = CapturingDisplayHook(shell, values := [])
                shell.run_cell(cell.source).raise_error()
                cell.outputs = [new_output("execute_result", **value) for value in values]
                if text.getvalue():
                    cell.outputs.insert(0, new_output("stream", text=text.getvalue()))
                text.seek(text.truncate(0))
    return notebook


@pytest.fixture(scope="session")
def pages(shared, smol, scanned, tmp_path_factory):
    """`pages(path)` is a notebook's page, of one run with few contexts and draws. An index in a temporary folder goes
    on where `scanned` is, tokens of short texts are removed in two steps, not in five, and at most 12 are written."""
    beginnings, measured, generated = faithfulness.beginnings, writes.writes, Model._generated

    def of(path):
        def make(folder):
            index = tmp_path_factory.mktemp("index")
            shutil.copytree(scanned, index, dirs_exist_ok=True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("tempfile.mkdtemp", lambda: index)
                patch.setattr(faithfulness, "SHARES", (0.0, 0.3, 1.0))
                patch.setattr(faithfulness, "beginnings", lambda *texts, **_: beginnings(*texts, 10, longest=18))
                patch.setattr(writes, "writes", lambda *card: measured(*card[:4], 2))
                patch.setattr(
                    Model, "_generated", lambda model, batch, n, *rest: generated(model, batch, min(n, 12), *rest)
                )
                few(patch, UNCOUNTED)
                index_small(patch)
                patch.setattr(stage_measurements, "RANDOM_DRAWS", 20)  # *why* claims what they give
                text = notebooks.page(executed(path))
            (folder / "page.md").write_text(text)

        return shared(f"notebook-{path.stem}", make) / "page.md"

    return of


@pytest.mark.real
@pytest.mark.long
@pytest.mark.release
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_page_is_written(path, pages):
    """The page is what `make docs` includes."""
    path.with_suffix(".md").write_text(pages(path).read_text())


@pytest.mark.release
def test_a_kernel_gives_the_same_page_and_a_notebook_whose_claim_is_false_fails(tmp_path):
    """nbclient's own law, and that we use it so."""
    path = tmp_path / "small.ipynb"
    code = (
        "import pandas\nprint(1)\nprint(2)",
        "table = pandas.DataFrame([[1.5]])\ntable",
        "2 > 1",
        "assert len(table) == 1",
    )
    cells = [new_markdown_cell("# A title"), *map(new_code_cell, code)]
    nbformat.write(new_notebook(cells=cells), path)
    text = notebooks.write(path).read_text()
    assert text == notebooks.page(executed(path))
    assert all(part in text for part in ("1\n2", "<table", "True"))
    path = tmp_path / "false.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("assert 1 > 2")]), path)
    with pytest.raises(CellExecutionError):
        notebooks.write(path)
    assert not path.with_suffix(".md").exists()
    with pytest.raises(AssertionError):
        executed(path)


@pytest.mark.release
@pytest.mark.real
def test_pages_of_the_site_answer_to_clicks(pages, chromium, tmp_path):
    """In a real browser, from the site as it is built; nothing is fetched from elsewhere."""
    build_site(tmp_path, lambda path: pages(path).read_text())
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    errors, requests = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(error))

    page.goto((tmp_path / "site" / "notebooks" / "why" / "index.html").as_uri())
    token = page.locator(".tokens span", has_text="bear").first
    text = "getComputedStyle(document.activeElement, '::after').content"
    token.click()
    assert page.evaluate("document.activeElement.textContent").strip() == "bear"
    assert page.evaluate(text).strip('" ').startswith("2: +")

    page.goto((tmp_path / "site" / "notebooks" / "circuit" / "index.html").as_uri())
    card = page.locator(".circuit .panel")
    assert "Point at a box" in card.inner_text()
    node = page.locator(".circuit .node[data-id*='ffn']").first
    node.click()
    assert node.get_attribute("aria-pressed") == "true"
    assert node.get_attribute("data-id").split("@")[0] in card.inner_text()
    assert "raises" in card.inner_text()
    assert page.locator(".circuit .edge.highlight").count() > 0
    page.locator(".circuit .group").first.click()
    assert "score" in card.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not errors
    assert all(url.startswith(("file:", "data:")) for url in requests)

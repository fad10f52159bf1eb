"""The page that tells a prompt's story: its numbers are the library's, its texts are texts, it needs nothing else."""

import html
import json
import re

import pytest
from click.testing import CliRunner

from icebear.actmax import build_index
from icebear.app.cli.main import main
from icebear.app.report.story import story
from icebear.concepts import ablation, attribute, circuit
from icebear.db import open_store

PROMPT, OTHER = "<b>ice</b> bear", "<b>big</b> cats"


@pytest.fixture
def told(model):
    return story(model, PROMPT, OTHER, contrast="z", nodes=12)


def test_its_numbers_are_those_of_the_library(model, told):
    graph = circuit(model, PROMPT, contrast="z", counterfactual=OTHER, nodes=12)
    compared = attribute(model, PROMPT, contrast="z", counterfactual=OTHER)
    assert told.graph.to_json() == graph.to_json()
    assert list(told.neurons) == compared.top(10, "ffn", position="all")
    assert list(told.carried) == [ablation(model, compared, nodes) for nodes in (10, 100, 1000)]
    assert list(told.without) == [graph.without(group) for group in graph.groups[:6]]
    assert told.alone.tokens.tolist() == attribute(model, PROMPT, contrast="z").tokens.tolist()
    json.dumps(told.to_dict(), allow_nan=False)


def test_beside_each_claim_stands_its_control(told):
    """Of the words, of the list, of the edges, and of each group."""
    page = told.to_html()
    assert html.escape(str(told.removed)) in page
    for one in told.carried:
        assert f"<td>{one.left:.0%}</td><td>{one.matched_left:.0%}</td><td>{one.changed_left:.0%}</td>" in page
    assert f"drawn into the same targets from the same layers {told.faithfulness.matched:.0%}" in page
    for found in told.without:
        assert f"<td>{found.share:.0%}</td><td>{found.matched:.0%}</td>" in page


def test_the_page_fetches_nothing_and_texts_are_texts(told):
    page = told.to_html()
    assert len(page.encode()) < 2_000_000
    assert not re.search(r"<link|<img|@import|url\(|src=", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "<b>ice" not in page.replace("<b><u>", "")
    assert "&lt;" in page


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light")])
def test_it_answers_to_clicks_and_fits(told, chromium, tmp_path, width, scheme):
    (tmp_path / "a.html").write_text(told.to_html())
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "a.html").as_uri())
    node = page.locator(".circuit .node[data-id*='ffn']").first
    node.click()
    assert node.get_attribute("data-id").split("@")[0] in page.locator(".circuit .card").inner_text()
    page.locator(f"a[href='#{next(iter(told.projections))}']").first.click()
    assert page.evaluate("scrollY") > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert {url.split("#")[0] for url in asked} == {(tmp_path / "a.html").as_uri()}


def test_with_a_store_it_has_cards(model, corpus, tmp_path):
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        told = story(model, PROMPT, OTHER, contrast="z", nodes=12, store=store)
    assert [card.neuron for card in told.cards] == list(told.projections)[:4]
    page = told.to_html()
    for card in told.cards:
        assert f'<a href="#{card.neuron}">' in page
        assert f'id="{card.neuron}"' in page
    assert "What drives it to +" in page


def test_the_command_writes_it(tiny_folder, tmp_path):
    words = [
        "story",
        " Rome is",
        "--counterfactual",
        " Paris is",
        "--contrast",
        "A",
        "--nodes",
        "8",
        "--html",
        str(tmp_path / "a.html"),
    ]
    done = CliRunner().invoke(main, [*words, "--model", tiny_folder, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["circuit"]["nodes"]
    assert "Why " in (tmp_path / "a.html").read_text()
    done = CliRunner().invoke(main, ["story", "--html", str(tmp_path / "b.html"), "--model", tiny_folder])
    assert done.exit_code == 2

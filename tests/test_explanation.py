"""`explain`: the one investigation has the library's numbers, shows a label only if it is significant, and makes a page
that needs nothing else."""

import html
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from few import few_of

from icebear import attribute, build_index, explain, open_store, project
from icebear.concepts.nodes.random_controls import token_removal_control
from icebear.concepts.results.ranking import Ranking
from icebear.errors import InputError
from icebear.explanation.explanation import Explanation
from icebear.explanation.sentences import comparison_sentence, tokens_sentence
from icebear.records import AutomaticLabel

PROMPT, OTHER = "<b>ice</b> bear", "<b>big</b> cats"


@pytest.fixture
def explanation(model):
    return explain(model, PROMPT, contrast="z", counterfactual=OTHER)


def test_its_numbers_are_those_of_the_library(model, explanation):
    relevance = attribute(model, PROMPT, contrast="z", counterfactual=OTHER)
    assert [node.ranked for node in explanation.nodes] == relevance.top(10, "ffn", position="all")
    for node in explanation.nodes:
        assert node.words == project(model, node.ranked.neuron, 8).words(node.ranked.polarity)
        assert node.token == relevance.prompt.strings[node.ranked.position]
    document = json.loads(explanation.to_json())
    assert [row["relevance"] for row in document["ranking"]] == [node.ranked.relevance for node in explanation.nodes]
    assert explanation.to_frame()["neuron"].tolist() == [str(node.ranked.neuron) for node in explanation.nodes]


def test_a_label_is_shown_only_if_it_is_significant(model, corpus, tmp_path):
    relevance = attribute(model, PROMPT)
    first, second = (row for row in relevance.top(2, "ffn"))
    meaning = AutomaticLabel(first.neuron, first.polarity, "words", "'ice'", "token", 0.9, 0.01, True, {})
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        store.labels.set_automatic(
            [meaning, replace(meaning, neuron=second.neuron, polarity=second.polarity, significant=False)]
        )
        result = Explanation.of(model, relevance, Ranking(2, "ffn"), store=store)
    assert [node.meaning for node in result.nodes] == [meaning, None]
    assert result.nodes[0].label == meaning.badge
    assert result.nodes[1].label is None
    assert result.meanings == [meaning]


def test_several_prompts_are_refused(model):
    with pytest.raises(InputError, match="one prompt"):
        explain(model, [PROMPT, PROMPT])


# --- the page ------------------------------------------------------------------------------------------


@pytest.fixture
def whole(model):
    return explain(model, PROMPT, contrast="z", counterfactual=OTHER)


def test_beside_each_claim_stands_its_control(model, whole, tmp_path):
    page = html.unescape(whole.to_html(tmp_path / "a.html"))
    assert html.unescape((tmp_path / "a.html").read_text()) == page
    unstaged = replace(whole, stages=None, removal_control=token_removal_control(model, whole.relevance))
    assert str(unstaged.removal_control) in html.unescape(unstaged.to_html())


@pytest.mark.parametrize("counterfactual", [OTHER, None])
def test_the_page_fetches_nothing_and_texts_are_texts(model, counterfactual):
    page = explain(model, PROMPT, contrast="z", counterfactual=counterfactual).to_html()
    assert len(page.encode()) < 2_000_000
    assert not re.search(r"<link|<img|@import|url\(|src=", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "<b>ice" not in page.replace("<b><u>", "")


@pytest.mark.parametrize(
    ("width", "scheme"), few_of([(1280, "light"), (1280, "dark"), (390, "light")], (1280, "light"))
)
def test_it_answers_to_clicks_and_fits(whole, chromium, tmp_path, width, scheme):
    whole.to_html(tmp_path / "a.html")
    page = chromium.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "a.html").as_uri())
    page.locator(f"a[href='#{whole.projections[0].neuron}']").first.click()
    assert page.evaluate("scrollY") > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert {url.split("#")[0] for url in requests} == {(tmp_path / "a.html").as_uri()}


def test_with_a_store_it_has_cards(model, corpus, tmp_path):
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        result = explain(model, PROMPT, contrast="z", counterfactual=OTHER, store=store)
    assert [card.neuron for card in result.cards] == [row.neuron for row in result.projections][:4]
    page = result.to_html()
    for card in result.cards:
        assert f'<a href="#{card.neuron}">' in page
        assert f'id="{card.neuron}"' in page
    assert "Strongest positive sentences" in page


# --- effects -------------------------------------------------------------------------------------------


def renamed(explanation, word):
    """The same explanation with other likely words, because single letters are not shown: word(place) is a word."""
    tokens = tuple(map(word, range(len(explanation.effects.tokens))))

    def node(one):
        return replace(one, raises=tokens[:2], lowers=tokens[2:3], label=tokens[3])

    nodes = tuple(map(node, explanation.nodes))
    return replace(explanation, effects=replace(explanation.effects, tokens=tokens), nodes=nodes)


@pytest.fixture
def worded(explanation):
    return renamed(explanation, " word{}".format)


def test_a_page_without_effects_has_the_words_that_neurons_promote(worded):
    page = replace(worded, effects=None, stages=None).to_html()
    assert "promotes" in page
    assert "<svg" not in page


def test_the_page_begins_with_answers(worded):
    """Predictions, tokens and nodes."""
    page = html.unescape(re.sub("</?span.*?>", "", replace(worded, stages=None).to_html()))
    relevance = worded.relevance
    parts = [
        *(repr(token.text) for token in relevance.predictions[:5]),
        "".join(relevance.counterfactual.prompts[0]),
        *(repr(token.text) for token in relevance.counterfactual.predictions[:5]),
        tokens_sentence(relevance),
        *(f">{node.ranked.relevance:+.3f}<" for node in worded.nodes),
    ]
    place = 0
    for part in parts:
        place = page.index(part, place)


def test_hostile_words_stay_text(explanation):
    page = renamed(explanation, "\"'</title></svg><script>alert({})</script>\x00\x1b\ud800".format).to_html()
    assert "<script" not in page
    assert "svg>" not in page


def test_sentences_name_characters_and_no_more_than_all():
    """A letter and its mark are one, whose shares are added; more than all cannot be accounted for."""

    def said(values, strings):
        of_text = {"is_image": False, "image_positions": ()}
        prompt = SimpleNamespace(strings=strings, sinks=(), template=(), ids=strings, **of_text)
        sums = SimpleNamespace(target=sum(values))
        relevance = SimpleNamespace(
            prompt=prompt, tokens=torch.tensor(values), sums=sums, counterfactual=None, image=None
        )
        return tokens_sentence(relevance)

    assert said([0.0, 0.1, 0.4, 0.5, 0.0], ["x", "a", "q", "\u0301", " b"]).startswith("'a' and 'q\u0301' account")
    assert "all of" in said([0.5, 0.5], ["a", " b"])
    assert "%" not in said([0.52, 0.52, -0.04], ["a", " b", " c"])
    assert "%" not in said([2.0, -1.0], ["a", " b"])
    assert "single token" in said([1.0], ["a"])


def test_the_hint_names_a_word(model):
    """Never a blank, a sign or a part of a character, whatever is most relevant."""
    for text in ("a, b", " , ", "the  bear !"):
        relevance = attribute(model, text)
        for position, piece in enumerate(relevance.prompt.strings):
            relevance.tokens[:] = 0
            relevance.tokens[position] = 1
            named = re.findall("for '(.*)'", comparison_sentence(relevance))
            assert all(any(map(str.isalnum, word)) for word in named), piece

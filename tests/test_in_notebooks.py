"""Every public result shows itself in a notebook, without a network, and escaped."""

import inspect
import re
from dataclasses import fields
from html.parser import HTMLParser

import pytest
import torch

import icebear
from icebear import ablation, attribute, circuit, explain, random_edit_control, source_breakdown, stages
from icebear.concepts.answers.counterfactuals import Suggestion
from icebear.explanation.sentences import screen
from icebear.records import Example, Hit, Neuron, Projection, Promotion, RandomControl, Sentence

BAD = "<script>alert(1)</script><img src=http://evil.example/x>"
NO_RESULTS = """
AlphaBeta AttnLRP Chat Corpus Difference Edit Encoder Epsilon Gamma Method Model Neuron Prompt Ranked Store VectorEdit
ZPlus
"""
"""Public classes of what is given, of rules, and of ids."""


def test_every_public_result_is_shown():
    classes = {name: value for name in icebear.__all__ if inspect.isclass(value := getattr(icebear, name))}
    results = {name for name, value in classes.items() if hasattr(value, "_repr_html_")}
    others = {name for name, value in classes.items() if not issubclass(value, Exception)} - results
    assert others == set(NO_RESULTS.split())


class Tags(HTMLParser):
    """What a browser would load, and the text."""

    def __init__(self, html):
        super().__init__()
        self.loaded, self.text, self.names = [], "", set()
        self.feed(str(html))

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data):
        self.text += data


def stands_alone(html):
    """Nothing is loaded, and no script runs."""
    tags = Tags(html)
    assert not [value for value in tags.loaded if not value.startswith(("data:", "#"))]
    assert not re.search(r"url\((?!['\"]?data:)|@import", html)
    assert "script" not in tags.names
    return tags


HOSTILE = {
    "Suggestion": Suggestion((1,), BAD, BAD, BAD, BAD, 0.5, 0.1),
    "RandomControl": RandomControl(BAD, BAD, BAD, 1.0, 2.0, (1.5, 1.0)),
    "Hit": Hit(Neuron(1, "ffn", 3), "+", 0.5, (BAD,), "sentences"),
    "Example": Example(1.5, 0, Sentence(1, BAD, BAD, 0, 1, (BAD,))),
    "Projection": Projection(Neuron(1, "ffn", 3), (Promotion(1, BAD, 1.0, 2.0),), (Promotion(2, BAD, -1.0, -2.0),)),
    "Recipe": icebear.Recipe(BAD, ("L1.ffn.3*0",), BAD, "0"),
    "Answer": icebear.Answer((1,), (2,), (BAD,), (0.5,), True, None, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_escaped(name):
    result = HOSTILE[name]
    tags = stands_alone(result._repr_html_())
    assert "img" not in tags.names
    assert BAD in tags.text


def test_results_of_a_model_have_their_tables(model):
    relevance = attribute(model, "ice bear", counterfactual="big cats")
    for result in (
        ablation(model, relevance, 5),
        random_edit_control(model, "ice bear", ["L1.ffn.3*0"], "a"),
        source_breakdown(model, model.answer([5, 49, 1], 3)),
        relevance.effects(3),
        relevance,
        stages(model, "ice bear", counterfactual="big cats"),
    ):
        assert len(stands_alone(result._repr_html_()).text.strip()) > 20
    shares = ablation(model, relevance, 5)
    assert all(f"{value:.4g}" in shares._repr_html_() for value in vars(shares).values() if isinstance(value, float))
    effects = relevance.effects(3)
    table = effects.to_frame()
    assert effects._repr_html_().count("<tr>") == 1 + min(len(table), 20)
    assert all(f"<td>{name}</td>" in effects._repr_html_() for name in table.columns)


PUBLIC = {name: value for name in icebear.__all__ if inspect.isclass(value := getattr(icebear, name))}
SHOWN = {name: kind for name, kind in PUBLIC.items() if hasattr(kind, "_repr_html_")}
LONG = "A long text, with \n line breaks. " * 500


def short(result):
    lines = repr(result).split("\n")
    return len(lines) <= 25 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("value", [LONG, (LONG,) * 999, {LONG: [LONG] * 99}, torch.zeros(99, 999), None], ids=type)
def test_a_public_result_with_any_fields_has_a_short_repr(name, value, monkeypatch):
    kind = SHOWN[name]
    if kind.__str__ is not object.__str__:  # a text of real results
        monkeypatch.setattr(kind, "__str__", lambda self: LONG)
    result = object.__new__(kind)
    result.__dict__.update({field.name: value for field in fields(kind)})
    assert short(result)
    assert kind.__str__ is not object.__str__ or kind.__name__ in repr(result)


def test_all_that_public_functions_return_has_a_short_repr(model):
    """Functions return classes that are shown, plain values, or what other functions take."""
    returned = {
        name: inspect.signature(value).return_annotation
        for name in icebear.__all__
        if inspect.isfunction(value := getattr(icebear, name))
    }
    names = {word for annotation in returned.values() for word in re.findall(r"\w+", annotation)}
    plain = "Any AbstractContextManager Act Counter DataFrame Iterator Log None Unit float int list pandas str tuple"
    assert names - set(plain.split()) - set(SHOWN) == {"Corpus", "Encoder", "Model", "Path", "Store"}
    prompt, other = "ice bear " * 20, "big cats " * 20
    relevance = attribute(model, prompt, counterfactual=other)
    for result in (
        model,
        relevance,
        relevance.effects(3),
        explain(model, prompt),
        explain(model, prompt, counterfactual=other),
        stages(model, prompt, counterfactual=other),
        circuit(model, prompt, counterfactual=other, nodes=8),
        random_edit_control(model, prompt, ["L1.ffn.3*0"] * 9, "a"),
    ):
        assert short(result), repr(result)
    assert str(explain(model, prompt)) == screen(explain(model, prompt))

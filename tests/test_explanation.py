"""`explain`: the one investigation has the library's numbers, and shows a label only if it is significant."""

import json
from dataclasses import replace

import pytest

from icebear import explain
from icebear.actmax import build_index
from icebear.actmax.explanation import SIZES, Explanation, Ranking
from icebear.concepts import ablation, attribute, project
from icebear.concepts.attribution.random_controls import removing
from icebear.db import open_store
from icebear.errors import InputError
from icebear.records import Meaning

PROMPT, OTHER = "<b>ice</b> bear", "<b>big</b> cats"


@pytest.fixture
def explanation(model):
    return explain(model, PROMPT, contrast="z", counterfactual=OTHER)


def test_its_numbers_are_those_of_the_library(model, explanation):
    relevance = attribute(model, PROMPT, contrast="z", counterfactual=OTHER)
    assert [node.ranked for node in explanation.nodes] == relevance.top(10, "ffn", position="all")
    assert list(explanation.ablations) == [ablation(model, relevance, size) for size in SIZES]
    assert explanation.removed == removing(model, PROMPT, relevance)
    for node in explanation.nodes:
        assert node.words == project(model, node.ranked.neuron, 8).words(node.ranked.polarity)
        assert node.token == relevance.token_strings[node.ranked.position]
    document = json.loads(explanation.to_json())
    assert [row["relevance"] for row in document["ranking"]] == [node.ranked.relevance for node in explanation.nodes]
    assert explanation.to_frame()["neuron"].tolist() == [str(node.ranked.neuron) for node in explanation.nodes]


def test_a_label_is_shown_only_if_it_is_significant(model, corpus, tmp_path):
    relevance = attribute(model, PROMPT)
    first, second = (row for row in relevance.top(2, "ffn"))
    meaning = Meaning(first.neuron, first.polarity, "words", "'ice'", "token", 0.9, 0.01, True, {})
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        store.set_meanings([meaning, replace(meaning, neuron=second.neuron, polarity=second.polarity, clear=False)])
        result = Explanation.of(model, relevance, Ranking(2, "ffn"), store=store)
    assert [node.meaning for node in result.nodes] == [meaning, None]
    assert result.nodes[0].label == meaning.badge
    assert result.nodes[1].label is None
    assert result.meanings == [meaning]


def test_a_circuit_needs_a_counterfactual(model):
    with pytest.raises(InputError):
        explain(model, PROMPT, circuit_nodes=5)

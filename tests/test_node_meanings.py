"""The labels of the strongest neurons and heads of an explanation."""

import pytest
from conftest import IDS

from icebear import Neuron, attribute, build_index, open_store
from icebear.explanation.node_meanings import node_meanings
from icebear.records import AutomaticLabel


def label(neuron, polarity, significant=True):
    return AutomaticLabel(neuron, polarity, "topic", f"{neuron} {polarity}", "token", 0.9, 0.01, significant, {})


@pytest.fixture
def labeled(model, corpus, tmp_path):
    """A model, and an index in which every second neuron and head has labels that passed, at both signs."""
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=2)
        heads = [Neuron(layer, "head", index) for layer in range(model.layers) for index in range(model.heads)]
        every = [*store.neurons.all_without_heads(), *heads]
        store.labels.set_automatic(label(neuron, sign, neuron.index % 2 == 0) for neuron in every for sign in "+-")
        yield model, store


@pytest.mark.parametrize("k", [5, 20])
def test_they_are_the_strongest_whose_label_passed_by_share(k, labeled):
    model, store = labeled
    relevance = attribute(model, IDS)
    every = [row for site in ("ffn", "head") for row in relevance.top(1000, site=site, position="last")]
    strongest = sorted(every, key=lambda row: -row.relevance)[:k]
    expected = [(row, label(row.neuron, row.polarity or "+")) for row in strongest if row.neuron.index % 2 == 0]
    rows = node_meanings(relevance, store, k)
    assert [(row.node, row.meaning) for row in rows] == expected
    assert {row.node.neuron.site for row in node_meanings(relevance, store, 1000)} == {"ffn", "head"}
    target = relevance.conservation().target
    assert [row.share for row in rows] == pytest.approx([row.relevance / target for row, _ in expected])


def test_a_number_that_is_not_positive_has_no_shares(labeled):
    model, store = labeled
    both = [attribute(model, IDS, 3, contrast=4), attribute(model, IDS, 4, contrast=3)]
    signs = sorted((relevance.conservation().target > 0, bool(node_meanings(relevance, store))) for relevance in both)
    assert signs == [(False, False), (True, True)]


def test_an_index_without_labels_has_none(model, corpus, tmp_path):
    with open_store(tmp_path / "a.db", create=True) as store:
        build_index(model, corpus, store, k=2)
        assert node_meanings(attribute(model, IDS), store) == []


def test_heads_are_left_out_where_they_are_not_recorded(labeled):
    model, store = labeled
    rows = node_meanings(attribute(model, IDS, sites=("ffn",)), store, 1000)
    assert {row.node.neuron.site for row in rows} == {"ffn"}
    assert Neuron(0, "head", 0) not in [row.node.neuron for row in rows]

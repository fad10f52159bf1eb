"""Records come back from JSON as they were, results are tables, and other tools read them."""

import asyncio
import json
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

import pandas
import pyarrow.parquet
import pytest
from datasette.app import Datasette
from hypothesis import given
from hypothesis import strategies as st

from icebear import (
    Gamma,
    attribute,
    build_index,
    circuit,
    convert,
    describe,
    open_store,
)
from icebear.errors import InputError
from icebear.evaluation import report
from icebear.records import Neuron

PROMPT, OTHER = "ice bear", "big cats"


def alike(one, other):
    """To the last bit, whatever it is made of."""
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(alike(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return one == other or (one != one and other != other)


@pytest.fixture
def store(model, corpus, tmp_path):
    with open_store(tmp_path / "wiki.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        store.labels.set_manual(Neuron(1, "ffn", 3), "the <b>north</b>")
        yield store


@dataclass(frozen=True)
class Inner:
    neuron: Neuron
    number: float


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    inner: tuple[Inner, ...]
    one: Gamma
    maybe: int | None
    named: dict[str, list[float]]


NEURONS = st.builds(Neuron, st.integers(0, 99), st.sampled_from(["ffn", "head"]), st.integers(0, 10**8))
INNER = st.builds(Inner, NEURONS, st.floats())
OUTER = st.builds(
    Outer,
    st.sampled_from("ab"),
    st.lists(INNER).map(tuple),
    st.builds(Gamma, st.floats(0, 9)),
    st.none() | st.integers(),
    st.dictionaries(st.text(), st.lists(st.floats())),
)


@given(OUTER)
def test_any_record_comes_back_through_json(record):
    output = json.loads(json.dumps(convert.CONVERTER.unstructure(record, Outer), allow_nan=False))
    assert alike(convert.CONVERTER.structure(output, Outer), record)


def test_texts_of_a_result_are_texts_on_its_page(model, store):
    """Also where names of polarities stand."""
    evil = "<img src=x onerror=alert(1)>"
    result = attribute(model, PROMPT)
    prompt = replace(result.prompt, strings=(evil,) * len(result.prompt.strings))
    assert "&lt;img" in (page := replace(result, prompt=prompt).to_html())
    assert "<img" not in page
    card = describe(store, Neuron(1, "ffn", 3), model)
    examples = {evil: card.examples["+"]}
    assert "<img" not in replace(card, examples=examples, meanings={}, label=evil).to_html()


# --- tables --------------------------------------------------------------------------------------------


def test_tables_of_a_relevance_are_its_rankings(model):
    result = attribute(model, PROMPT)
    frame = result.to_frame(7, position="all")
    assert [tuple(row) for row in frame[["neuron", "position", "relevance"]].itertuples(index=False)] == [
        (str(row.neuron), row.position, row.relevance) for row in result.top(7, position="all")
    ]


def test_arrow_is_the_frame_with_where_it_came_from(model, store, tmp_path):
    graph = circuit(model, PROMPT, counterfactual=OTHER, nodes=8)
    results = report.Results({"model": model.made_with["model"]}, {"a": ""}, [], {}, [{"methods": {"x": {"a": 1.5}}}])
    for result in (attribute(model, PROMPT), graph, describe(store, Neuron(1, "ffn", 3)), results):
        place = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(result.to_arrow(), place)
        table = pyarrow.parquet.read_table(place)
        pandas.testing.assert_frame_equal(table.to_pandas(), result.to_frame(), check_dtype=False)
        assert json.loads(table.schema.metadata[b"icebear"])["model"]["fingerprint"] == model.fingerprint


def test_a_table_says_what_was_explained_and_of_a_head_nothing_that_it_has_not(model):
    result = attribute(model, PROMPT, "a", "b", counterfactual=OTHER)
    frame = result.to_frame(5)
    assert {(*row,) for row in frame[["prompt", "target", "contrast"]].itertuples(index=False)} == {(PROMPT, "a", "b")}
    assert frame.polarity.tolist() == [row.polarity for row in result.top(5)]
    heads = result.to_frame(5, site="head")
    assert heads[["polarity", "activation", "counterfactual"]].isna().all().all()
    assert {(row.polarity, row.activation) for row in result.top(5, site="head")} == {("", None)}
    assert [*heads] == [*frame]


def test_nodes_of_a_circuit_as_a_table(model):
    graph = circuit(model, PROMPT, counterfactual=OTHER, nodes=8)
    frame = graph.nodes_frame()
    assert frame.score.tolist() == [node.score for node in graph.nodes]
    assert frame.groupby("group").score.sum().to_dict() == pytest.approx(
        {group.name: group.score for group in graph.groups}
    )


def test_an_evaluation_as_a_table(tmp_path):
    samples = [{"methods": {"attnlrp": {"a": 1.0, "curve": [1]}, "random": {"a": 0.5, "curve": [2]}}}] * 2
    settings = {"evaluation": "made", "model": {"name": "letters"}, "methods": {"attnlrp": "", "random": ""}}
    report.write(tmp_path, report.Results(settings, {"a": "more is better"}, [], {}, samples))
    frame = report.load(tmp_path).to_frame()
    assert frame.to_dict("list") == {
        "sample": [0, 0, 1, 1],
        "method": ["attnlrp", "random"] * 2,
        "a": [1.0, 0.5] * 2,
    }
    (tmp_path / "results.json").write_text('{"settings": 1, "columns": 2, "notes": 3, "unable": 4, "samples": 5}')
    with pytest.raises(InputError):
        report.load(tmp_path)
    (tmp_path / "results.json").write_text('{"icebear_results": 1}')
    with pytest.raises(InputError, match=r"results\.json.* 1\b"):
        report.load(tmp_path)


# --- Datasette -----------------------------------------------------------------------------------------


def test_datasette_opens_an_index(model, store):
    """Its tables, its views by readable ids, its full-text search: through Datasette's own pages."""

    async def request_of(*paths):
        site = Datasette([str(store.path)])
        try:
            return [(await site.client.get(path)) for path in paths]
        finally:
            for database in site.databases.values():
                database.close()

    neuron = Neuron(1, "ffn", 3)
    views = f"/wiki/example_texts.json?_shape=array&name={neuron}&sign=%2B&_sort=rank"
    words = "/wiki/sentences.json?_shape=array&_search=camel"
    home, names, examples, result, page = asyncio.run(
        request_of("/wiki.json", f"/wiki/neuron_names.json?_shape=array&name={neuron}", views, words, "/wiki/labels")
    )
    assert {table["name"] for table in home.json()["tables"]} >= {"neurons", "examples", "sentences", "concepts"}
    assert names.json()[0]["mean"] == pytest.approx(store.neurons.statistics(neuron).mean)
    selected = store.examples(neuron, "+")
    assert [row["text"] for row in examples.json()] == [example.sentence.text for example in selected]
    assert [row["activation"] for row in examples.json()] == [example.activation for example in selected]
    assert result.json()
    assert all("camel" in row["text"].lower() for row in result.json())
    assert "the &lt;b&gt;north" in page.text

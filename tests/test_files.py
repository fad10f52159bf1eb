"""What is saved comes back as it was, what is hostile is refused, and other tools read it."""

import asyncio
import copy
import itertools
import json
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from typing import Literal

import pandas
import pyarrow.parquet
import pytest
import torch
from conftest import GEMMA3, random_model
from datasette.app import Datasette
from hypothesis import given
from hypothesis import strategies as st

from icebear import (
    PA_LRP,
    AttnLRP,
    Gamma,
    Relevance,
    ablation,
    attribute,
    build_index,
    circuit,
    convert,
    describe,
    open_store,
)
from icebear.actmax.page import Card
from icebear.concepts import result_files as files
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.methods.gradients import IntegratedGradients
from icebear.errors import InputError
from icebear.evaluation import report
from icebear.records import Neuron

PROMPT, OTHER = "ice bear", "big cats"


def alike(one, other):
    """To the last bit, whatever it is made of."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other)
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(
            alike(getattr(one, field.name), getattr(other, field.name)) for field in fields(one) if field.name != "run"
        )
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return one == other or (one != one and other != other)


RELEVANCES = {
    "plain": {},
    "counterfactual": {"counterfactual": OTHER},
    "counterfactual several, by the gradient": {
        "counterfactual": [OTHER, "red dogs"],
        "contrast": "z",
        "method": AttnLRP(),
    },
    "top": {"keep": "top", "k": 3, "counterfactual": OTHER},
    "no neurons": {"sites": ()},
    "positions": {"method": PA_LRP, "sites": ("ffn", "q")},
    "a rule with a number": {"method": AttnLRP(linear=Gamma(0.1))},
    "a baseline": {"method": IntegratedGradients(3), "sites": ()},
    "a phrase against another": {"target_text": "abc", "contrast": "bcd"},
}


@pytest.mark.parametrize("how", RELEVANCES.values(), ids=RELEVANCES)
def test_a_relevance_comes_back_as_it_was(model, tmp_path, how):
    result = attribute(model, PROMPT, **how)
    result.save(tmp_path / "a.json")
    back = Relevance.load(tmp_path / "a.json")
    assert alike(result, back)
    assert (back, hash(back)) == (result, hash(result))
    assert replace(back, tokens=-back.tokens) != result
    assert back.to_html() == result.to_html()
    back.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_what_comes_back_can_be_asked_again(model, tmp_path):
    result = attribute(model, PROMPT, counterfactual=OTHER)
    result.save(tmp_path / "a.json")
    assert ablation(model, Relevance.load(tmp_path / "a.json"), 5) == ablation(model, result, 5)


def test_a_circuit_comes_back_with_its_groups_for_its_model_only(model, tmp_path):
    result = circuit(model, PROMPT, counterfactual=OTHER, nodes=12)
    result.save(tmp_path / "a.json")
    back = Graph.load(tmp_path / "a.json", model)
    assert alike(replace(result, model=0), replace(back, model=0))
    assert (back, hash(back)) == (result, hash(result))
    assert (back.to_html(), back.groups) == (result.to_html(), result.groups)
    assert back.faithfulness() == result.faithfulness()
    with pytest.raises(InputError, match="gemma3"):
        Graph.load(tmp_path / "a.json", random_model(GEMMA3))


@pytest.fixture
def store(model, corpus, tmp_path):
    with open_store(tmp_path / "wiki.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        store.labels.set_manual(Neuron(1, "ffn", 3), "the <b>north</b>")
        yield store


def test_a_card_comes_back_as_it_was(model, store, tmp_path):
    result = describe(store, Neuron(1, "ffn", 3), model)
    result.save(tmp_path / "a.json")
    back = Card.load(tmp_path / "a.json")
    assert alike(result, back)
    assert back == result
    with pytest.raises(InputError, match="overwrite"):
        result.save(tmp_path / "a.json")
    result.save(tmp_path / "a.json", overwrite=True)
    assert back.to_html() == result.to_html()


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
    output = json.loads(json.dumps(files.CONVERTER.unstructure(record, Outer), allow_nan=False))
    assert alike(files.CONVERTER.structure(output, Outer), record)


# --- hostile files -------------------------------------------------------------------------------------


def change(**parts):
    return lambda output: output.update(parts)


def tensor(**parts):
    return lambda output: output["tokens"].update(parts)


HOSTILE = {
    "another version": change(icebear_relevance=1),
    "another kind": lambda output: output.update(icebear_card=output.pop("icebear_relevance")),
    "a part too much": change(code="print()"),
    "a part too little": lambda output: output.pop("tokens"),
    "a text for a number": change(head_count="4"),
    "yes for a number": change(head_count=True),
    "a number for a text": change(target_text=4),
    "an object for a list": change(token_ids={}),
    "another record": change(method="Path('/')"),
    "no record": change(method="Gamma(1)"),
    "a list for a record": change(method=["AttnLRP"]),
    "a rule out of range": change(method="AttnLRP(softmax='no')"),
    "another type of numbers": tensor(dtype="object"),
    "a shape that does not fit": tensor(shape=[10**12]),
    "a shape below zero": tensor(shape=[-8, -1]),
    "a shape of texts": tensor(shape=["8"]),
    "no bytes": tensor(base64="$$$"),
    "bytes that are a number": tensor(base64=4),
    "a number without end": change(
        conserved=dict.fromkeys(("target", "tokens", "positions", "biases", "softmax"), 10**400)
    ),
    "a shape of nothing": tensor(shape=[0, 2**62, 8], base64=""),
    "no neuron": change(largest={"k": 1, "ranked": {"ffn": [4]}, "layers": {}, "heads": None}),
}


def signed(output):
    """A file that has the right checksum, whatever is in it."""
    body = json.dumps({key: output[key] for key in output if key != "sha256"}, ensure_ascii=False).removesuffix("}")
    return body + convert._ending(body)


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_is_not_as_saved_is_refused_in_a_sentence(model, tmp_path, spoil):
    place = tmp_path / "a.json"
    attribute(model, PROMPT).save(place)
    output = json.loads(place.read_text())
    place.write_text(signed(output))
    Relevance.load(place)
    spoil(output)
    place.write_text(signed(output))
    with pytest.raises(InputError, match=r"a\.json"):
        Relevance.load(place)


SPOILT = {
    "dropped": lambda value: None,
    "empty": lambda value: type(value)() if isinstance(value, (list, dict, str)) else 0,
    "a text": lambda value: "x",
    "a number": lambda value: -1,
    "a list": lambda value: [value],
    "longer": lambda value: value * 2 if isinstance(value, list) else 10**9,
    "NaN": lambda value: "nan",
}


@pytest.mark.parametrize("how", [{"counterfactual": OTHER}, {"keep": "top", "k": 3}, {"method": PA_LRP}], ids=str)
def test_a_changed_file_is_refused(model, tmp_path, how):
    place = tmp_path / "a.json"
    attribute(model, PROMPT, **how).save(place)
    whole = json.loads(place.read_text())
    records = ("prompt", "prediction", "neurons", "sums", "counterfactual")
    keys = [(key,) for key in whole] + [(key, part) for key in records for part in whole[key] or ()]
    keys += [("neurons", "largest", part) for part in whole["neurons"]["largest"] or ()]
    for path, (way, spoil) in itertools.product(keys, SPOILT.items()):
        output = copy.deepcopy(whole)
        *above, key = path
        home = reduce(dict.__getitem__, above, output)
        home[key] = spoil(home[key])
        if way == "dropped":
            del home[key]
        if output == whole:
            continue
        place.write_text(json.dumps(output, ensure_ascii=False))
        with pytest.raises(InputError, match=r"a\.json"):
            Relevance.load(place)


def test_a_changed_circuit_is_refused(model, tmp_path):
    place = tmp_path / "a.json"
    circuit(model, PROMPT, counterfactual=OTHER, nodes=5).save(place)
    whole = json.loads(place.read_text())
    for change in (
        {"relevance": []},
        {"nodes": whole["nodes"][1:]},
        {"made_with": {}},
        {"effect": whole["contribution"]},
    ):
        place.write_text(json.dumps(whole | change, ensure_ascii=False))
        with pytest.raises(InputError, match=r"changed after it was saved|cannot be read"):
            Graph.load(place, model)


def test_texts_of_a_file_are_texts_on_its_page(model, store, tmp_path):
    """Also where names of sites and polarities stand."""
    place, evil = tmp_path / "a.json", "<img src=x onerror=alert(1)>"
    attribute(model, PROMPT).save(place)
    output = json.loads(place.read_text())
    output["prompt"]["strings"] = [evil] * len(output["prompt"]["strings"])
    place.write_text(signed(output))
    assert "<img" not in Relevance.load(place).to_html()
    describe(store, Neuron(1, "ffn", 3), model).save(place, overwrite=True)
    output = json.loads(place.read_text())
    output["examples"] = {evil: output["examples"]["+"]}
    output["kind"], output["meanings"] = {evil: evil}, {}
    output["by"], output["label"] = "activation", evil
    place.write_text(signed(output))
    assert "<img" not in Card.load(place).to_html()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"icebear_relevance": NaN}', "[" * 100_000, "\ud800"])
def test_a_file_that_is_no_json_object_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match=r"a\.json"):
        Relevance.load(tmp_path / "a.json")


def test_what_cannot_be_read_or_written_is_said(model, tmp_path):
    with pytest.raises(InputError):
        Relevance.load(tmp_path / "none.json")
    with pytest.raises(InputError):
        attribute(model, PROMPT).save(tmp_path / "none" / "a.json")


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
    assert [row["activation"] for row in examples.json()] == [example.value for example in selected]
    assert result.json()
    assert all("camel" in row["text"].lower() for row in result.json())
    assert "the &lt;b&gt;north" in page.text

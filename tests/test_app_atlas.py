"""The map of neurons in the app: drawn on a click, lit up, and made into a concept."""

import json
import time

import pytest
from appview import fine, text, visit

from icebear import attribute, build_index, load_model, open_store
from icebear.actmax.atlas import saved_map
from icebear.actmax.searching import search
from icebear.app.web.shared.all_visitors import server_state
from icebear.errors import StoreError


@pytest.fixture
def small(first_visit, tiny_folder, corpus, few_contexts):
    """The path of a small index of the app's model, without a map."""
    path = first_visit / "none.db"
    with open_store(path, create=True) as store:
        build_index(load_model(tiny_folder), corpus, store, k=4)
    return path


@pytest.fixture
def mapped(small):
    with open_store(small) as store:
        saved_map.mapped(store)
    return small


def lit(page):
    """What the map lights up; None for all."""
    (map_,) = (json.loads(element.proto.json) for element in fine(page).get("bidi_component"))
    return map_["lit"]


def test_the_map_is_drawn_on_a_click_and_is_there_afterwards(small):
    page = fine(visit("atlas"))
    assert not page.get("bidi_component")
    page.get_by_key("draw_map").click().run()
    (job,) = server_state().builds.values()
    job.outcome()
    assert lit(page.run()) is None
    assert lit(visit("atlas")) is None
    with open_store(small) as store:
        assert saved_map.saved_map(store) is not None


def test_a_map_that_was_stopped_or_cannot_be_drawn_says_so_and_is_offered_again(small, monkeypatch):
    def stopped(store, on_progress):
        while True:
            time.sleep(0.01)
            on_progress(1, 100)

    def failed(store, on_progress):
        raise StoreError("There are too few neurons.")

    for draw, said in ((stopped, "Stopped"), (failed, "too few neurons")):
        monkeypatch.setattr("icebear.app.web.atlas.atlas", draw)
        page = visit("atlas")
        page.get_by_key("draw_map").click().run()
        (job,) = server_state().builds.values()
        if draw is stopped:
            page.get_by_key("stop_build_0").click().run()
        job.join(60)
        assert said in text(fine(page.run()))
        assert page.get_by_key("draw_map")


def test_hits_and_the_most_relevant_neurons_of_the_question_are_lit_up(mapped, tiny_folder):
    page = visit("atlas", find="bear")
    with open_store(mapped) as store:
        assert lit(page) == [str(hit) for hit in search(store, "bear", 200) if hit.by == "sentences"]
    page.get_by_key("find").set_value("zxqv").run()
    assert lit(page) == []
    assert "zxqv" in text(page)
    prompt, other = "B are", "A are"
    page = visit("atlas", lit="neurons of this prompt", prompt=prompt, counterfactual=other, contrast="Rome")
    relevance = attribute(load_model(tiny_folder), prompt, contrast=" Rome", counterfactual=other)
    rows = relevance.top(1000, site="ffn", position="all")
    assert lit(page) == list(dict.fromkeys(f"{row.neuron} {row.polarity}" for row in rows))[:100]


def test_the_neighbors_of_a_neuron_are_lit_up(mapped):
    page = visit("atlas", lit="neighbors of a neuron", near="L1.ffn.3", near_polarity="-")
    with open_store(mapped) as store:
        assert lit(page) == ["L1.ffn.3 -", *map(str, store.similar("L1.ffn.3", 20, "examples", "-"))]
    page.get_by_key("near").set_value("L99.ffn.3").run()
    assert "L99" in text(page)
    assert not page.get("bidi_component")


def test_a_list_becomes_a_concept_with_each_neuron_once(mapped):
    page = visit("atlas", find="bear")
    sides = [("L1.ffn.3", "+"), ("L2.ffn.4", "-"), ("L1.ffn.3", "-")]
    page.session_state["taken"] = [[[*side, "no cluster", 0.5] for side in sides], 3]
    page.run()
    (table,) = (frame.value for frame in fine(page).dataframe)
    assert [(row.neuron, row.sign) for row in table.itertuples()] == sides
    assert page.get_by_key("taken_name").value == "bear"
    page.get_by_key("taken_concept").click().run()
    concept = json.loads(fine(page).session_state["concept"])
    assert concept["name"] == "bear"
    assert [(part["neuron"], part["polarity"]) for part in concept["parts"]] == sides[:2]
    assert {part["weight"] for part in concept["parts"]} == {0.5}

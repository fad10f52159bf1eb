"""Neurons in the app: search, cards, and the index that the server builds."""

import sqlite3

import pytest
from appview import fine, set_up, shown, text, visit
from conftest import LLAMA, random_model

from icebear import Neuron, build_index, open_store
from icebear.actmax.page import WRITES
from icebear.actmax.writes import FEW
from icebear.app.web import background, ui
from icebear.app.web.background import shared
from icebear.concepts.models import loading
from icebear.errors import DownloadError


def test_a_card_needs_no_model(environment, monkeypatch):
    def never(*args, **options):
        raise AssertionError("the model was loaded")

    ui._load.clear()
    monkeypatch.setattr(loading, "load_model", never)
    page = fine(visit(view="neurons", neuron="L29.ffn.860"))
    assert "Canad" in text(page)
    fine(visit(view="neurons", text="water"))


def test_a_card_says_what_the_neuron_writes_where_the_model_is_loaded(environment):
    ui.loading().join()
    page = text(fine(visit("neurons", neuron="L28.ffn.7")))
    assert WRITES in page
    assert page.count("; lowers ") >= 2 + FEW  # both polarities, and each sentence


def test_neuron(environment):
    page = fine(visit(view="neurons", neuron="L28.ffn.7"))
    before = text(page)
    page.get_by_key("annotate").click().run()
    assert "rgba(" in text(fine(page))
    assert "rgba(" not in before
    with open_store(environment / "wiki.db") as store:
        assert store.count("attributions")
    nearest = page.get_by_key("nearest_writes")
    name, polarity = nearest.options[0].split()
    nearest.set_value(nearest.options[0]).run()
    assert page.get_by_key("neuron").value == name
    assert page.get_by_key("polarity").value == polarity
    page.get_by_key("card_to_steer").click().run()
    assert page.get_by_key("edits").value == f"{name}*0"
    assert shown(page, "neuron").get_by_key("neuron").value == name


def test_a_neuron_of_a_site_that_the_store_lacks_has_its_vocabulary(environment):
    page = fine(visit("neurons", neuron="L23.attn.309"))
    assert "no attn neurons" in text(page)
    assert "Sweden" in text(page)


@pytest.fixture
def tiny_store(model, corpus, tmp_path, monkeypatch):
    """Builds an index of a gated model, which the app then shows."""

    def build(by):
        with open_store(tmp_path / f"{by}.db", create=True) as store:
            build_index(model, corpus, store, k=5, by=by)
        set_up(monkeypatch, store=str(tmp_path / f"{by}.db"))

    return build


def test_neurons_without_a_polarity_open_too(tiny_store):
    tiny_store("activation")
    page = fine(visit(view="neurons", neuron="L1.ffn.3", polarity="-"))
    nearest = page.get_by_key("nearest_reads")
    assert all(Neuron.parse(name) for name in nearest.options)  # and no sign
    name = nearest.options[0]
    nearest.set_value(name).run()
    assert fine(page).get_by_key("neuron").value == name


def test_a_card_and_lists_by_relevance_say_so(tiny_store):
    tiny_store("activation")
    plain = [text(fine(visit(view="neurons", neuron="L1.ffn.3"))), text(fine(visit(view="neurons", how="statistics")))]
    tiny_store("relevance")
    card = fine(visit(view="neurons", neuron="L1.ffn.3"))
    assert "Sentences with the largest positive relevance" in text(card)
    assert "Strongest" not in text(card)
    assert not [button for button in card.button if button.key == "annotate"]
    statistics = fine(visit(view="neurons", how="statistics"))
    assert all("index is by relevance" in text(page) for page in (card, statistics))
    assert not any("index is by relevance" in before for before in plain)
    assert all(Neuron.parse(name) for name in statistics.dataframe[0].value["neuron"])
    words = fine(visit(view="neurons", text="bear")).dataframe[0].value
    assert words["why"].str.contains("examples by relevance").any()
    assert not words["why"].str.contains("examples (?:contain|are)").any()


@pytest.mark.parametrize("wrong", ["L99.ffn.1", "L29.q.3", "nonsense", ""])
def test_wrong_neurons(environment, wrong):
    page = visit(view="neurons")
    page.get_by_key("neuron").set_value(wrong).run()
    assert len(page.error) == 1
    assert not page.exception
    page.get_by_key("neuron").set_value("L0.ffn.0").run()
    fine(page)


def test_search(environment, smol):
    page = fine(visit(view="neurons", text="water"))
    assert len(page.dataframe[0].value) == 50
    page.get_by_key("text").set_value("zxqv").run()
    assert "No neuron was found" in text(page)
    page.get_by_key("how").set_value("similar to a neuron").run()
    assert len(fine(page).dataframe[0].value) == 50
    page.get_by_key("by").set_value("examples").run()
    fine(page)
    page.get_by_key("how").set_value("statistics").run()
    every = len(fine(page).dataframe[0].value)
    assert every == smol.layers * smol.width("ffn")
    page.get_by_key("kinds").set_value(["token detector"]).run()
    result = fine(page).dataframe[0].value
    assert 0 < len(result) < every
    assert ((result["class_plus"] == "token detector") | (result["class_minus"] == "token detector")).all()
    page.get_by_key("search_layers").set_value((3, 4)).run()
    assert set(page.dataframe[0].value["layer"]) <= {3, 4}


def test_a_label_of_another_tab_is_kept(environment, folder):
    one = fine(visit(view="neurons", neuron="L2.ffn.2"))
    with open_store(folder / "wiki.db") as store:
        store.labels.set_own(ui.Neuron.parse("L2.ffn.2"), "theirs")
    one.get_by_key("polarity").set_value("-").run()
    assert "theirs" in text(fine(one))
    one.get_by_key("label L2.ffn.2 theirs").set_value(" ours ").run()
    with open_store(folder / "wiki.db") as store:
        assert store.labels.own(ui.Neuron.parse("L2.ffn.2"))[0] == "ours"
    assert "ours" in text(fine(one))


def built(path=None):
    job = shared().builds[path]
    job.join(60)
    assert not job.is_alive()
    return job


def test_a_first_visit_builds_a_store(first_visit):
    assert "icebear index" in text(fine(visit("search", text="bear")))
    assert built().result.parent == first_visit / "cache"
    assert not (first_visit / "none.db").exists()
    page = fine(visit("search", text="bear"))
    assert len(page.dataframe[0].value)
    assert "Strongest positive sentences" in text(fine(visit("neurons")))
    page.get_by_key("build_larger").click().run()  # where the user said that it should be
    built(first_visit / "none.db")
    assert "none.db" in str(ui.store_path())
    fine(page.run())
    assert not [button for button in page.button if button.key == "build_larger"]


def test_a_first_visit_without_a_network(first_visit, monkeypatch):
    def offline(name, limit):
        raise DownloadError("The texts could not be fetched; check the network.")

    with monkeypatch.context() as broken:
        broken.setattr("icebear.concepts.corpus.read_corpus", offline)
        fine(visit("neurons"))
        first = built()
        page = fine(visit("neurons"))
        assert "check the network" in text(page).replace("\\", "")
        assert shared().builds[None] is first  # nobody asked to try again
    page.get_by_key("build_small").click().run()
    built()
    assert "Strongest positive sentences" in text(fine(page.run()))


def test_a_store_of_a_large_model_waits_for_a_click(first_visit, monkeypatch):
    monkeypatch.setattr(background, "SMALL_MODEL", 1000)
    fine(visit("search"))
    built()
    page = fine(visit("search"))
    assert "billion parameters" in text(page)
    page.get_by_key("build_small").click().run()
    built()
    assert fine(page.run()).dataframe


def test_no_view_shows_an_error_without_a_store(environment, tmp_path, monkeypatch):
    set_up(monkeypatch, store=str(tmp_path / "none.db"))
    monkeypatch.setattr(shared(), "builds", {})
    monkeypatch.setattr(shared(), "build", lambda *args, **options: None)
    for view in ui.VIEWS:
        fine(visit(view))
    assert "Canad" in text(visit("neurons"))  # the model itself tells


def test_a_store_that_is_missing_foreign_locked_or_of_another_model(environment, folder, tmp_path, monkeypatch):
    set_up(monkeypatch, store=str(tmp_path / "none.db"))
    monkeypatch.setattr(shared(), "build", lambda *args, **options: None)
    assert "icebear index" in text(fine(visit(view="neurons")))
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    set_up(monkeypatch, store=str(tmp_path / "other.db"))
    assert "not of icebear" in visit(view="neurons").error[0].value
    fine(visit("explain"))  # which needs none
    set_up(monkeypatch, store=str(folder / "wiki.db"))
    monkeypatch.setattr(ui, "model", lambda: random_model(LLAMA))
    page = visit(view="neurons", neuron="L1.ffn.1")
    page.get_by_key("annotate").click().run()
    assert "is an index of" in page.error[0].value
    monkeypatch.setattr("icebear.db.sqlite.BUSY_SECONDS", 0.1)
    with open_store(folder / "wiki.db") as writer, writer.writing():
        page = fine(visit(view="neurons", neuron="L1.ffn.1"))  # readers look on
        page.get_by_key("label L1.ffn.1 ").set_value("mine").run()
        assert "Another process is writing" in page.error[0].value

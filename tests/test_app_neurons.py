"""Neurons in the app: search, cards, and the index that the server builds."""

import re
import sqlite3
import threading
import time
from html import escape

import pytest
from appview import fine, set_up, shown, text, visit
from conftest import LLAMA, random_model

from icebear import Neuron, build_index, describe, open_store
from icebear.actmax.card import WRITES
from icebear.actmax.index import build
from icebear.actmax.reading import TextReading
from icebear.actmax.searching import headings
from icebear.app.web import neuron_card
from icebear.app.web.neurons import PAGE_HITS
from icebear.app.web.shared import all_visitors, background_job, index_builds, jobs, links, markdown, served
from icebear.app.web.shared.all_visitors import server_state
from icebear.app.web.shared.background_job import STOPPED
from icebear.db.search import by_words
from icebear.errors import DownloadError
from icebear.models.loading import loading
from icebear.records import AutomaticLabel, NeuronStatistics


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch):
    """What a neuron writes is measured at two sentences a side."""
    monkeypatch.setattr(neuron_card, "PAGE_SENTENCES", 2)


def test_a_card_needs_no_model(environment, monkeypatch):
    def never(*args, **options):
        raise AssertionError("the model was loaded")

    jobs._load.clear()
    monkeypatch.setattr(loading, "load_model", never)
    page = fine(visit(view="neurons", neuron="L29.ffn.860"))
    assert "Canad" in text(page)
    fine(visit(view="neurons", text="water"))


def test_a_card_says_what_the_neuron_writes_where_the_model_is_loaded(environment):
    jobs.model_job().join()
    page = text(fine(visit("neurons", neuron="L28.ffn.7")))
    assert WRITES in page
    assert page.count("; lowers ") >= 2 + neuron_card.PAGE_SENTENCES  # both polarities, and each sentence


def test_a_text_that_a_person_tries_has_the_values_of_the_index(environment):
    """Its strongest sentence; and a text without a token that counts leaves the card as it is."""
    with open_store(environment / "wiki.db") as store:
        (example,) = store.examples(Neuron.parse("L28.ffn.11"), "+", 1)
    page = fine(visit("neurons", neuron="L28.ffn.11", own_text=example.sentence.text))
    assert markdown.plain(f"{example.activation:+.2f} at") in text(page) or f"{example.activation:+.2f} at" in text(
        page
    )
    page.get_by_key("own_text").set_value("a").run()
    assert page.error
    assert page.get_by_key("annotate")


def test_a_histogram_has_every_bin_up_to_the_largest_activation():
    """Also where no sampled token is, and every count once."""
    counts = [0] * 28
    counts[14], counts[16] = 5, 2  # 0 to 1/32, and 1/16 to 1/8
    chart = neuron_card.histogram_chart(NeuronStatistics(Neuron(0, "ffn", 0), 0, 1, -0.01, 9.5, 0.5, tuple(counts)))
    bars, ends = (layer.data for layer in chart.layer)
    assert list(bars["sentences"]) == [0, 5, 0, 2, 0, 0, 0, 0, 0, 0, 0]
    assert (bars["activation"].iloc[0], bars["activation"].iloc[-1]) == ("-0.03125 to 0", "8 to 16")
    assert list(bars["negative"]) == [True] + [False] * 10
    assert list(ends["activation"]) == ["-0.03125 to 0", "8 to 16"]


def test_neuron(environment):
    page = fine(visit(view="neurons", neuron="L28.ffn.7"))
    before = text(page)
    page.get_by_key("annotate").click().run()
    assert "rgba(" in text(fine(page))
    assert "rgba(" not in before
    with open_store(environment / "wiki.db") as store:
        assert store.count("attributions")
    page.get_by_key("card_to_steer").click().run()
    assert page.get_by_key("edits").value == "L28.ffn.7*0"
    assert "L28.ffn.7" in text(shown(page, "neurons"))


def test_more_sentences_are_read_on_request(environment, monkeypatch):
    """Behind those of before; another card has none."""
    monkeypatch.setattr(neuron_card, "READ_AT_ONCE", 3)
    page = fine(visit(view="neurons", neuron="L28.ffn.7"))
    for count in (3, 6):
        page.get_by_key("more_examples_button").click().run()
        assert f"{count} more sentences of wiki-summaries" in text(fine(page)).replace("\\", "")
    page.get_by_key("jump").set_value("L28.ffn.8").run()
    assert "more sentences of wiki-summaries" not in text(fine(page)).replace("\\", "")


def test_a_head_is_swapped_at_its_first_sentence(environment):
    page = fine(visit("neurons", neuron="L23.head.4"))
    with open_store(environment / "wiki.db") as store:
        card = describe(store, Neuron(23, "head", 4), None, 8)
    page.get_by_key("card_to_swap").click().run()
    assert (page.session_state["prompt"], page.session_state["edits"]) == card.swap_edit


def card_of_a_group(page):
    """The card of the first neuron of a circuit's first group."""
    (groups,) = (choice for choice in page.get("button_group") if choice.key == "without")
    page.session_state["without"] = groups.options[0].replace("\\", "")
    cards = fine(page.run()).get_by_key("cards_0")
    return fine(cards.set_value(cards.options[0]).run())


@pytest.mark.release
def test_a_card_leads_back_to_the_view_that_it_came_from_and_is_switched_off_in_its_prompt(environment):
    page = fine(visit("circuit", contrast=" desert", nodes="10", neurons="true"))
    prompt = page.get_by_key("prompt").value
    page = card_of_a_group(page)
    assert page.get_by_key("back").label == "How is it computed?"
    page.get_by_key("back").click().run()
    assert fine(page).get_by_key("prompt").value == prompt
    page = card_of_a_group(page)
    page.get_by_key("card_to_steer").click().run()
    assert fine(page).get_by_key("prompt").value == prompt
    assert fine(visit("neurons", neuron="L29.ffn.860")).get_by_key("back").label == "Search"


def test_both_sides_of_a_card_are_shown_and_all_of_it_follows_the_chosen_one(environment):
    """The side comes first, and its words are what it promotes."""
    with open_store(environment / "wiki.db") as store:
        examples = {side: store.examples("L29.ffn.860", side, 1)[0] for side in "+-"}
    pages = {side: fine(visit("neurons", neuron="L29.ffn.860", polarity=side)) for side in "+-"}
    for side, page in pages.items():
        parts = [one.proto.body for one in page.html]
        html, words = "".join(parts), next(part for part in parts if f"Promotes at {side}" in part)
        first, second = [
            html.index(f">{examples[one].activation:+.2f}<") for one in (side, "-" if side == "+" else "+")
        ]
        assert first < second
        promotes, suppresses = words.split(f"Promotes at {side}")[1].split(f"Suppresses at {side}")
        suppresses = suppresses.split("<p ")[0]  # what follows is the other lens
        assert ("Canad" in promotes, "Canad" in suppresses) == (side == "+", side == "-")
        assert page.get_by_key("to_atlas").label == "Show its neighbors in the Atlas"


def test_a_neuron_of_a_site_that_the_index_lacks_has_its_vocabulary_and_asks_to_index_it(environment, no_small_index):
    page = fine(visit("neurons", neuron="L23.attn.309"))
    assert "no sentences for attn neurons" in text(page)
    assert "Sweden" in text(page)
    assert page.get_by_key("build_small_site")


@pytest.fixture
def no_small_index(monkeypatch):
    """Whoever runs the tests may have one."""
    monkeypatch.setattr(all_visitors, "cached_indexes", lambda model: [])
    monkeypatch.setattr("icebear.app.web.shared.header.shipped_path", lambda name: None)
    monkeypatch.setattr(server_state(), "builds", {})


def test_the_index_that_comes_with_icebear_is_prepared_at_the_first_visit(environment, smol, tmp_path, monkeypatch):
    set_up(monkeypatch, store=str(tmp_path / "none.db"))
    monkeypatch.setattr(server_state(), "builds", {})
    with monkeypatch.context() as before:
        before.setattr(all_visitors, "cached_indexes", lambda model: [])
        fine(visit("neurons", text="bear"))
        (job,) = server_state().builds.values()
        assert job.outcome() == index_builds.shipped_path(smol.name)
    assert results(fine(visit("neurons", text="bear")))


def test_the_parts_of_a_scan_are_shown_at_the_name_of_the_index(first_visit, no_small_index):
    assert "parts are complete" not in text(fine(visit("neurons")))
    folder = first_visit / "none.db.parts"
    folder.mkdir()
    for name in ("part-1-of-3.db", "part-2-of-3.partial"):
        (folder / name).touch()
    assert r"1 of 3 parts are complete\; begun\: 2" in text(fine(visit("neurons")))


@pytest.fixture
def tiny_store(model, corpus, tmp_path, monkeypatch):
    """An index of a gated model, which the app shows."""
    with open_store(tmp_path / "tiny.db", create=True) as store:
        build_index(model, corpus, store, k=5)
    set_up(monkeypatch, store=str(tmp_path / "tiny.db"))


@pytest.mark.parametrize("wrong", ["L99.ffn.1", "L2.ffn.99999", "nonsense"])
def test_wrong_neurons(tiny_store, wrong):
    """From the field or in a link: an error that names it and no command, and the field to enter another one."""
    page = visit(view="neurons")
    page.get_by_key("jump").set_value(wrong).run()
    for shown_page in (page, visit(view="neurons", neuron=wrong)):
        (error,) = shown_page.error
        assert wrong in error.value.replace("\\", "")
        assert "icebear" not in error.value
        assert not shown_page.exception
    page.get_by_key("jump").set_value(" L0.ffn.0 ").run()
    assert "L0.ffn.0" in text(fine(page))


def results(page):
    """The neurons of a search, with their signs."""
    return [button.key.removeprefix("open ") for button in page.button if button.key.startswith("open ")]


def test_search(environment):
    page = fine(visit(view="neurons", text="water"))
    with open_store(environment / "wiki.db") as store:
        hits = by_words(store, "water", 50)
        titles = headings(store)
    have, alone = ([str(hit) for hit in hits if hit.by == by] for by in titles)
    assert results(page) == [*have[:PAGE_HITS], *alone[:PAGE_HITS]]
    assert [heading in text(page).replace("\\", "") for heading in titles.values()] == [bool(have), bool(alone)]
    page.get_by_key("more sentences water" if have else "more weights water").click().run()
    assert len(results(fine(page))) > PAGE_HITS
    page.get_by_key("text").set_value("zxqv").run()
    assert results(page) == []
    said = text(page).replace("\\", "")
    assert "No sentence of this index has 'zxqv'. It holds 20 of 10,033 documents" in said


def shown_first(store, neuron, side, word):
    """The strongest sentence with the word, or else the strongest one."""
    rows = store.examples(neuron, side)
    return next((row for row in rows if word in re.findall(r"\w+", row.sentence.text.lower())), rows[0])


def test_a_result_shows_both_sides_and_opens_on_the_one_that_was_found(environment):
    page = fine(visit(view="neurons", text="water"))
    with open_store(environment / "wiki.db") as store:
        hit = next(hit for hit in store.search("water", PAGE_HITS) if hit.polarity == "-")
        peaks = [shown_first(store, hit.neuron, side, "water").token_text for side in "-+"]
    (html,) = [one.proto.body for one in page.html if all(f">{escape(peak)}</u>" in one.proto.body for peak in peaks)][
        :1
    ]
    assert html.index("negative activation") < html.index("positive activation")
    page.get_by_key(f"open {hit}").click().run()
    assert (page.get_by_key("polarity").value, str(hit.neuron) in text(fine(page))) == ("-", True)
    page.get_by_key("back").click().run()
    assert page.get_by_key("text").value == "water"


def test_a_label_of_another_tab_is_kept(environment, folder):
    one = fine(visit(view="neurons", neuron="L2.ffn.2"))
    with open_store(folder / "wiki.db") as store:
        store.labels.set_manual(Neuron.parse("L2.ffn.2"), "theirs")
    one.get_by_key("polarity").set_value("-").run()
    assert "theirs" in text(fine(one))
    one.get_by_key("label L2.ffn.2 theirs").set_value(" ours ").run()
    with open_store(folder / "wiki.db") as store:
        assert store.labels.manual(Neuron.parse("L2.ffn.2"))[0] == "ours"
    assert "ours" in text(fine(one))


def job_of(page, monkeypatch, label):
    """Click Suggest one, with `label` in the place of the labeling; return the job."""
    monkeypatch.setattr("icebear.actmax.labels.auto.label_neurons", label)
    page.get_by_key("suggest_label").click().run()
    return neuron_card._labelling(*page.session_state["labelling"])


def stop_buttons(page):
    return [button for button in page.button if button.label == "Stop"]


def test_a_label_is_suggested_while_the_card_is_read(environment, monkeypatch):
    scored = threading.Event()

    def label(model, store, neurons, on_progress):
        scored.wait(120)
        store.labels.set_automatic(
            [
                AutomaticLabel(one, side, "words", "zebu", "token", 0.9, 0.01, True, {})
                for one in neurons
                for side in "+-"
            ]
        )

    page = fine(visit("neurons", neuron="L5.ffn.5"))
    job = job_of(page, monkeypatch, label)
    assert stop_buttons(page)
    assert "Strongest positive sentences" in text(fine(page))
    assert "zebu" not in text(page)
    scored.set()
    job.outcome()
    assert "zebu" in text(fine(page.run()))
    assert not [button for button in page.button if button.key == "suggest_label"]


def test_a_suggestion_that_one_visitor_stops_goes_on_for_another_and_is_stopped_by_the_last(environment, monkeypatch):
    def label(model, store, neurons, on_progress):
        while True:
            time.sleep(0.01)
            on_progress(0, 1)

    page = fine(visit("neurons", neuron="L5.ffn.6"))
    job = job_of(page, monkeypatch, label)
    job.enter("another")
    stop_buttons(page)[0].click().run()
    assert STOPPED in [info.value.replace("\\", "") for info in page.info]
    assert job.is_alive()
    assert not stop_buttons(page)
    page.get_by_key("suggest_label").click().run()  # waits again for the same job
    assert stop_buttons(page)
    job.leave("another")
    stop_buttons(page)[0].click().run()
    job.join(20)
    assert not job.is_alive()
    again = job_of(page, monkeypatch, lambda *arguments, **options: None)
    assert again is not job
    again.outcome()
    assert "No label passed its test" in text(fine(page.run()))


def built(path=None):
    job = server_state().builds[path]
    job.join(60)
    assert not job.is_alive()
    return job


def test_nothing_builds_unasked_and_a_click_builds(first_visit):
    for view in links.VIEWS:
        visit(view)
    page = fine(visit("neurons", text="bear"))
    assert not server_state().builds
    assert not list(first_visit.glob("cache/*.db"))
    page.get_by_key("build_small_page").click().run()
    assert built().result.parent == first_visit / "cache"
    assert not (first_visit / "none.db").exists()
    assert results(fine(page.run()))
    for name in ("L1.ffn.3", "L1.attn.3"):
        assert "Strongest positive sentences" in text(fine(visit("neurons", neuron=name)))
    server_state().builds.clear()  # as in another server, which finds it in the cache
    page = fine(visit("neurons", text="bear"))
    assert results(page)
    assert not [button for button in page.button if button.key == "build_larger"]  # it has all documents
    with open_store(served.store_path()) as store:
        store.facts.set({"limit": 3})
    page.run()
    page.get_by_key("build_larger").click().run()  # where the user said that it should be
    built(first_visit / "none.db")
    assert "none.db" in str(served.store_path())
    fine(page.run())
    assert not [button for button in page.button if button.key == "build_larger"]


def test_stop_ends_a_build_and_another_click_resumes_it(first_visit, corpus, monkeypatch):
    """Progress comes by batch, inside the first shard too; shards that were committed are not read again."""
    monkeypatch.setattr(build, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(TextReading, "per_pass", 4)
    read, stops = [], [20]
    step = background_job.Job.step

    def counted(job, done, total, doing=None):
        if doing:
            read.append(int(doing.split()[0]))
            if stops and read[-1] >= stops[0]:
                stops.clear()
                job.stop()
        step(job, done, total, doing)

    monkeypatch.setattr(background_job.Job, "step", counted)
    fine(visit("neurons")).get_by_key("build_small_page").click().run()
    job = built()
    assert job.error
    assert job.result is None
    assert read[:2] == [0, 4]
    assert read[-1] == 20
    page = fine(visit("neurons"))
    read.clear()
    page.get_by_key("build_small_page").click().run()
    whole = built().result
    assert read[0] == 16  # a shard
    with open_store(whole) as resumed, open_store(first_visit / "once.db", create=True) as once:
        build_index(jobs.model_job().result, corpus, once, sites=index_builds.APP_SITES)
        assert resumed.checksum() == once.checksum()


def test_a_first_visit_without_a_network(first_visit, monkeypatch):
    def offline(name, limit):
        raise DownloadError("The texts could not be fetched; check the network.")

    with monkeypatch.context() as broken:
        broken.setattr("icebear.actmax.index.corpus.read_corpus", offline)
        visit("neurons").get_by_key("build_small_page").click().run()
        first = built()
        page = visit("neurons")
        assert "check the network" in text(page).replace("\\", "")
        assert server_state().builds[None] is first  # nobody asked to try again
    page.get_by_key("build_small_page").click().run()
    built()
    assert results(fine(visit("neurons", text="bear")))


def test_no_view_shows_an_error_without_a_store(environment, no_small_index, tmp_path, monkeypatch):
    set_up(monkeypatch, store=str(tmp_path / "none.db"))
    for view in links.VIEWS:
        fine(visit(view))
    assert "Canad" in text(visit("neurons", neuron="L29.ffn.860"))  # the model alone


def test_a_store_that_is_missing_foreign_locked_or_of_another_model(
    environment, no_small_index, folder, tmp_path, monkeypatch
):
    set_up(monkeypatch, store=str(tmp_path / "none.db"))
    assert fine(visit(view="neurons")).get_by_key("build_small_page")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    set_up(monkeypatch, store=str(tmp_path / "other.db"))
    assert "not a store of icebear" in visit(view="neurons").error[0].value
    fine(visit("why"))  # which needs none
    set_up(monkeypatch, store=str(folder / "wiki.db"))
    monkeypatch.setattr(jobs, "model", lambda: random_model(LLAMA))
    page = visit(view="neurons", neuron="L1.ffn.1")
    page.get_by_key("annotate").click().run()
    assert "is an index of" in page.error[0].value
    monkeypatch.setattr("icebear.db.sqlite.BUSY_SECONDS", 0.1)
    with open_store(folder / "wiki.db") as writer, writer.writing():
        page = fine(visit(view="neurons", neuron="L1.ffn.1"))  # readers look on
        page.get_by_key("label L1.ffn.1 ").set_value("mine").run()
        assert "Another process is writing" in page.error[0].value

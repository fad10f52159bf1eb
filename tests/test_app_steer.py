"""Concepts & steering in the app."""

import random
import threading
import time
from pathlib import Path

import pytest
from appview import fine, text, visit
from conftest import CAMEL, ICE_BEAR
from few import few_of

from icebear import Concept, monitor
from icebear.app.web.shared import jobs, markdown, served
from icebear.app.web.shared.background_job import STOPPED
from icebear.app.web.steering import concepts, monitor_section
from icebear.app.web.steering.flips import differences, started
from icebear.steering import outcome
from icebear.steering.comparison import compare, texts_under
from icebear.steering.flipping.flip import flip


@pytest.mark.parametrize("searches", few_of([False, True], False))
def test_a_flip(environment, monkeypatch, desert_by_heads, searches):
    """A word without its space, found once for all visitors, and shown before it is measured; Stop leaves what there
    is, and a button measures the rest of it. Without a search it is the flip that other tests found."""
    asked = []
    found = flip if searches else lambda *_, **options: desert_by_heads
    asking = lambda model, *what, **options: asked.append(what) or found(model, *what, **options)  # noqa: E731
    monkeypatch.setattr("icebear.app.web.steering.flips.flip", asking)
    swaps = [f'L23.head.{head}<-"{CAMEL}"@last' for head in (4, 5)]
    goes_on = threading.Event()
    monkeypatch.setattr(outcome, "texts_under", lambda *args, **more: goes_on.wait(60) and texts_under(*args, **more))
    page = fine(visit("steer", prompt=ICE_BEAR, contrast="desert", counterfactual=CAMEL, tokens="2"))
    assert not page.session_state["run"]
    page.get_by_key("flip").click().run()
    wanted = served.model_name(), ICE_BEAR, "desert", CAMEL, 10, False
    job = started(*wanted)
    while job.is_alive() and job.result is None:
        time.sleep(0.02)
    first = text(fine(page.run()))
    assert "0 of 3 draws" in first
    assert ("not written yet" in first, "not measured yet" in first) == (True, True)
    next(button for button in page.button if button.label == "Stop").click().run()
    goes_on.set()
    job.join()
    assert STOPPED in page.info[0].value.replace("\\", "")
    assert first in text(fine(page)).replace(page.info[0].value, "")
    page.get_by_key("flip_measure").click().run()
    assert list(map(str, started(*wanted).outcome())) == swaps
    assert asked == [(ICE_BEAR, "desert", CAMEL, 10)]
    shown = text(fine(page.run()))
    assert "2 edits make the model say desert instead of Arctic" in shown
    assert ("not written yet" in shown, "not measured yet" in shown, "Side effects are" in shown) == (
        False,
        False,
        True,
    )
    assert text(visit("steer", prompt=ICE_BEAR, contrast="desert", counterfactual=CAMEL, run="flip")) == shown
    heads = page.get_by_key("flip_neurons")
    card = fine(heads.set_value(heads.options[0]).run())
    assert card.get_by_key("back").label == "Concepts & steering"
    card.get_by_key("back").click().run()
    assert fine(page).get_by_key("prompt").value == ICE_BEAR
    page.get_by_key("flip_edit").click().run()
    assert page.get_by_key("edits").value == "\n".join(swaps)


def test_the_flip_of_an_example_is_recorded(environment, monkeypatch):
    """It needs no search and no model."""
    monkeypatch.setattr("icebear.app.web.steering.flips.started", lambda *wanted: pytest.fail("searches"))
    shown = text(fine(visit("steer")))
    assert "the model say" in shown
    assert "Side effects are" in shown


def test_steer(environment):
    page = fine(visit("steer", section="edits", tokens="3"))
    page.get_by_key("example_recipe").click().run()
    page.get_by_key("generate").click().run()
    shown = text(fine(page))
    assert "<mark>" in shown
    assert "desert" in shown
    assert "icebear steer 'The ice bear lives in the' --edit" in shown
    page.get_by_key("edits").set_value("L29.ffn.860+5").run()
    added = next(s for s in page.slider if s.label == "Added to L29.ffn.860, in activation")
    assert (added.min, added.value, added.max) == (-60, 5, 60)
    added.set_value(-10.0).run()
    assert page.get_by_key("edits").value == "L29.ffn.860-10"
    page.get_by_key("edits").set_value("L29.ffn.860=1").run()
    slider = next(s for s in page.slider if s.label == "Value")
    slider.set_value(-20.0).run()
    assert page.get_by_key("edits").value == "L29.ffn.860=-20"
    page.get_by_key(f"where 0 {page.get_by_key('edits').value}").set_value("last").run()
    assert page.get_by_key("edits").value == "L29.ffn.860=-20@last"
    page.get_by_key("unit 0 L29.ffn.860=-20@last").set_value("max").run()
    assert page.get_by_key("edits").value == "L29.ffn.860=-20max@last"
    page.get_by_key("generate").click().run()
    fine(page)
    assert "--store" in text(page)
    page.get_by_key("remove 0 L29.ffn.860=-20max@last").click().run()
    assert page.get_by_key("edits").value == ""
    page.get_by_key("edits").set_value('L23.head.4<-"The \\"ice\\" bear"@last').run()
    source = next(field for field in page.text_input if field.label == "Its value after")
    assert source.value == 'The "ice" bear'
    source.set_value("The camel").run()
    assert page.get_by_key("edits").value == 'L23.head.4<-"The camel"@last'
    page.get_by_key("edits").set_value("L29.ffn.860 is hot").run()
    assert "is not an edit" in page.error[0].value.replace("\\", "")


def test_the_code_it_shows_does_what_it_did(first_visit):
    edits = "L2.ffn.3=-20\nL1.head.1<-\"The 'camel'\"@last"
    page = fine(visit("steer", section="edits", edits=edits, prompt="A", tokens="4", temperature="0.9", seed="3"))
    page.get_by_key("generate").click().run()
    result = page.session_state["edits result"][1]
    printed = []
    exec(page.code[1].value, {"print": printed.append})
    assert printed == [result.steered.text]


def test_a_generation_that_fails(first_visit, monkeypatch, caplog):
    page = visit("steer", section="edits", edits="L2.ffn.3*0", tokens="2", prompt="ice")

    def fail(*args, **options):
        raise RuntimeError("out of `memory`")

    with monkeypatch.context() as broken:
        broken.setattr("icebear.app.web.steering.edit_neurons.compare", fail)
        page.get_by_key("generate").click().run()
        assert "This page failed" in page.error[0].value
    (record,) = [record for record in caplog.records if record.name == "icebear.app" and record.exc_info]
    assert "in fail" in caplog.text
    assert str(record.exc_info[1]) == "out of `memory`"
    page.get_by_key("generate").click().run()
    fine(page)


def test_steering_in_one_tab_never_leaks_into_another(model):
    alone = model.predict(ICE_BEAR)
    stop = threading.Event()

    def steering():
        while not stop.is_set():
            compare(model, "The camel lives in the", ["L2.ffn.3=500"], 2)

    tab = threading.Thread(target=steering)
    tab.start()
    try:
        for _ in range(10):
            assert model.predict(ICE_BEAR) == alone
    finally:
        stop.set()
        tab.join()


def test_a_stopped_generation_leaves_nothing_behind(model):
    alone = model.predict(ICE_BEAR)

    class Stop(BaseException):
        """As Streamlit ends a run."""

    def stop(count):
        if count == 4:
            raise Stop

    with pytest.raises(Stop):
        compare(model, ICE_BEAR, ["L2.ffn.3=500"], 3, on_token=stop)
    result = []
    tab = threading.Thread(target=lambda: result.append(model.predict(ICE_BEAR)), daemon=True)
    tab.start()
    tab.join(60)
    assert result == [alone]


def test_differences_are_marked_and_text_stays_text():
    one, other = differences("a <b> same", "a <i> same")
    assert one == "a <mark>&lt;b&gt;</mark> same"
    assert other == "a <mark>&lt;i&gt;</mark> same"
    assert differences("x", "x") == ("x", "x")
    assert markdown.plain("*a* `b` :red[c] $d$ <e> [f](g)") == (r"\*a\* \`b\` \:red\[c\] \$d\$ \<e\> \[f\]\(g\)")


def examples():
    names = ("music.txt", "not-music.txt", "everyday.txt")
    return [(Path(__file__).parent.parent / "examples" / name).read_text() for name in names]


def test_the_examples_in_the_package_are_those_in_the_examples_folder():
    inside = [concepts.EXAMPLE_FOLDER.joinpath(name).read_text() for name in ("music.txt", "not-music.txt")]
    assert [*inside, monitor_section.EVERYDAY.read_text()] == examples()


def test_a_concept_is_found_measured_and_steered(first_visit, few_contexts, generator):
    """From pasted texts; its name is shown as it is; its link shows the same."""
    page = fine(visit("steer", section="concepts", measured="ice snow cold", tokens="2"))
    cold, others = (
        "\n".join(" ".join(generator.choices(words.split(), k=6)) for _ in range(40))
        for words in ("ice snow cold", "sand sun hot")
    )
    page.get_by_key("concept_with").set_value(cold).run()
    assert "40 of at least 16" in text(page)
    assert "0 of at least 16" in text(page)
    assert page.get_by_key("find_concept").disabled
    page.get_by_key("concept_without").set_value(others).run()
    page.get_by_key("concept_name").set_value("<b>cold</b>").run()
    page.get_by_key("find_concept").click().run()
    shown = text(fine(page))
    assert "\\<b\\>cold" in shown
    assert "AUROC" in shown
    assert "rgba(" in shown
    assert set(page.dataframe[0].value.columns) >= {"neuron", "sign", "weight"}
    link = Concept.from_json("".join(page.query_params["concept"]))
    assert (link.vectors, link.texts, link.controls) == ((), None, ())
    positive, negative = link.provenance["means"]
    assert positive > negative
    assert all(f"{value:+.2f}</span>" in shown for value in (positive, negative))
    page.get_by_key("measured").set_value("i").run()
    assert page.error
    assert page.get_by_key("steer_concept")  # one bad text removes nothing
    page.get_by_key("measured").set_value("ice snow cold").run()
    page.get_by_key("kl").set_value(0.1).run()
    page.get_by_key("steer_concept").click().run()
    steered = text(fine(page))
    assert markdown.plain("(20 draws, seed 0)") in steered
    link = {name: "".join(page.query_params[name]) for name in ("concept", "run", "section", "measured")}
    reopened = text(fine(visit("steer", **link, kl="0.1")))
    (neurons_only,) = (line for line in reopened.splitlines() if line.startswith("This link or file has only"))
    assert reopened.partition("AUROC")[2].replace(f"{neurons_only}\n", "") == steered.partition("AUROC")[2]
    without_vector = visit("steer", **link, kl="0.1", by_vector="true")
    assert "find it again" in text(without_vector)
    page.get_by_key("by_vector").set_value(True).run()
    page.get_by_key("steer_concept").click().run()
    assert "random vectors of the same length" in text(fine(page))
    assert "concept_edit" not in {button.key for button in page.button}
    page.get_by_key("by_vector").set_value(False).run()
    page.get_by_key("steer_concept").click().run()
    page.get_by_key("suppress").set_value(True).run()
    assert "other settings" in text(fine(page))
    page.get_by_key("concept_edit").click().run()
    assert fine(page).get_by_key("edits").value.startswith("L")


def test_a_concept_that_is_not_there_is_not_found(first_visit):
    """Of the same texts on both sides, shuffled: an error, and no steering."""
    lines = "\n".join(examples()[:2]).splitlines()
    random.Random(1).shuffle(lines)
    page = fine(visit("steer", section="concepts"))
    page.get_by_key("concept_with").set_value("\n".join(lines[:40])).run()
    page.get_by_key("concept_without").set_value("\n".join(lines[40:80])).run()
    page.get_by_key("find_concept").click().run()
    assert "Not found" in page.error[0].value
    assert not page.exception
    with pytest.raises(KeyError):
        page.get_by_key("steer_concept")


def test_texts_with_a_concept_and_without_it_become_a_monitor(first_visit, few_contexts, generator):
    """The same as in Python; a text that found the concept is refused, and of a link only the neurons are a monitor."""
    page = fine(visit("steer", section="concepts", measured="ice snow cold"))
    cold, others, negatives = (
        [" ".join(generator.choices(words.split(), k=6)) for _ in range(count)]
        for words, count in (("ice snow cold", 30), ("sand sun hot", 30), ("sand sun hot dry", 60))
    )
    negatives = [text for text in dict.fromkeys(negatives) if text not in others][:25]
    page.get_by_key("concept_with").set_value("\n".join(cold)).run()
    page.get_by_key("concept_without").set_value("\n".join(others)).run()
    page.get_by_key("find_concept").click().run()
    assert "only the neurons" not in text(fine(page))
    page.get_by_key("watch_negatives").set_value("\n".join([*negatives, others[0]])).run()
    assert "26 of at least 122" in text(page)
    assert page.get_by_key("set_threshold").disabled
    page.get_by_key("watch_fpr").set_value(0.05).run()
    assert "26 of at least 23" in text(page)
    page.get_by_key("set_threshold").click().run()
    assert "found the concept" in page.error[0].value
    assert page.get_by_key("steer_concept")  # one bad text removes nothing
    page.get_by_key("watch_negatives").set_value("\n".join(negatives)).run()
    page.get_by_key("watch_detector").set_value("means").run()
    page.get_by_key("set_threshold").click().run()
    shown = text(fine(page))
    (concept,) = page.session_state["concepts"].values()
    expected = monitor(jobs.model_job().outcome(), concept, negatives, 0.05, detector="means")
    result = page.session_state["threshold"][1].result
    assert result == expected
    assert all(markdown.plain(sentence) in shown for sentence in expected.about)
    table = page.dataframe[-1].value
    assert list(table["detector"]) == [row.detector for row in expected.rates]
    assert list(table["true positives"]) == pytest.approx(
        [100 * row.true_positive_rate for row in expected.rates], abs=0.05
    )
    page.get_by_key("watch_unit").set_value("message").run()
    assert "other settings" in text(fine(page))
    link = {name: "".join(page.query_params[name]) for name in ("concept", "section")}
    page.query_params["concept"] = link["concept"].replace('"my concept"', '"renamed"')  # has no vectors
    assert fine(page.run()).get_by_key("watch_detector").value == "neurons"
    other = fine(visit("steer", **link))
    assert "only the neurons" in text(other)
    other.get_by_key("everyday").click().run()
    other.get_by_key("set_threshold").click().run()
    assert "was not measured" in text(fine(other))
    assert other.session_state["threshold"][1].result.neurons == concept.parts

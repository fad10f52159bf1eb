"""Every view of the app, in Streamlit's own test runner, with the real model and a small real index."""

import gc
import json
import os
import re
import signal
import sqlite3
import threading
import time
import weakref
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from conftest import ICE_BEAR, LLAMA, random_model
from serving import started
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from icebear import Chat, Neuron, attribute, build_index, explain, open_store, units
from icebear.actmax import explanation
from icebear.actmax.explanation import explain_groups
from icebear.actmax.page import WRITES, groups_html
from icebear.actmax.writes import FEW
from icebear.app.cli.verbs.demo import OTHER
from icebear.app.web import background, ui, words
from icebear.app.web.background import Shared, shared
from icebear.app.web.steer import differences
from icebear.concepts.attribution import counterfactuals
from icebear.concepts.attribution.counterfactuals import Suggestion
from icebear.concepts.evaluation import report
from icebear.concepts.models import loading
from icebear.concepts.models.answer import answer_of
from icebear.concepts.models.families import FAMILIES
from icebear.concepts.render import heatmap
from icebear.errors import DownloadError
from icebear.steering.comparison import compare

MAIN = "../app/web/script/main.py"


def set_up(monkeypatch, **settings):
    """As `icebear app` with these options, and those set before."""
    monkeypatch.setenv("ICEBEAR_APP", json.dumps(json.loads(os.environ.get("ICEBEAR_APP", "{}")) | settings))


@pytest.fixture
def environment(folder, monkeypatch):
    set_up(monkeypatch, store=str(folder / "wiki.db"), dtype="float32", device="cpu")
    return folder


def visit(view="talk", **parameters):
    page = AppTest.from_file(MAIN, default_timeout=120)
    for name, value in parameters.items():
        page.query_params[name] = value
    return shown(page, view)


def shown(page, view):
    """As its name in the navigation does; AppTest's own switch_page() knows only pages that are files."""
    page._page_hash = calc_hash(view)
    page.run()
    page._page_hash = ""
    return page


def text(page):
    """Everything the page says, as Markdown and HTML."""
    kinds = (page.markdown, page.caption, page.html, page.error, page.info, page.code)
    return "\n".join(str(getattr(element, "value", None) or element.proto.body) for kind in kinds for element in kind)


def fine(page):
    assert not page.exception, page.exception
    assert not page.error, [element.value for element in page.error]
    return page


def test_explain(environment, monkeypatch):
    monkeypatch.setattr(ui, "SHORT", 0)  # no groups, which would take seconds
    page = fine(visit("explain"))
    assert "Why ␣Arctic rather than" in text(page)  # compared with the example's other prompt
    page.get_by_key("counterfactual").set_value("").run()
    assert "Why ␣Arctic?" in text(fine(page))
    assert "Logit against all others" in text(page)
    assert len(page.dataframe[0].value) == 50
    page.get_by_key("_target").set_value(" icy").run()
    assert "Why ␣icy?" in text(fine(page))
    page.get_by_key("_contrast").set_value(" Arctic").run()
    assert "rather than ␣Arctic" in text(fine(page))
    page.get_by_key("site").set_value("head").run()
    assert "head" in page.dataframe[0].value["neuron"][0]
    page.get_by_key("map").set_value("heads").run()
    fine(page)
    page.get_by_key("target").set_value("two tokens").run()
    assert "must be one token" in page.error[0].value.replace("\\", "")
    page.get_by_key("target").set_value("").run()
    assert "target itself" in page.error[0].value  # Arctic rather than Arctic


def test_explain_and_start_show_what_groups_and_nodes_do(environment, smol):
    result = explain(smol, ICE_BEAR, counterfactual=OTHER)
    assert result.groups
    for page in map(fine, (visit("explain"), visit())):
        assert groups_html(result.groups) in text(page)
        table = page.dataframe[0].value.set_index("neuron")
        nodes = {str(node.ranked.neuron): node for node in result.nodes[:3]}
        for name in nodes.keys() & set(table.index):
            row = table.loc[[name]].iloc[0]
            assert row["raises"] == ", ".join(nodes[name].raises)
            assert row["lowers"] == ", ".join(nodes[name].lowers)


def test_groups_are_measured_once_and_for_a_long_prompt_on_a_click(environment, monkeypatch):
    calls = []
    monkeypatch.setattr(explanation, "explain_groups", lambda *arguments: calls.append(arguments) or (None, ()))
    long = "The bear " * (ui.SHORT // 2) + "lives in the"
    page = fine(visit("explain", prompt=long))
    assert not calls
    for _ in range(2):
        page.get_by_key("grouped").set_value(True).run()
        fine(page)
        assert len(calls) == 1
    fine(visit("explain", prompt="A bear lives in the"))
    assert len(calls) == 2


def test_groups_are_forgotten_with_their_relevance(model):
    relevance, known = attribute(model, "ice bear", contrast="z", counterfactual="big cats"), Shared().groups
    known[relevance] = {"ffn": explain_groups(model, relevance)}
    assert known[relevance]["ffn"][1]
    assert explain_groups(model, attribute(model, "ice bear", record="last")) == (None, ())
    forgotten = weakref.ref(relevance)
    del relevance
    gc.collect()
    assert forgotten() is None
    assert not known


def test_the_url_opens_the_same_view(environment):
    page = fine(visit(view="explain", prompt="The capital of France is", target=" the"))
    assert "Why ␣the?" in text(page)
    page = fine(visit(view="neuron", neuron="L29.ffn.1342", polarity="-"))
    assert "Strongest negative sentences" in text(page)
    assert "L29.ffn.1342" in text(page)


def test_a_card_needs_no_model(environment, monkeypatch):
    def never(*args, **options):
        raise AssertionError("the model was loaded")

    ui._load.clear()
    monkeypatch.setattr(loading, "load_model", never)
    page = fine(visit(view="neuron", neuron="L29.ffn.860"))
    assert "Canad" in text(page)
    fine(visit(view="search", text="water"))


def test_a_card_says_what_the_neuron_writes_where_the_model_is_loaded(environment):
    ui.loading().join()
    page = text(fine(visit("neuron", neuron="L28.ffn.7")))
    assert WRITES in page
    assert page.count("; lowers ") >= 2 + FEW  # both polarities, and each sentence


def test_neuron(environment):
    page = fine(visit(view="neuron", neuron="L28.ffn.7"))
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
    page = fine(visit("neuron", neuron="L23.attn.309"))
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
    page = fine(visit(view="neuron", neuron="L1.ffn.3", polarity="-"))
    nearest = page.get_by_key("nearest_reads")
    assert all(Neuron.parse(name) for name in nearest.options)  # and no sign
    name = nearest.options[0]
    nearest.set_value(name).run()
    assert fine(page).get_by_key("neuron").value == name


def test_a_card_and_lists_by_relevance_say_so(tiny_store):
    tiny_store("activation")
    plain = [text(fine(visit(view="neuron", neuron="L1.ffn.3"))), text(fine(visit(view="search", how="statistics")))]
    tiny_store("relevance")
    card = fine(visit(view="neuron", neuron="L1.ffn.3"))
    assert "Sentences with the largest positive relevance" in text(card)
    assert "Strongest" not in text(card)
    assert not [button for button in card.button if button.key == "annotate"]
    statistics = fine(visit(view="search", how="statistics"))
    assert all("index is by relevance" in text(page) for page in (card, statistics))
    assert not any("index is by relevance" in before for before in plain)
    assert all(Neuron.parse(name) for name in statistics.dataframe[0].value["neuron"])
    words = fine(visit(view="search", text="bear")).dataframe[0].value
    assert words["why"].str.contains("examples by relevance").any()
    assert not words["why"].str.contains("examples (?:contain|are)").any()


@pytest.mark.parametrize("wrong", ["L99.ffn.1", "L29.q.3", "nonsense", ""])
def test_wrong_neurons(environment, wrong):
    page = visit(view="neuron")
    page.get_by_key("neuron").set_value(wrong).run()
    assert len(page.error) == 1
    assert not page.exception
    page.get_by_key("neuron").set_value("L0.ffn.0").run()
    fine(page)


def test_search(environment, smol):
    page = fine(visit(view="search", text="water"))
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


def test_steer(environment):
    page = fine(visit(view="steer"))
    page.get_by_key("example_recipe").click().run()
    page.get_by_key("tokens").set_value(3).run()
    page.get_by_key("generate").click().run()
    shown = text(fine(page))
    assert "<mark>" in shown
    assert "desert" in shown
    assert "icebear steer 'The ice bear lives in the' --edit" in shown
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
    page.get_by_key("edits").set_value("L29.ffn.860 is hot").run()
    assert "is not an edit" in page.error[0].value.replace("\\", "")


def test_the_code_it_shows_does_what_it_did(environment, smol):
    page = fine(visit(view="steer", edits="L29.ffn.860=-20", tokens="4", temperature="0.9", seed="3"))
    page.get_by_key("generate").click().run()
    result = page.session_state["generated"][1]
    python = page.code[1].value.replace("load_model('smollm2-135m')", "MODEL")
    printed = []
    exec(python, {"MODEL": smol, "print": printed.append})
    assert printed == [result.steered.text]


def test_the_neurons_of_two_prompts_side_by_side(environment):
    page = fine(visit("explain"))
    page.toggle(key="compare").set_value(True).run()
    table = fine(page).dataframe[1].value
    assert set(table["in"]) == {"both", "A", "B"}
    assert "shared" in text(page)
    assert Neuron.parse(table["neuron"][0])


def test_report(environment, tmp_path, monkeypatch):
    assert "Name a folder" in text(fine(visit("report")))
    settings = {"evaluation": "faithfulness", "model": {"name": "a <b>model</b>"}, "methods": {"gxi": "", "alti": None}}
    samples = [{"methods": {"gxi": {"x": value}}} for value in (1.0, 2.0)]
    folder = tmp_path / "ablation" / "capitals"
    folder.mkdir(parents=True)
    report.write(folder, report.Results(settings, {"x": "higher is better"}, [], {"alti": "it cannot"}, samples))
    page = fine(visit("report", folder=str(folder)))
    assert "1.500 ± 0.500 *" in str(page.get("iframe")[0].proto)
    assert "<b>model" not in str(page.get("iframe")[0].proto)
    assert visit(view="report", folder=str(tmp_path / "none")).error[0].value.count("check the path")
    monkeypatch.chdir(tmp_path)
    assert "ablation\\/capitals" in text(visit(view="report"))


def test_explanations_are_kept_in_so_many_bytes(model):
    """Long prompts push the others out, however few they are; the last one stays in any case."""

    def alive(*prompts):
        result = [
            weakref.ref(kept_for_all.relevance((prompt,), lambda: attribute(model, prompt))) for prompt in prompts
        ]
        gc.collect()
        return [selected() is not None for selected in result]

    size = attribute(model, "bear").neurons.nbytes
    kept_for_all = Shared(2 * size)
    assert alive("bear", "lion", "wolf", "hare") == [False, False, True, True]
    assert alive("wolf", "a polar bear") == [False, True]


def test_a_circuit_its_groups_and_its_checks(environment):
    page = fine(visit("circuit", contrast=" desert", nodes="10"))
    (groups,) = (choice for choice in page.get("button_group") if choice.key == "without")
    page.session_state["without"] = groups.options[0].replace("\\", "")
    page = fine(page.run())
    assert "Without this group the answer is" in text(page)
    page.toggle(key="measure").set_value(True)
    page = fine(page.run())
    (table,) = (frame.value for frame in page.dataframe)
    assert table[""].iloc[0] == "the 10 nodes"
    assert 0 < table["necessity"].iloc[0] < 1
    (send,) = (button for button in page.button if button.label == "Send this group to Steer")
    send.click()
    page.run()
    assert "@position:" in page.session_state["edits"]
    page = visit("circuit", prompt="The camel", counterfactual="The ice bear lives")
    assert "of 2 tokens" in text(page)
    assert "with the same number of tokens" in text(fine(visit("circuit", prompt="The camel")))


def test_another_prompt_to_compare_with(environment):
    page = fine(visit("explain", prompt="The ice bear lives in the", counterfactual="The wild camel lives in the"))
    output_of = " ".join(caption.value for caption in page.caption)
    assert re.search(r"remainder [+-]?0\\?\.000", output_of)
    assert "top token" in output_of
    table = next(frame.value for frame in page.dataframe if "neuron" in frame.value)
    assert "counterfactual" in table
    assert len(set(table["token"])) > 1  # ranked at every token
    alone = fine(page.get_by_key("counterfactual").set_value("").run())
    assert "Without a counterfactual" in " ".join(caption.value for caption in alone.caption)


def test_what_was_typed_stays(environment):
    page = fine(visit("explain", prompt="The camel lives in the"))
    shown(page, "search").get_by_key("text").set_value("desert").run()
    assert shown(page, "steer").get_by_key("prompt").value == "The camel lives in the"
    assert shown(page, "search").get_by_key("text").value == "desert"


def test_a_label_of_another_tab_is_kept(environment, folder):
    one = fine(visit(view="neuron", neuron="L2.ffn.2"))
    with open_store(folder / "wiki.db") as store:
        store.labels.set_own(ui.Neuron.parse("L2.ffn.2"), "theirs")
    one.get_by_key("polarity").set_value("-").run()
    assert "theirs" in text(fine(one))
    one.get_by_key("label L2.ffn.2 theirs").set_value(" ours ").run()
    with open_store(folder / "wiki.db") as store:
        assert store.labels.own(ui.Neuron.parse("L2.ffn.2"))[0] == "ours"
    assert "ours" in text(fine(one))


def test_explain_of_one_token_and_of_an_unknown_family(environment):
    fine(visit("explain", prompt="Hi"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(FAMILIES, "llama")
        ui._load.clear()
        page = fine(visit("explain", prompt="The camel"))
        assert "only tokens have relevance" in text(page)
    ui._load.clear()


@pytest.fixture
def first_visit(tiny_folder, corpus, tmp_path, monkeypatch):
    """A small model, and a store that is not there; the texts are ours, as a store is built of them."""
    set_up(monkeypatch, model=tiny_folder)
    set_up(monkeypatch, store=str(tmp_path / "none.db"))
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared(), "builds", {})
    monkeypatch.setattr("icebear.concepts.corpus.read_corpus", lambda name, limit: corpus)
    return tmp_path


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
    assert "Strongest positive sentences" in text(fine(visit("neuron")))
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
        fine(visit("neuron"))
        first = built()
        page = fine(visit("neuron"))
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
    assert "Canad" in text(visit("neuron"))  # the model itself tells


def test_start(environment):
    page = fine(visit(prompt="The camel lives in the"))
    word, table = re.search(r"<b>&rarr;  ?(.*?)</b>", text(page))[1], page.dataframe[0].value
    assert len(table) == 10
    assert "smollm2-135m" in text(page).replace("\\", "")
    page.get_by_key("try_steer").click().run()
    assert fine(page).get_by_key("edits").value == f"{table['neuron'][0]}*0"
    assert page.get_by_key("prompt").value == "The camel lives in the"
    shown(page, "talk").get_by_key("try_search").click().run()
    assert fine(page).get_by_key("text").value == word
    shown(page, "talk").get_by_key("try_explain").click().run()
    assert f"Why ␣{word}?" in text(fine(page))


def test_the_example_is_compared_with_its_other_prompt_and_no_other_one_is(environment):
    page = fine(visit())
    assert "The wild camel lives in the" in " ".join(caption.value for caption in page.caption)
    assert len(set(page.dataframe[0].value["token"])) > 1
    page.get_by_key("prompt").set_value("The opposite of hot is").run()
    assert fine(page).get_by_key("counterfactual").value == ""
    assert "Without a counterfactual" in " ".join(caption.value for caption in page.caption)


def conversation(page):
    return Chat.from_json(page.session_state["chat"])


def output_of(*contents, roles=("user", "assistant")):
    return Chat({"role": roles[at % 2], "content": content} for at, content in enumerate(contents)).to_json(None)


def test_talk(environment, smol):
    page = fine(visit(length="12"))
    page.chat_input[0].set_value("What is the capital of France? Answer in one word.").run()
    request, answer = conversation(fine(page)).messages
    assert answer["content"] == "The capital of France is Paris."
    assert page.query_params["chat"] == conversation(page).to_json(None)
    assert "Click a word" in text(page)
    page.query_params["turn"], page.query_params["span"] = "1", "5-6"
    assert "#### Why ␣Paris?" in text(fine(page.run()))
    assert "(template)" in text(page)  # greyed in the heatmap
    turns, neurons = (frame.value for frame in page.dataframe)
    own = attribute(smol, answer_of(smol, conversation(page), 1), span=(5, 6))
    assert turns["relevance"].sum() == pytest.approx(own.tokens.sum().item(), abs=1e-4)
    assert list(neurons["neuron"]) == [str(row.neuron) for row in own.top(10)]
    page.get_by_key("rather").set_value("London").run()
    assert "Why ␣Paris rather than ␣London?" in text(fine(page))
    against = attribute(smol, answer_of(smol, conversation(page), 1), contrast="London", span=(5, 6))
    wanted = [value for _, value in sorted(units(against, "turn"), key=lambda part: part[0].template)]
    assert page.dataframe[0].value["relevance"].tolist() == pytest.approx(wanted, abs=1e-4)
    page.get_by_key("talk_steer").click().run()
    assert fine(page).get_by_key("edits").value.endswith("*0")
    assert Chat.from_json(page.get_by_key("prompt").value) == Chat([request])
    page.get_by_key("tokens").set_value(2).run()
    page.get_by_key("generate").click().run()
    assert "The capital" in text(fine(page))
    assert "Why ␣Paris rather than ␣London?" in text(fine(shown(page, "talk")))
    page.get_by_key("forget").click().run()
    assert fine(page).get_by_key("try_explain")
    assert "chat" not in page.query_params


def test_an_answer_that_somebody_ended_is_kept(environment, smol):
    ids = smol.tokens_of("The capital of France")
    page = visit(chat=output_of("What is the capital of France?"))
    page.session_state["writing"] = [*ids, smol.tokenizer.eos_token_id]  # any click ends the run that writes
    page.run()
    message = conversation(fine(page)).messages[1]
    assert message == {"role": "assistant", "content": "The capital of France", "ids": ids}
    page.session_state["writing"] = []  # before the first word
    assert len(conversation(page.run()).messages) == 2


def test_a_conversation_without_an_answer_waits_for_a_click(environment):
    page = fine(visit(chat=output_of("Say yes."), length="2"))
    assert "no answer yet" in text(page)
    page.get_by_key("ask").click().run()
    assert len(conversation(fine(page)).messages[1]["ids"]) == 2


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ("[{", "JSON"),
        ("[" * 5000, "JSON"),
        ('{"a": 1}', "JSON"),
        ('[{"role": "user"}]', "content"),
        ('[{"role":"user","content":"a"},{"role":"assistant","content":"b","ids":[999999999]}]', "Token ids of"),
        ('[{"role":"user","content":"a"},{"role":"assistant","content":"b","ids":[5]}]', "text"),
    ],
)
def test_broken_links(environment, chat, reason):
    page = visit(chat=chat, turn="1", span="0-1")
    assert not page.exception
    assert reason in page.error[0].value.replace("\\", "")
    page.chat_input[0].set_value("Hi").run()
    assert not page.exception


@pytest.mark.parametrize(("turn", "span"), [("1", "3-99"), ("0", "0-1"), ("9", "0-1"), ("x", "0-1"), ("1", "x")])
def test_marks_that_are_not_there(environment, turn, span):
    page = visit(chat=output_of("Say yes.", "Yes, of course."), turn=turn, span=span)
    assert len(page.error) == 1
    assert not page.exception


def test_a_long_conversation_has_pages_and_no_link(environment):
    chat = output_of(*("ice bear " * 70, "Yes.") * 12)
    page = visit()
    page.session_state["chat"] = chat
    page = fine(shown(page, "talk"))
    assert "too long for a link" in text(page)
    assert "chat" not in page.query_params
    before = len(page.chat_message)
    page.get_by_key("show_earlier").click().run()
    assert len(fine(page).chat_message) == 2 * before
    assert Chat.from_json(chat) == conversation(page)


def test_a_model_without_a_template_says_so(first_visit):
    assert "has no chat template" in text(fine(visit())).replace("\\", "")
    page = fine(visit())
    assert not page.chat_input
    assert page.get_by_key("prompt")


def test_views_take_a_conversation(environment, smol):
    chat = output_of("What is the capital of France? Answer in one word.")
    page = fine(visit("explain", prompt=chat, target="Paris"))
    assert "Why Paris?" in text(page)
    assert "(template)" in text(page)
    page = fine(visit("steer", prompt=chat, edits="L29.ffn.860*0", tokens="3"))
    page.get_by_key("generate").click().run()
    assert "user: What is the capital" in text(fine(page))
    printed = []
    python = page.code[0].value.replace("load_model('smollm2-135m')", "MODEL")
    exec(python, {"MODEL": smol, "print": printed.append})
    assert printed == [page.session_state["generated"][1].steered.text]
    both = (output_of(f"What is the capital of {name}?", f"The capital of {name} is") for name in ("France", "Spain"))
    assert "Groups" in text(fine(visit("circuit", prompt=next(both), counterfactual=next(both), nodes="5")))
    assert "cannot be read" in visit("steer", prompt=chat[:-1]).error[0].value


def test_a_conversation_s_circuit(environment):
    page = visit(
        chat=output_of("What is the capital of France?", "The capital of France is Paris."), turn="1", span="5-6"
    )
    (field,) = (field for field in fine(page).text_input if field.label.startswith("Compared with another message"))
    field.set_value("What is the capital of Spain?").run()
    page.get_by_key("open_circuit").click().run()
    assert page.get_by_key("target").value == " Paris"
    assert (
        Chat.from_json(page.get_by_key("counterfactual").value).messages[0]["content"]
        == "What is the capital of Spain?"
    )
    assert Chat.from_json(page.get_by_key("prompt").value).messages[1]["content"] == "The capital of France is"


def test_words_to_click_on():
    assert words.words_of(("Hi", " ", "", "", "🐻", "!")) == [
        ("Hi", 0, 1), (" ", 1, 2), ("🐻", 2, 5), ("!", 5, 6),
    ]  # fmt: skip
    assert words.split(" Is it <b>'s, or not?\n") == [" Is", " it", " <", "b", ">'", "s", ",", " or", " not", "?", "\n"]
    for nasty in ("", " ", "a\n\n b", "it's well-known", "<i>", "\u202e\u05d0 x", "你好。"):
        assert "".join(words.split(nasty)) == nasty


def test_a_template_is_grey_and_does_not_count():
    html = heatmap(["<s>", "a", "<b>"], [100.0, 1.0, -2.0], (0,), (0,))
    assert html.count("#888") == 2  # its ink, and the dots of a sink
    assert "rgba(33,102,172,1.00)" in html
    assert "100.0000 (template)" in html
    assert "&lt;b&gt;" in html


def test_a_store_that_is_missing_foreign_locked_or_of_another_model(environment, folder, tmp_path, monkeypatch):
    set_up(monkeypatch, store=str(tmp_path / "none.db"))
    monkeypatch.setattr(shared(), "build", lambda *args, **options: None)
    assert "icebear index" in text(fine(visit(view="neuron")))
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    set_up(monkeypatch, store=str(tmp_path / "other.db"))
    assert "not of icebear" in visit(view="search").error[0].value
    fine(visit("explain"))  # which needs none
    set_up(monkeypatch, store=str(folder / "wiki.db"))
    monkeypatch.setattr(ui, "model", lambda: random_model(LLAMA))
    page = visit(view="neuron", neuron="L1.ffn.1")
    page.get_by_key("annotate").click().run()
    assert "is an index of" in page.error[0].value
    monkeypatch.setattr("icebear.db.sqlite.BUSY_SECONDS", 0.1)
    with open_store(folder / "wiki.db") as writer, writer.writing():
        page = fine(visit(view="neuron", neuron="L1.ffn.1"))  # readers look on
        page.get_by_key("label L1.ffn.1 ").set_value("mine").run()
        assert "Another process is writing" in page.error[0].value


def test_a_generation_that_fails(environment, monkeypatch, caplog):
    page = visit(view="steer", edits="L29.ffn.860*0")

    def fail(*args, **options):
        raise RuntimeError("out of `memory`")

    with monkeypatch.context() as broken:
        broken.setattr("icebear.app.web.steer.compare", fail)
        page.get_by_key("generate").click().run()
        assert "That failed" in page.error[0].value
    (record,) = [record for record in caplog.records if record.name == "icebear.app"]
    assert "in fail" in caplog.text
    assert str(record.exc_info[1]) == "out of `memory`"
    page.get_by_key("generate").click().run()
    fine(page)


def test_the_second_visitor_does_not_load_the_model_again(environment, monkeypatch):
    loads = []
    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *args, **options: loads.append(1) or load(*args, **options))
    ui._load.clear()
    fine(visit("explain"))
    fine(visit("talk"))
    assert len(loads) == 1


def test_steering_in_one_tab_never_leaks_into_another(smol):
    alone = smol.predict(ICE_BEAR)
    stop = threading.Event()

    def steering():
        while not stop.is_set():
            compare(smol, "The camel lives in the", ["L29.ffn.860=500"], 2)

    tab = threading.Thread(target=steering)
    tab.start()
    try:
        for _ in range(10):
            assert smol.predict(ICE_BEAR) == alone
    finally:
        stop.set()
        tab.join()


def test_a_stopped_generation_leaves_nothing_behind(smol):
    alone = smol.predict(ICE_BEAR)

    class Stop(BaseException):
        """As Streamlit ends a run."""

    def stop(count):
        if count == 5:
            raise Stop

    with pytest.raises(Stop):
        compare(smol, ICE_BEAR, ["L29.ffn.860=500"], 3, on_token=stop)
    result = []
    tab = threading.Thread(target=lambda: result.append(smol.predict(ICE_BEAR)), daemon=True)
    tab.start()
    tab.join(60)
    assert result == [alone]


def test_differences_are_marked_and_text_stays_text():
    one, other = differences("a <b> same", "a <i> same")
    assert one == "a <mark>&lt;b&gt;</mark> same"
    assert other == "a <mark>&lt;i&gt;</mark> same"
    assert differences("x", "x") == ("x", "x")
    assert ui.plain("*a* `b` :red[c] $d$ <e> [f](g)") == (r"\*a\* \`b\` \:red\[c\] \$d\$ \<e\> \[f\]\(g\)")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_with_the_command(tmp_path, sent):
    """A signal to the process that was started is enough, also from a supervisor that knows no other."""
    with started(tmp_path / "none.db") as (process, address):
        process.send_signal(sent)
        process.wait(20)
        with pytest.raises(URLError):
            for _ in range(20):
                urlopen(f"{address}/_stcore/health", timeout=2).read()
                time.sleep(0.5)


def test_a_concept_is_found_measured_and_turned(environment, few_contexts):
    """From pasted texts; what it is called is shown as it is; a mistake is a sentence."""
    page = fine(visit("concept", measured="She played an old song on the piano."))
    music, rest = (Path(__file__).parent.parent / "examples" / name for name in ("music.txt", "not-music.txt"))
    page.get_by_key("concept_with").set_value(music.read_text()).run()
    page.get_by_key("find_concept").click().run()
    assert "there are 40 and 0" in page.error[0].value.replace("\\", "")
    page.get_by_key("concept_without").set_value(rest.read_text()).run()
    page.get_by_key("concept_name").set_value("<b>music</b>").run()
    page.get_by_key("find_concept").click().run()
    output_of = text(fine(page))
    assert "\\<b\\>music" in output_of
    assert "AUROC" in output_of
    assert "rgba(" in output_of
    assert set(page.dataframe[0].value.columns) >= {"neuron", "sign", "weight"}
    page.get_by_key("concept_kl").set_value(0.1).run()
    page.get_by_key("steer_concept").click().run()
    assert "0\\.1" in text(fine(page)).partition("Strength")[2][:40]
    page.get_by_key("concept_suppress").set_value(True).run()
    assert "other settings" in text(fine(page))


def test_comparisons_are_suggested_and_one_is_taken(environment, monkeypatch):
    suggestion = Suggestion((), "The wild camel lives in the", "camel", "bear", " desert", 0.25, -3.0)
    monkeypatch.setattr(counterfactuals, "suggest_counterfactuals", lambda model, prompt: [suggestion])
    page = fine(visit("explain", prompt="The wild bear lives in the"))
    page.get_by_key("suggest").click().run()
    page.get_by_key("suggestion").set_value(suggestion.text).run()
    assert page.get_by_key("counterfactual").value == suggestion.text
    assert "Compared with" in text(fine(page))

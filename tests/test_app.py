"""The app's first view, and what all visitors share: with the real model and a small real index."""

import gc
import re
import signal
import time
import weakref
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from appview import fine, shown, text, visit
from conftest import ICE_BEAR
from serving import started

from icebear import Neuron, attribute, explain
from icebear.actmax import explanation
from icebear.actmax.explanation import explain_groups
from icebear.actmax.page import groups_html
from icebear.app.cli.verbs.demo import OTHER
from icebear.app.web import ui
from icebear.app.web.background import Shared
from icebear.concepts.attribution import counterfactuals
from icebear.concepts.attribution.counterfactuals import Suggestion
from icebear.concepts.evaluation import report
from icebear.concepts.models import loading
from icebear.concepts.models.families import FAMILIES


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
    page = fine(visit(view="neurons", neuron="L29.ffn.1342", polarity="-"))
    assert "Strongest negative sentences" in text(page)
    assert "L29.ffn.1342" in text(page)


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


def test_explain_of_one_token_and_of_an_unknown_family(environment):
    fine(visit("explain", prompt="Hi"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(FAMILIES, "llama")
        ui._load.clear()
        page = fine(visit("explain", prompt="The camel"))
        assert "only tokens have relevance" in text(page)
    ui._load.clear()


def test_start(environment):
    page = fine(visit(prompt="The camel lives in the"))
    word, table = re.search(r"<b>&rarr;  ?(.*?)</b>", text(page))[1], page.dataframe[0].value
    assert len(table) == 10
    assert "smollm2-135m" in text(page).replace("\\", "")
    page.get_by_key("try_steer").click().run()
    assert fine(page).get_by_key("edits").value == f"{table['neuron'][0]}*0"
    assert page.get_by_key("prompt").value == "The camel lives in the"
    shown(page, "chat").get_by_key("try_search").click().run()
    assert fine(page).get_by_key("text").value == word
    shown(page, "chat").get_by_key("try_explain").click().run()
    assert f"Why ␣{word}?" in text(fine(page))


def test_the_example_is_compared_with_its_other_prompt_and_no_other_one_is(environment):
    page = fine(visit())
    assert "The wild camel lives in the" in " ".join(caption.value for caption in page.caption)
    assert len(set(page.dataframe[0].value["token"])) > 1
    page.get_by_key("prompt").set_value("The opposite of hot is").run()
    assert fine(page).get_by_key("counterfactual").value == ""
    assert "Without a counterfactual" in " ".join(caption.value for caption in page.caption)


def test_the_second_visitor_does_not_load_the_model_again(environment, monkeypatch):
    loads = []
    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *args, **options: loads.append(1) or load(*args, **options))
    ui._load.clear()
    fine(visit("explain"))
    fine(visit("chat"))
    assert len(loads) == 1


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


def test_comparisons_are_suggested_and_one_is_taken(environment, monkeypatch):
    suggestion = Suggestion((), "The wild camel lives in the", "camel", "bear", " desert", 0.25, -3.0)
    monkeypatch.setattr(counterfactuals, "suggest_counterfactuals", lambda model, prompt: [suggestion])
    page = fine(visit("explain", prompt="The wild bear lives in the"))
    page.get_by_key("suggest").click().run()
    page.get_by_key("suggestion").set_value(suggestion.text).run()
    assert page.get_by_key("counterfactual").value == suggestion.text
    assert "Compared with" in text(fine(page))

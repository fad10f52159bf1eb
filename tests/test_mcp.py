"""The MCP server, used by the SDK's own client in memory, with a small model; over stdio it is in test_stopping.py."""

import copy
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from functools import partial

import anyio
import pytest
import torch
from click.testing import CliRunner
from conftest import GEMMA3, ICE_BEAR, Letters, random_model
from mcp import Client
from test_chat import MODELS
from test_tasks import make

from icebear import Chat, Concept, Model, attribute, build_index, circuit, explain, open_store, sources
from icebear.actmax.writes import PAGE_SENTENCES
from icebear.app.cli.main import main
from icebear.app.mcp import tools
from icebear.app.mcp.server import server
from icebear.app.refusals import with_arguments
from icebear.app.session import RESULTS_KEPT, Session
from icebear.concepts.answers import what_if
from icebear.concepts.answers.comparisons import Exchange
from icebear.concepts.answers.counterfactuals import Suggestion
from icebear.concepts.answers.likely_words import LikelyWord
from icebear.concepts.answers.what_if import WhatIf
from icebear.concepts.nodes.random_controls import token_removal_control
from icebear.concepts.results.ranking import Ranking
from icebear.edits import parse_edits
from icebear.evaluation.baselines import Occlusion
from icebear.explanation.explanation import Explanation, ablation_sizes
from icebear.records import RandomControl
from icebear.steering.random_edits import random_edit_control, random_edits

PROMPT, OTHER = "ice bear", "big cats"
CAMEL = "The wild camel lives in the"
TOOLS = {
    "predict": "prompt chat k max_new_tokens",
    "suggest_counterfactuals": "prompt",
    "what_if": "prompt chat k",
    "sources": "messages units max_new_tokens",
    "explain": "prompt counterfactual target contrast chat no_counterfactual",
    "attribute": "prompt target contrast counterfactual chat k",
    "rank": "prompt target contrast counterfactual site chat k",
    "compare_models": "prompt target contrast k",
    "circuit": "prompt counterfactual target contrast chat nodes",
    "neuron": "neuron k",
    "search": "text k",
    "steer": "prompt edits target contrast chat max_new_tokens",
    "flip": "prompt to source chat max_neurons",
    "concept_find": "name with_texts without_texts max_neurons",
    "concept_measure": "concept text",
    "concept_steer": "concept prompt kl suppress chat max_new_tokens",
    "more": "handle part start count",
    "save": "handle file",
}
"""Frozen: agents' prompts name them."""


def request_of(session, *calls, **options):
    """The results of calls, one after the other, of one client in memory."""

    async def run():
        async with Client(server(session), **options) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return anyio.run(run)


def json_of(session, name, /, **arguments):
    """What a tool answers."""
    (result,) = request_of(session, (name, arguments))
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


def refused(session, name, /, **arguments):
    """The sentence of an error."""
    (result,) = request_of(session, (name, arguments))
    assert result.is_error
    assert "Traceback" not in result.content[0].text
    return result.content[0].text


@pytest.fixture
def session(model, tmp_path):
    (tmp_path / "results").mkdir()
    result = Session("letters", store_path=str(tmp_path / "none.db"), folder=tmp_path / "results")
    result.model = model
    return result


@pytest.fixture
def indexed(session, corpus, tmp_path, few_draws):
    session.store_path = str(tmp_path / "wiki.db")
    with open_store(session.store_path, create=True) as store:
        build_index(session.model, corpus, store, k=4)
    return session


def test_tools_have_names_types_and_descriptions(session):
    async def listed():
        async with Client(server(session)) as client:
            return (await client.list_tools()).tools

    result = {tool.name: tool for tool in anyio.run(listed)}
    assert {name: " ".join(tool.input_schema["properties"]) for name, tool in result.items()} == TOOLS
    for name, tool in result.items():
        assert len(tool.description) > 30
        assert tool.annotations.read_only_hint is (name != "save")
        assert all({"type", "anyOf", "enum"} & set(one) for one in tool.input_schema["properties"].values())


# --- two models ---------------------------------------------------------------------------------------


def test_two_models_need_a_base_model_and_have_a_control(session, model):
    assert "--base-model" in refused(session, "compare_models", prompt=PROMPT)
    net = copy.deepcopy(model.net)
    with torch.no_grad():
        for weight in net.parameters():
            weight += 0.1 * torch.randn_like(weight)
    session.base_model = Model(net, model.tokenizer, "base")
    result = json_of(session, "compare_models", prompt=PROMPT, target="a", contrast="b", k=3)
    assert [len(result[name]) for name in ("changes", "control")] == [3, 3]
    assert json_of(session, "more", handle=result["handle"], part="changes", start=0, count=2)


# --- controls ------------------------------------------------------------------------------------------


def test_a_change_is_beyond_chance_if_none_of_twenty_draws_is_as_large():
    json_of = partial(RandomControl, "an edit", "others", "The logit", 1.0)
    large = json_of(3.0, (1.5,) * 20)
    assert (large.change, large.largest, large.as_large, large.beyond_chance) == (2.0, 0.5, 0, True)
    assert str(large).endswith("more than chance (p 0.05).")
    one = json_of(3.0, (*[1.5] * 19, -1.0))
    assert (one.as_large, one.p, one.beyond_chance) == (1, 2 / 21, False)
    assert "NOT more than chance (p 0.10), so this is no evidence" in str(one)
    few = json_of(3.0, (1.5,) * 3)
    assert (few.p, few.beyond_chance) == (0.25, None)
    assert "too few to rule out chance" in str(few)
    assert json_of(3.0, ()).beyond_chance is None
    assert json_of(3.0, (1.5, 9.0)).beyond_chance is False


def test_edits_elsewhere_are_of_other_neurons_of_the_same_layers(model):
    edits = parse_edits(["L1.ffn.3*0", "L1.ffn.3+2@last", "L1.ffn.4=1", "L0.head.2*0"])
    for drawn in random_edits(model, edits, 30):
        assert [(e.op, e.value, e.where, e.neuron.site) for e in drawn] == [
            (e.op, e.value, e.where, e.neuron.site) for e in edits
        ]
        assert [e.neuron.layer for e in drawn[:3]] == [1, 1, 1]
        assert drawn[0].neuron == drawn[1].neuron != drawn[2].neuron
        assert not {e.neuron for e in drawn} & {e.neuron for e in edits}
    assert len({drawn[0].neuron for drawn in random_edits(model, edits, 200)}) == 18  # of 20, all but two
    heads = random_edits(model, parse_edits(["L0.head.2*0"]), 20)
    others = {(layer, index) for layer in range(model.layers) for index in range(4)} - {(0, 2)}
    assert sorted((drawn[0].neuron.layer, drawn[0].neuron.index) for drawn in heads) == sorted(others)  # none twice
    too_many = [f"L{layer}.head.{head}*0" for layer, head in list(others)[:-1]]
    assert random_edits(model, parse_edits(too_many), 1) == []


def test_the_control_of_edits_is_what_the_same_edits_do_elsewhere(model):
    edits = parse_edits(["L2.ffn.3=4", "L1.ffn.5*0"])
    result = random_edit_control(model, PROMPT, edits, "z", "q", draws=3)

    def number(some):
        from icebear import steer

        with steer(model, some):
            logits = model.next_logits(PROMPT)
        return (logits[model.answer_id("z")] - logits[model.answer_id("q")]).item()

    assert result.before == pytest.approx(number([]))
    assert result.after == pytest.approx(number(edits))
    assert result.drawn == pytest.approx([number(some) for some in random_edits(model, edits, 3)])


def test_the_control_of_tokens_removes_others(model):
    relevance = attribute(model, PROMPT, contrast="z", sites=())
    result = token_removal_control(model, relevance, k=1)
    free = [place for place in range(len(PROMPT)) if place not in relevance.prompt.sinks]
    assert len(result.drawn) == len(free) - 1
    occluded = attribute(model, PROMPT, relevance.target.id, "z", method=Occlusion(), sites=())
    best = max(free, key=lambda place: relevance.tokens[place])
    assert result.before - result.after == pytest.approx(occluded.tokens[best].item(), abs=1e-5)
    others = [result.before - number for number in result.drawn]
    assert others == pytest.approx([occluded.tokens[place].item() for place in free if place != best], abs=1e-5)
    many = token_removal_control(model, attribute(model, PROMPT * 3, sites=()), k=3)
    assert len(many.drawn) == 20


# --- each tool, as the library says it -------------------------------------------------------------------


def test_what_and_why(session, model):
    result = json_of(session, "predict", prompt=PROMPT, k=3, max_new_tokens=4)
    assert [one["text"] for one in result["next"]] == [token.text for token in model.predict(PROMPT, 3)]
    assert result["continuation"] == model.generate(PROMPT, 4)
    result = json_of(session, "attribute", prompt=PROMPT, contrast="z", counterfactual=OTHER, k=3)
    relevance = attribute(model, PROMPT, contrast="z", counterfactual=OTHER)
    largest = sorted(relevance.tokens.tolist(), key=abs, reverse=True)[:3]
    assert [row["relevance"] for row in result["tokens"]] == pytest.approx(largest, rel=1e-4)
    assert {"verdict", "beyond_chance", "p"} <= set(result["control"])
    more = json_of(session, "more", handle=result["handle"], part="tokens", start=6)
    assert (more["total"], len(more["rows"])) == (8, 2)


@pytest.mark.parametrize("site", ["ffn", "attn", "head"])
@pytest.mark.parametrize("counterfactual", [None, OTHER])
def test_which_neurons_with_their_controls(session, model, site, counterfactual):
    result = json_of(session, "rank", prompt=PROMPT, contrast="z", counterfactual=counterfactual, site=site, k=2)
    sites = ("attn",) if site == "head" else (site,)
    relevance = attribute(model, PROMPT, contrast="z", counterfactual=counterfactual, sites=sites)
    best = relevance.top(2, site, position="all" if counterfactual else "last")
    assert [row["neuron"] for row in result["neurons"]] == [str(row.neuron) for row in best]
    assert result["control"]["draws"] == 20 if site != "head" else 0 < result["control"]["draws"] <= 20
    sizes = ablation_sizes(site, 2) if counterfactual else []
    assert len(result["ablation"]) == len(sizes)
    nodes = Explanation.of(model, relevance, Ranking(2, site))
    for row, node in zip(result["neurons"], nodes.nodes, strict=True):
        assert (row["raises"], row["lowers"]) == (list(node.raises), list(node.lowers))
        assert "promotes" not in row
    for row in result["ablation"]:
        assert {"sufficiency", "random_sufficiency", "necessity", "random_necessity"} <= set(row)


def test_a_ranking_of_heads_ablates_few():
    assert ablation_sizes("head", 2) == [1, 2, 5, 10]
    assert ablation_sizes("ffn", 20) == ablation_sizes(None, 20) == [20, 100, 1000]


def test_what_to_compare_with(session, monkeypatch):
    """The library's suggestions, of which the agent picks one."""
    row = Suggestion((1, 2), "big cats", "big", "ice", "z", 0.25, 1.2)
    monkeypatch.setattr(tools, "suggest_counterfactuals", lambda model, prompt: [row])
    (result,) = json_of(session, "suggest_counterfactuals", prompt=PROMPT)["counterfactuals"]
    assert result == {"text": "big cats", "word": "big", "instead_of": "ice", "answer": "z", "probability": 0.25}


def test_where_an_answer_came_from(session):
    """The library's numbers; an answer that is given is not written anew."""
    session.model = MODELS["qwen"]
    talk = [{"role": "user", "content": "Ann is in Rome. Tom ran. Eve sat. It rained. Who ran?"}]
    told = [*talk, {"role": "assistant", "content": "Tom ran."}]
    result = json_of(session, "sources", messages=told)
    [wanted] = sources(session.model, Chat(told)).sentences
    [sentence] = result["sentences"]
    assert (result["answer"], result["read_by"]) == ("Tom ran.", session.model.name)
    changes = [source["change"] for source in sentence["sources"]]
    assert changes == pytest.approx([source.change for source in wanted.leading], rel=1e-4)
    assert len(sentence["random"]["single"]) == len(wanted.random.singles)
    assert "hangs" in sentence["finding"]
    saved = json_of(session, "more", handle=result["handle"], part="sentences")
    assert saved["total"] == 1
    assert json_of(session, "sources", messages=talk, max_new_tokens=4)["sentences"]
    assert "role" in refused(session, "sources", messages=[{"content": "a"}])
    secret = [{"role": "user", "content": [{"type": "image", "path": "/etc/passwd"}, {"type": "text", "text": "a"}]}]
    assert "image" in refused(session, "sources", messages=secret)


def test_a_prompt_alone_is_explained_with_what_is_chosen_and_says_so(session, model, monkeypatch):
    """Unless none is wanted, or more than a prompt is asked."""
    z, (target,) = LikelyWord(model.tokens_of("z")[0], "z", "z", 0.25, ()), model.predict(PROMPT, 1)
    row = Exchange("ice", 1, 2, "big", (1, 2), "z", 0.25, -3.0, OTHER, z, z.token, "z", 1.0)
    explained = LikelyWord(target.id, target.text, target.text, target.probability, ())
    monkeypatch.setattr(
        tools, "exchange_words_if_short", lambda model, prompt: WhatIf(PROMPT, explained, "", True, (row,), {})
    )
    compared = json_of(session, "explain", prompt=PROMPT, counterfactual=OTHER, contrast="z")
    result = json_of(session, "explain", prompt=PROMPT)
    assert result.pop("chosen_counterfactual")["text"] == OTHER
    assert repr(OTHER) in result["summary"][0]
    assert result["summary"][1:] == compared["summary"]
    assert {**result, "summary": [], "handle": ""} == {**compared, "summary": [], "handle": ""}
    for more in ({"no_counterfactual": True}, {"target": "z"}):
        result = json_of(session, "explain", prompt=PROMPT, **more)
        assert not {"chosen_counterfactual", "alone"} & set(result)
        assert repr(OTHER) not in " ".join(result["summary"])


def test_of_a_message_alone_the_answer_is_explained_and_said(session, monkeypatch):
    session.model = MODELS["qwen"]
    asked = json_of(session, "explain", prompt="Hi bear", chat=True)
    answer = session.model.answer(Chat([{"role": "user", "content": "Hi bear"}]), 40)
    assert repr(answer.text)[1:20] in asked["summary"][0]
    assert "chat=true" not in " ".join(asked["summary"])
    monkeypatch.setattr(what_if, "is_message", lambda model, text: True)
    bare = json_of(session, "explain", prompt="Hi bear")
    assert "chat=true" in bare["summary"][0]
    assert bare["summary"][1:] == asked["summary"]


def test_of_a_long_prompt_no_words_are_exchanged_unasked(session, monkeypatch):
    looked = []
    for home in (what_if, tools):
        monkeypatch.setattr(home, "exchange_words", lambda model, prompt, *_: looked.append(prompt))
    monkeypatch.setattr(what_if, "LONGEST", 3)
    json_of(session, "explain", prompt=PROMPT)
    assert looked == []


def test_a_prompt_alone_without_a_good_counterfactual_has_its_tokens_and_effects(session, model):
    result = json_of(session, "explain", prompt=PROMPT)
    explanation = explain(model, PROMPT)
    assert result["random_effect"] == pytest.approx(explanation.random_effect, rel=1e-4)
    rows = json_of(session, "more", handle=result["handle"], part="neurons")["rows"]
    assert [row["neuron"] for row in rows] == [str(node.ranked.neuron) for node in explanation.nodes]
    assert not any("icebear explain" in line for line in result["summary"])


def test_how_together(session, model):
    result = json_of(session, "circuit", prompt=PROMPT, counterfactual=OTHER, contrast="z", nodes=8)
    graph = circuit(model, PROMPT, counterfactual=OTHER, contrast="z", nodes=8)
    assert [row["necessity"] for row in result["groups"]] == pytest.approx(
        [graph.without(group).necessity for group in graph.groups[:8]], rel=1e-3, abs=1e-4
    )
    more = json_of(session, "more", handle=result["handle"], part="edges", count=1)
    assert (more["total"], more["rows"][0]["source"]) == (len(graph.edges), graph.edges[0].source.id)
    saved = json_of(session, "save", handle=result["handle"], file="why.html")
    assert (session.folder / "why.html").stat().st_size == saved["bytes"]


def test_what_it_means(session, indexed):
    plain = json_of(session, "neuron", neuron="L1.ffn.3")
    assert plain["promotes"]
    result = json_of(indexed, "neuron", neuron="L1.ffn.3", k=2)
    assert [row["polarity"] for row in result["examples"]] == ["+", "+", "-", "-"]
    assert result["meaning"][0].startswith("+: not labeled yet")
    assert all(-1 <= result["writes"][sign]["correlation"] <= 1 for sign in "+-")
    places = json_of(indexed, "more", handle=result["handle"], part="places")["rows"]
    assert [place["polarity"] for place in places].count("-") <= PAGE_SENTENCES
    assert {"text", "activation", "raises", "lowers"} < set(places[0])
    assert "Found by similarity" in json_of(indexed, "search", text="camel", k=2)["note"]
    absent = json_of(indexed, "search", text="zxqv", k=2)
    assert absent["neurons"] == []
    assert absent["note"].startswith("No sentence of this index has 'zxqv'. Index: ")


def test_what_edits_do(session, model):
    result = json_of(session, "steer", prompt=PROMPT, edits=["L2.ffn.3=9"], target="z", max_new_tokens=3)
    assert result["plain"] == model.generate(PROMPT, 3)
    assert result["control"]["change"] == pytest.approx(
        random_edit_control(model, PROMPT, parse_edits(["L2.ffn.3=9"]), "z").change, rel=1e-4
    )
    assert result["off_target_kl"] > 0
    assert "held-out contexts" in result["side_effects"]
    there = "camel bed"
    to = model.predict(there, 1)[0].text
    result = json_of(session, "flip", prompt=PROMPT, to=to, source=there, max_neurons=40)
    assert result["steered"].startswith(to)
    assert result["reached"]
    assert (result["control"]["draws"], result["control"]["seed"]) == (20, 0)
    json_of(session, "save", handle=result["handle"], file="z.json")
    assert "icebear_recipe" in (session.folder / "z.json").read_text()


def test_concepts(session, generator):
    words = [["ice", "snow", "cold"], ["sand", "sun", "hot"]]
    texts = [[" ".join(generator.choices(some, k=6)) for _ in range(20)] for some in words]
    result = json_of(session, "concept_find", name="cold", with_texts=texts[0], without_texts=texts[1], max_neurons=3)
    assert result["auroc"] > 0.5
    measured = json_of(session, "concept_measure", concept=result["handle"], text="ice snow cold")
    assert (
        measured["value"] > json_of(session, "concept_measure", concept=result["handle"], text="hot sand sun")["value"]
    )
    steered = json_of(session, "concept_steer", concept=result["handle"], prompt="ice ", kl=0.1, max_new_tokens=4)
    assert (steered["control"]["draws"], steered["control"]["seed"]) == (20, 0)
    assert steered["reached"] is (steered["after"] > steered["before"])
    assert f"{steered['control']['as_far']} of 20 draws" in steered["control"]["verdict"]
    assert steered["control"]["change"] == pytest.approx(steered["after"] - steered["before"], rel=1e-2)
    nothing = session.keep("concept", Concept.of(session.model, "nothing", {}), {})
    assert "no neurons to steer" in refused(session, "concept_steer", concept=nothing, prompt="ice ")
    json_of(session, "save", handle=result["handle"], file="cold.json")
    again = json_of(session, "concept_measure", concept="cold.json", text="ice snow cold")
    assert again == measured


def test_numbers_are_short_and_old_results_go(session):
    assert tools.rounded({"value": 0.123456789, "rows": [{"value": 1e-9}]}) == {
        "value": 0.12346,
        "rows": [{"value": 1e-9}],
    }
    for _ in range(RESULTS_KEPT + 5):
        last = session.keep("tokens", None, {})
    assert list(session.results)[-1] == last == f"tokens-{RESULTS_KEPT + 5}"
    assert len(session.results) == RESULTS_KEPT


# --- hostile -------------------------------------------------------------------------------------------


HOSTILE = {
    "no prompt": ("predict", {"prompt": ""}),
    "a prompt that is too long": ("predict", {"prompt": "x" * 20_001}),
    "a prompt longer than the context": ("predict", {"prompt": "x" * 100, "max_new_tokens": 100}),
    "a prompt that is an object": ("predict", {"prompt": {"text": "x"}}),
    "too many rows": ("predict", {"prompt": PROMPT, "k": 10**9}),
    "a site that is none": ("rank", {"prompt": PROMPT, "site": "../x"}),
    "an edit that is code": ("steer", {"prompt": PROMPT, "edits": ["__import__('os').system('touch x')"]}),
    "no edits": ("steer", {"prompt": PROMPT, "edits": []}),
    "an edit without end": ("steer", {"prompt": PROMPT, "edits": ["L1.ffn.1=inf"]}),
    "a neuron of nowhere": ("neuron", {"neuron": "L1.ffn.1'; DROP TABLE neurons"}),
    "another prompt of another length": ("circuit", {"prompt": PROMPT, "counterfactual": "x", "contrast": "z"}),
    "a handle of nobody": ("more", {"handle": "../../etc/passwd", "part": "tokens"}),
    "a concept outside": ("concept_measure", {"concept": "../../c.json", "text": "ice"}),
    "a concept anywhere": ("concept_measure", {"concept": "/etc/passwd.json", "text": "ice"}),
    "an index that is not there": ("search", {"text": "' OR 1=1 --"}),
    "few texts": ("concept_find", {"name": "x", "with_texts": ["a"], "without_texts": ["b"]}),
    "a tool that is none": ("shell", {"command": "ls"}),
    "an argument too few": ("more", {"handle": "x"}),
}


@pytest.mark.parametrize(("name", "arguments"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_hostile_gets_an_error_and_does_nothing(session, tmp_path, monkeypatch, name, arguments):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert refused(session, name, **arguments) != f"Error executing tool {name}"  # which a crash says
    assert sorted(tmp_path.rglob("*")) == before
    assert not session.results
    assert not session.lock.statistics().locked


@pytest.mark.parametrize(
    "file",
    [
        "../a.html",
        "/tmp/a.html",
        "a.py",
        "a",
        "",
        "link/a.html",
        "link.html",
        "a\0.html",
        "there.html",
        "none/a.html",
        "x" * 190 + ".html" * 2,
    ],
)
def test_files_stay_in_the_folder_and_are_new(session, tmp_path, file):
    (session.folder / "there.html").write_text("mine")
    (session.folder / "link").symlink_to(tmp_path)
    (session.folder / "link.html").symlink_to(tmp_path / "a.html")
    handle = json_of(session, "attribute", prompt=PROMPT)["handle"]
    if "x" * 190 in file:
        file = "x" * 250 + ".html"
    assert refused(session, "save", handle=handle, file=file)
    assert (session.folder / "there.html").read_text() == "mine"
    assert sorted(path.name for path in session.folder.iterdir()) == ["link", "link.html", "there.html"]
    assert not (tmp_path / "a.html").exists()


def test_without_a_folder_there_are_no_files(session):
    handle = json_of(session, "attribute", prompt=PROMPT)["handle"]
    session.folder = None
    assert "--folder" in refused(session, "save", handle=handle, file="a.html")
    assert "--folder" in refused(session, "concept_measure", concept="a.json", text="ice")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ("[" * 10_000, "JSON"),
        ('{"icebear_concept": 2, "parts": [{"neuron": "L1.ffn.3"}]}', "cannot be read"),
        ('{"icebear_recipe": 2}', "not an icebear concept"),
    ],
)
def test_hostile_json_in_the_folder_is_refused(session, text, says):
    (session.folder / "a.json").write_text(text)
    assert says in refused(session, "concept_measure", concept="a.json", text="ice")


def test_a_crash_tells_the_agent_nothing_of_the_machine(session, monkeypatch):
    monkeypatch.setattr(type(session.model), "predict", lambda *_: 1 / 0)
    assert refused(session, "predict", prompt=PROMPT) == "Error executing tool predict"
    assert not session.lock.statistics().locked


# --- as an agent has it ---------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.real
@pytest.mark.long
def test_an_investigation_finds_the_cause_and_learns_that_a_claim_is_false(smol, few_contexts, desert, monkeypatch):
    """Which neurons, are they causal, what else breaks; one claim is of a neuron drawn at random. The flip was found
    before."""
    monkeypatch.setattr(tools, "flip", lambda *arguments, **options: desert)

    async def investigate(client):
        async def call(name, **arguments):
            result = await client.call_tool(name, arguments)
            assert not result.is_error, result.content
            return result.structured_content

        request_of = {"prompt": ICE_BEAR, "contrast": " desert"}
        which = await call("rank", **request_of, counterfactual=CAMEL, k=8)
        neurons = list(dict.fromkeys(row["neuron"] for row in which["neurons"]))
        claim = await call("steer", **request_of, edits=[f"{name}*0@last" for name in neurons], max_new_tokens=2)
        # A large edit of any neuron moves the answer: alone this looks like a cause.
        false = await call("steer", **request_of, edits=["L12.ffn.77=-20"], max_new_tokens=2)
        steered = await call("flip", prompt=ICE_BEAR, to=" desert", source=CAMEL)
        return which, claim, false, steered

    async def connected():
        async with Client(server(Session(smol.name))) as client:
            return await investigate(client)

    which, claim, false, steered = anyio.run(connected)
    largest = which["ablation"][-1]
    assert largest["random_necessity"] < 0.1 < 0.9 < largest["necessity"]
    assert claim["control"]["beyond_chance"]
    assert "more than chance (p 0.05)" in claim["control"]["verdict"]
    # The false claim passes for an agent that looks at the change only; the answer says what it is worth.
    assert abs(false["control"]["change"]) > 2
    assert not false["control"]["beyond_chance"]
    assert "NOT more than chance" in false["control"]["verdict"]
    assert "no evidence" in false["control"]["verdict"]
    assert steered["steered"].startswith(" desert")
    assert steered["control"]["beyond_chance"]
    assert steered["off_target_kl"] < false["off_target_kl"]  # what else breaks


def test_an_index_of_another_model_is_passed_over_where_none_is_needed(indexed):
    indexed.model = random_model(GEMMA3, dtype=torch.float32)
    indexed.model.tokenizer = Letters()
    assert json_of(indexed, "rank", prompt=PROMPT, k=2)["neurons"]
    assert "is an index of letters" in refused(indexed, "search", text="camel")


def test_neurons_of_a_decoder_are_switched_off_where_they_are(session):
    """Positions count from the decoder's start there."""
    session.model = make("t5", dtype=torch.float32)
    result = json_of(session, "rank", prompt=PROMPT, k=8)
    assert result["control"]["change"] != 0


def test_work_of_several_parts_goes_on_counting_to_its_end(session):
    seen = []

    async def run():
        async with Client(server(session)) as client:

            async def progress(done, total, message):
                seen.append((done, total))

            arguments = {"prompt": PROMPT, "edits": ["L2.ffn.3=9"], "max_new_tokens": 4}
            await client.call_tool("steer", arguments, progress_callback=progress)

    anyio.run(run)
    steps, totals = zip(*seen, strict=True)
    assert list(steps) == sorted(set(steps))
    assert (steps[-1], set(totals)) == (28, {28})


def test_what_is_cancelled_ends_in_the_server(session, monkeypatch):
    """Work that would go on for ever, and calls that wait for it, more than there are threads."""
    ended = []

    def endless(*args, on_progress, **arguments):
        try:
            for step in itertools.count():
                on_progress(step, None)
                time.sleep(0.01)
        finally:
            ended.append(step)

    monkeypatch.setattr(tools, "circuit", endless)

    async def run():
        async with Client(server(session)) as client:
            started = anyio.Event()

            async def progress(done, total, message):
                started.set()

            async with anyio.create_task_group() as group:
                arguments = {"prompt": PROMPT, "counterfactual": OTHER}
                group.start_soon(partial(client.call_tool, "circuit", arguments, progress_callback=progress))
                await started.wait()
                for _ in range(60):
                    group.start_soon(client.call_tool, "predict", {"prompt": PROMPT})
                await anyio.sleep(0.1)
                group.cancel_scope.cancel()
            return await client.call_tool("predict", {"prompt": PROMPT, "max_new_tokens": 1})

    assert not anyio.run(run).is_error
    assert ended


def test_without_a_preset_it_says_how_to_fetch_it_and_fetches_nothing(tmp_path, monkeypatch):
    """And a model of the hub: see tests/test_stopping.py."""
    monkeypatch.setenv("ICEBEAR_CACHE", str(tmp_path))
    assert "icebear doctor --model smollm2-135m" in refused(Session("smollm2-135m"), "predict", prompt="x")
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".safetensors", ".whl")]


def test_a_folder_that_is_not_there_is_said(tmp_path):
    done = CliRunner().invoke(main, ["mcp", "--folder", str(tmp_path / "none")])
    assert (done.exit_code, "There is no folder" in done.stderr) == (2, True)


# --- the wire -------------------------------------------------------------------------------------------

NO_MESSAGES = {
    b"garbage": (None, -32700),
    b"{": (None, -32700),
    b"[" * 100_000: (None, -32700),
    b"\xff\xfe": (None, -32700),
    b"null": (None, -32600),
    b"[]": (None, -32600),
    b'{"jsonrpc": "2.0", "id": 7}': (7, -32600),
    b'{"jsonrpc": "1.0", "id": "a", "method": "ping"}': ("a", -32600),
    b'{"jsonrpc": "2.0", "id": 9, "method": "ping", "params": {"x": "\\ud800"}}': (9, -32600),  # half of a pair
    b'{"jsonrpc": "2.0", "id": 8, "method": "no/such"}': (8, -32601),
    **{
        b'{"jsonrpc": "2.0", "id": %s, "method": "tools/list"}' % identity: (None, -32600)
        for identity in (b"null", b"1.5", b"true", b"{}", b"[1]")
    },
}


def test_what_is_no_message_is_answered(session, monkeypatch):
    """And the next one too."""
    (requests, to_server), (from_server, answers) = os.pipe(), os.pipe()
    with open(requests) as stdin, open(answers, "w") as stdout, open(from_server) as replies:
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.stdout", stdout)
        serving = threading.Thread(target=server(session).run, args=["stdio"], daemon=True)
        serving.start()
        with open(to_server, "wb", buffering=0) as messages:

            def ask(line):
                messages.write(line + b"\n")
                return json.loads(replies.readline())

            for line, (identity, code) in NO_MESSAGES.items():
                result = ask(line)
                assert (result["id"], result["error"]["code"]) == (identity, code), line[:80]
                assert "\n" not in result["error"]["message"]
            assert ask(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}') == {"jsonrpc": "2.0", "id": 1, "result": {}}
        serving.join(20)
        assert not serving.is_alive()


@pytest.mark.release
def test_the_server_ends_when_nobody_reads_its_answers():
    """Although stdin stays open, and without another request."""
    command = [sys.executable, "-m", "icebear", "mcp"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        process.stdin.flush()
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0


@pytest.mark.parametrize("name", ["rank", "suggest_counterfactuals"])
def test_tools_without_progress_are_cancelled_too(session, monkeypatch, name):
    """Between two operations of torch."""
    begun, cancelled = threading.Event(), threading.Event()

    def endless(*args, **arguments):
        until = time.monotonic() + 10
        try:
            while time.monotonic() < until:
                torch.ones(1) + 1
                begun.set()
        except BaseException:
            cancelled.set()
            raise

    monkeypatch.setattr(tools, "suggest_counterfactuals" if name != "rank" else "attribute", endless)

    async def run():
        async with Client(server(session)) as client, anyio.create_task_group() as group:
            group.start_soon(client.call_tool, name, {"prompt": PROMPT})
            await anyio.to_thread.run_sync(begun.wait, 30)
            group.cancel_scope.cancel()

    with anyio.from_thread.start_blocking_portal() as portal:
        portal.start_task_soon(run)
        assert cancelled.wait(20)


@pytest.mark.parametrize("arguments", [{"counterfactul": OTHER}, {"__class__": "x"}, {"ctx": {}}, {"self": 1}])
def test_an_unknown_argument_is_refused(session, arguments):
    text = refused(session, "rank", prompt=PROMPT, **arguments)
    assert next(iter(arguments)) in text
    assert ("Did you mean 'counterfactual'?" in text) == ("counterfactul" in arguments)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["prompt"]),
        ({"prompt": ""}, ["prompt"]),
        ({"prompt": 5, "k": "x"}, ["prompt", "k"]),
        ({"prompt": "a", "k": 99}, ["k"]),
    ],
)
def test_arguments_that_do_not_fit_get_one_line(session, arguments, names):
    text = refused(session, "predict", **arguments)
    assert [part.split(":")[0] for part in text.split("; ")] == names
    assert ("\n" in text, "http" in text) == (False, False)


def test_errors_speak_of_arguments():
    json_of = with_arguments("Give --max-neurons, or --unbounded; see --k.", ("max_neurons", "k"))
    assert json_of == "Give max_neurons, or the command line's --unbounded; see k."

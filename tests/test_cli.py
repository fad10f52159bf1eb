"""Every verb and every help example runs."""

import json
import shlex
import shutil
import sqlite3
from functools import partial

import pytest
from click.testing import CliRunner
from conftest import index_small
from few import few_of
from pages import runs_on_a_page

import icebear
from icebear import Model, open_store
from icebear.actmax.atlas import clusters, neighbor_map
from icebear.app.cli.main import main
from icebear.app.cli.stores import has_index
from icebear.app.recipes import EXAMPLE_RECIPE

pytestmark = pytest.mark.usefixtures("smol", "few_all")
RUN = CliRunner()
PROMPT = "The ice bear lives in the"


def run(*args):
    result = RUN.invoke(main, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout


def commands(text):
    """`icebear ...` lines, with their continuation lines."""
    text = text.replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip().startswith("icebear ")]


ELSEWHERE = {"--lens", "--writer", "--lens-file", "--from-neuronpedia", "--images", "--image"}
"""Options whose examples need files or servers of others, or minutes."""


@pytest.mark.parametrize(
    "verb",
    few_of(main.commands, *(main.commands.keys() - {"atlas", "export"})),
)
def test_every_verb_has_help_with_an_example_that_runs(verb, folder, monkeypatch):
    """Here, or on a page with the same options; test_browser.py and test_mcp.py start `app` and `mcp`, the demo is
    below; test_lens.py, test_lens_files.py, test_descriptions.py and test_neuronpedia_import.py have what is left out.
    Of most examples it is a page that `make dist` runs, but each change may break the default model's self-test."""
    examples = [shlex.split(line)[1:] for line in commands(main.commands[verb].help)]
    assert examples, f"{verb} has no example"
    monkeypatch.chdir(folder)
    index_small(monkeypatch)
    for module, name, count in ((neighbor_map, "EARLY", 5), (neighbor_map, "LATE", 5), (clusters, "SHUFFLES", 19)):
        monkeypatch.setattr(module, name, count)
    for words in examples:
        elsewhere = verb in ("app", "mcp", "demo") or ELSEWHERE & set(words) or runs_on_a_page(words)
        if verb == "doctor" or not elsewhere:
            run(*words)


def test_json_on_every_verb_that_prints_a_result(tiny_folder):
    data = json.loads(run("explain", PROMPT, "--number", "logit", "--json"))
    assert data["target"]["text"] == " Arctic"
    assert [round(token["relevance"], 3) for token in data["tokens"]][1] == pytest.approx(1.064, abs=1e-3)
    data = json.loads(run("rank", PROMPT, "--contrast", " desert", "--site", "ffn", "--json"))
    assert "L29.ffn.860" in [row["neuron"] for row in data["ranking"]]
    assert len(data["ranking"]) == 20
    assert json.loads(run("rank", PROMPT, "--site", "head", "--top", "3", "--json"))["ranking"][0]["activation"] is None
    assert json.loads(run("neuron", "L29.ffn.860", "--json"))["vocabulary"]["promoted"][0]["text"] == " Canada"
    facts = json.loads(run("doctor", "--model", tiny_folder, "--json"))
    assert facts["family"] == "llama"
    assert [preset["name"] for preset in facts["presets"] if preset["cached"]]
    data = json.loads(run("steer", PROMPT, "--recipe", str(EXAMPLE_RECIPE), "--max-new-tokens", "5", "--json"))
    assert data["control"]["draws"] >= 3
    assert data["control"]["verdict"]
    assert data["plain"]["first_token"] == " Arctic"
    assert data["steered"]["first_token"] == " desert"
    assert data["steered"]["text"].startswith(" desert")


def test_demo_tells_the_story(monkeypatch, desert_by_heads):
    """With what a head writes at few sentences, a flip that was found before, and short texts."""
    generated = Model._generated
    monkeypatch.setattr(Model, "_generated", lambda model, batch, n, *rest: generated(model, batch, min(n, 4), *rest))
    monkeypatch.setattr(icebear, "flip", lambda *_, **options: desert_by_heads)
    monkeypatch.setattr(icebear, "describe", partial(icebear.describe, effect_sentences=2))
    output = run("demo")
    for part in ("' Paris' 0.77", "66% of the difference", "attends to", "random other heads", "Where to go next"):
        assert part in output


def test_a_card_a_label_and_units(folder):
    store = ("--store", str(folder / "wiki.db"))
    card = json.loads(run("neuron", "L29.ffn.860", *store, "--json"))
    assert card["examples"]["+"][0]["token_text"] in card["examples"]["+"][0]["text"]
    assert card["statistics"]["max"] == card["examples"]["+"][0]["activation"]
    assert card["vocabulary"]["promoted"][0]["text"] == " Canada"
    measured = json.loads(run("neuron", "L29.ffn.860", *store, "--effects", "--json"))
    assert set(measured["writes"]) == {"+", "-"}
    assert (card["writes"], card["other_lens"]) == ({}, None)
    by_lens = {measured[name]["lens"]: measured[name] for name in ("vocabulary", "other_lens")}
    assert set(by_lens) == {"direct", "mean"}
    same = [name for name in card if name not in ("vocabulary", "other_lens", "writes")]
    assert [card[name] for name in same] == [measured[name] for name in same]
    for ours, exact in zip(*(each["promoted"][:5] for each in (card["vocabulary"], by_lens["direct"])), strict=True):
        assert (ours["text"], ours["logit"]) == (exact["text"], pytest.approx(exact["logit"], rel=2e-3))  # of float16
    run("label", "L29.ffn.860", "north <b>", *store)
    assert "north <b>" in run("neuron", "L29.ffn.860", *store)
    run("label", "L29.ffn.860", "", *store)
    assert json.loads(run("neuron", "L29.ffn.860", *store, "--json"))["label"] is None
    steered = json.loads(run("steer", PROMPT, "--edit", "L29.ffn.860=-1max", "--max-new-tokens", "2", *store, "--json"))
    results = json.loads(run("search", "water", *store, "--json"))["hits"]
    by_weights = next(hit for hit in results if hit["by"] == "weights")
    assert (by_weights["neuron"], by_weights["polarity"]) == ("L29.ffn.1342", "-")
    with open_store(folder / "wiki.db") as opened:
        shown = [opened.examples(hit["neuron"], hit["polarity"]) for hit in results if hit["by"] == "sentences"]
    assert shown
    assert all(any("water" in example.sentence.text.lower() for example in examples) for examples in shown)
    assert steered["edits"] == ["L29.ffn.860=-1max"]
    result = RUN.invoke(main, ["neuron", "L3.attn.1", *store])
    assert (result.exit_code, "L3.attn.1" in result.stderr) == (1, True)


def test_the_status_of_an_index_counts_what_it_has(folder, tmp_path):
    status = json.loads(run("index", "--status", "--store", str(folder / "wiki.db"), "--json"))["status"]
    with open_store(folder / "wiki.db") as store:
        assert status["sentences"] == store.count("sentences")
        assert (status["neurons"], status["state"]) == (46080, "complete")
    shutil.copy(folder / "wiki.db", tmp_path / "cut.db")
    with sqlite3.connect(tmp_path / "cut.db") as database:
        database.execute("DELETE FROM controls WHERE name = 'nearest'")
    status = json.loads(run("index", "--status", "--store", str(tmp_path / "cut.db"), "--json"))["status"]
    assert status["state"] == "without vectors"
    with sqlite3.connect(tmp_path / "cut.db") as database:
        database.execute("DELETE FROM icebear WHERE name = 'finished'")
    status = json.loads(run("index", "--status", "--store", str(tmp_path / "cut.db"), "--json"))["status"]
    assert status["state"] == "unfinished"
    assert RUN.invoke(main, ["index", "--status", "--store", str(tmp_path / "none.db")]).exit_code == 1
    assert not (tmp_path / "none.db").exists()


def test_a_store_with_concepts_only_is_no_index(folder, tmp_path):
    """As `concept find` makes it; the index that comes with icebear is used as before."""
    with open_store(tmp_path / "c.db", create=True) as store:
        store.concepts.set({"music": {}})
    (tmp_path / "text.db").write_text("no store")
    paths = (tmp_path / "c.db", tmp_path / "none.db", tmp_path / "text.db", folder / "wiki.db")
    assert [has_index(str(path)) for path in paths] == [False, False, True, True]

"""Claims: every kind holds where it was made and breaks where it is false; files of them, the verb, the plugin."""

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields, replace
from importlib.metadata import entry_points
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import LLAMA, Letters, random_model
from hypothesis import given
from hypothesis import strategies as st
from pages import script
from planted import CODES, COMMON, TOPICS, bare

from icebear import Chat, Edit, Model, Neuron, attribute, check, circuit, find_concept, load_model, sources, steer
from icebear.actmax.labels.kinds import Label
from icebear.app.cli.main import main
from icebear.claims import claims_files as files
from icebear.claims.claim import Claim
from icebear.claims.claims_files import append_claims, read_claims, write_claims
from icebear.claims.kind import Measured, NodeId, claimed_prompt
from icebear.claims.kinds import KINDS
from icebear.claims.kinds.edits import FlipClaim
from icebear.claims.kinds.meanings import ConceptClaim, LabelClaim
from icebear.claims.kinds.predictions import (
    AnswerClaim,
    EdgeClaim,
    EffectClaim,
    NecessityClaim,
    RelevanceClaim,
    SufficiencyClaim,
    most_relevant,
    of_graph,
    subject,
)
from icebear.claims.kinds.sources import SourceClaim
from icebear.concepts.answers.sources import effect_of_source
from icebear.concepts.circuits.circuit import contribution_shares
from icebear.errors import InputError
from icebear.models.text.answer import answer_of
from icebear.steering.outcome import outcome_of
from icebear.steering.side_effects import HeldOutContexts

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
PROMPT, OTHER = "the ice bear", "an old horse"
PAIR = {"prompt": PROMPT, "counterfactual": OTHER}


def letters(seed):
    return Model(random_model(LLAMA, dtype=torch.float32, seed=seed).net, Letters(), f"letters {seed}")


@pytest.fixture(scope="module")
def made():
    return letters(0)


@pytest.fixture(scope="module")
def relevance(made):
    return attribute(made, PROMPT, counterfactual=OTHER, sites=("ffn",))


@pytest.fixture(scope="module")
def about(made, relevance):
    return subject(made, relevance)


@pytest.fixture(scope="module")
def nodes(relevance):
    return most_relevant(relevance, "ffn", 40)


EDIT = Edit.parse("L2.ffn.3=60")


def after(model, edits=()):
    with steer(model, edits):
        return model.predict(PROMPT, 1)[0].text


@pytest.fixture(scope="module")
def claims(made, relevance, about, nodes):
    """A claim of each kind that needs no store, about a random model."""
    first = relevance.top(1, "ffn", position="all")[0]
    node = NodeId(first.neuron, first.position)
    effects = relevance.effects(1)
    order = effects.matrix[0].argsort(descending=True).tolist()
    raised, lowered = (tuple(effects.tokens[place] for place in part) for part in (order[:2], order[-2:]))
    token = max(range(len(relevance.tokens)), key=lambda place: relevance.tokens[place].item())
    to = after(made, [EDIT])
    whats = [
        AnswerClaim(PROMPT, after(made)),
        RelevanceClaim(**about, node=node),
        RelevanceClaim(**about, token=token, text=relevance.prompt.strings[token]),
        EffectClaim(**about, node=node, raises=raised, lowers=lowered),
        SufficiencyClaim(**about, nodes=nodes),
        NecessityClaim(**about, nodes=nodes),
        FlipClaim(PROMPT, to, (EDIT,), max_kl=50.0),
    ]
    return [Claim.of(made, what) for what in whats]


def test_a_claim_holds_where_it_was_made_and_in_no_other_random_model(made, claims, tmp_path):
    write_claims(tmp_path / "c.yaml", claims)
    assert list(read_claims(tmp_path / "c.yaml")) == claims
    result = check(made, tmp_path / "c.yaml")
    assert result.passed, [row.why for row in result.rows]
    for row, claim in zip(result.rows, claims, strict=True):
        assert row.measured.value == pytest.approx(claim.value, abs=1e-5)
        assert row.measured.control < claim.control_below <= claim.value
    other = check(letters(1), claims)
    assert not other.passed
    passing = [row.claim.what.kind for row in other.rows if row.verdict == "passed"]
    assert passing == []
    assert {row.to_dict()["same_model"] for row in other.rows} == {False}


def test_other_seeds_of_the_control_give_the_same_verdict(made, claims):
    for seed in range(1, 4):
        for claim in claims:
            other = replace(claim, provenance=replace(claim.provenance, seed=seed))
            assert check(made, [other]).passed, (str(claim), seed)


def test_an_edge_is_that_of_the_circuit_and_breaks_without_its_source(made, relevance, about):
    graph = circuit(made, PROMPT, counterfactual=OTHER, nodes=12, heads=False)
    places = [(node.neuron, node.position) for node in graph.nodes][::-1]
    shares = contribution_shares(made, graph.relevance, places)
    number = {node.id: len(graph.tokens) + len(places) - 1 - row for row, node in enumerate(graph.nodes)}
    number |= {token.id: token.position for token in graph.tokens}
    for edge in graph.edges:
        row = len(places) if edge.target is graph.answer else number[edge.target.id] - len(graph.tokens)
        assert shares[row, number[edge.source.id]].item() == pytest.approx(edge.contribution_share, rel=1e-3, abs=1e-5)
    drafts = [what for what, _ in of_graph(made, graph, None) if isinstance(what, EdgeClaim)]
    claims = [Claim.of(made, what) for what in drafts]
    assert claims
    assert check(made, claims).passed
    silenced = letters(0)
    with torch.no_grad():
        for claim in claims:
            neuron = claim.what.source.neuron
            silenced.layer_modules[neuron.layer].mlp.down_proj.weight[:, neuron.index] = 0
    assert {row.verdict for row in check(silenced, claims).rows} == {"broken"}


def test_a_concept_separates_texts_and_breaks_without_its_neurons():
    model, words = bare(), TOPICS["song"]
    feature = torch.randn(32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for word in words:
            model.net.transformer.wte.weight[CODES[word]] = feature + 0.01 * torch.randn(32)
        for layer in (model.net.transformer.h[0].mlp.c_fc,):
            layer.weight[:, 5] = 4 * feature / feature.norm()
    draw = np.random.default_rng(0)

    def texts(songs):
        rows = [
            draw.choice(COMMON, 9).tolist() + draw.choice(words if songs else COMMON, 3).tolist() for _ in range(40)
        ]
        return [" ".join(row) + "." for row in rows]

    examples, others = texts(True), texts(False)
    concept = find_concept(model, examples, others, "song", sites=("ffn",), max_neurons=1)
    ((what, _),) = ConceptClaim.of(concept)
    assert isinstance(what, ConceptClaim)
    chosen = {*what.examples, *what.others}
    assert len(chosen) == sum(concept.provenance["tested_on"])
    claim = Claim.of(model, what)
    assert claim.value == pytest.approx(concept.provenance["auroc"])
    assert check(model, [claim]).passed
    with torch.no_grad():
        for part in concept.parts:
            model.net.transformer.h[0].mlp.c_fc.weight[:, part.neuron.index] = 0
    assert check(model, [claim]).rows[0].verdict == "broken"


def test_what_cannot_fail_is_refused(made, about, nodes, relevance, tmp_path):
    with pytest.raises(InputError, match="cannot fail"):
        Claim.of(made, AnswerClaim(PROMPT, "a"), measured=Measured(0.5, 0.48))
    with pytest.raises(InputError, match="cannot fail"):  # a share of nothing is no finding
        Claim.of(made, SufficiencyClaim(**about, nodes=nodes), measured=Measured(0.001, 0.0))
    with pytest.raises(InputError, match="does not hold"):
        Claim.of(made, AnswerClaim(PROMPT, "a"), measured=Measured(0.5, 0.0, broken_by="The answer is another."))
    one = attribute(made, PROMPT, "x", "y", counterfactual="the ice beat", sites=())  # all relevance is of one token
    what = RelevanceClaim(**subject(made, one), token=11, text="r")
    with pytest.raises(InputError, match="cannot fail"):
        Claim.of(made, what)
    with pytest.raises(InputError, match="No claim"):
        files.append_drafts(made, tmp_path / "c.yaml", [(what, None)])
    assert not (tmp_path / "c.yaml").exists()


def test_the_margin_is_the_larger_of_the_error_and_a_twentieth(made):
    what = AnswerClaim(PROMPT, "a")
    assert Claim.of(made, what, measured=Measured(0.8, 0.0)).threshold == pytest.approx(0.76)
    assert Claim.of(made, what, measured=Measured(0.8, 0.0, error=0.1)).threshold == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (Measured(0.5, 0.1), "passed"),
        (Measured(0.395, 0.1), "passed"),  # within the tolerance
        (Measured(0.38, 0.1), "broken"),
        (Measured(float("nan"), 0.1), "broken"),
        (Measured(0.5, 0.3), "control passes too"),
        (Measured(0.5, float("nan")), "control passes too"),
        (Measured(0.5, 0.1, broken_by="It costs too much."), "broken"),
    ],
)
def test_verdicts(made, monkeypatch, measured, verdict):
    monkeypatch.setattr(AnswerClaim, "measured", lambda self, model, seed: measured)
    result = check(made, [Claim(AnswerClaim(PROMPT, "a"), 0.4, 0.3, tolerance=0.01)])
    assert [row.verdict for row in result.rows] == [verdict]
    assert result.passed is (verdict == "passed")


def test_what_a_model_lacks_is_not_measured_and_does_not_pass(made, claims, about):
    far = RelevanceClaim(**about, node=NodeId(Neuron(29, "ffn", 3), 2))
    late = RelevanceClaim(**about, node=NodeId(Neuron(0, "ffn", 3), 55))
    other = RelevanceClaim(**about, token=3, text="elsewhere")
    result = check(made, [Claim(what, 0.1, 0.1) for what in (far, late, other)])
    assert [row.verdict for row in result.rows] == ["cannot be measured here"] * 3
    assert not result.passed
    assert check(made, [claims[0], Claim(far, 0.1, 0.1)]).passed


# --- files ---


def test_every_kind_is_written_and_read_and_in_the_schema():
    label = Label("tokens", (" zebra",))
    part = {"neuron": "L1.ffn.3", "polarity": "+", "weight": 1.0, "mean": 0.0, "std": 1.0, "max_activation": 2.0}
    lines = {
        "answer": {"prompt": [{"role": "user", "content": "Where?"}], "answer": "a"},
        "concept": {"name": "x", "parts": [part], "examples": ["a b"], "others": ["c d"]},
        "edge": {"prompt": "a", "counterfactual": "b", "source": "L1.ffn.3@2", "into": "L2.head.0@2"},
        "effect": {"prompt": "a", "node": "L1.ffn.3@2", "raises": ["x"], "number": "logit"},
        "flip": {"prompt": "a", "to": " b", "edits": ["L1.ffn.3=-20@last"], "max_kl": 1},
        "label": {"store": "a.db", "neuron": "L1.ffn.3", "polarity": "-", "text": "zebra", "by": "token"}
        | {"label": {"kind": label.kind, "items": [" zebra"]}},
        "monitor": {"name": "x", "unit": "token", "threshold": 1.5, "false_positive_rate": 0.03}
        | {"neurons": [part], "vector": None, "examples": ["a b"], "others": ["c d"]},
        "relevance": {"prompt": "a", "token": 2, "text": "x", "target": 7},
        "sufficiency": {"prompt": "a", "nodes": ["L1.ffn.3@2"], "target": " x"},
        "necessity": {"prompt": "a", "nodes": ["L1.head.3@2"], "contrast": " y"},
        "stages": {
            "prompt": "a",
            "counterfactual": "b",
            "nodes": ["L2.head.0", "L1.ffn.3"],
            "parts": ["ffn:differing"],
        },
        "source": {
            "prompt": [{"role": "user", "content": "A b. C d."}],
            "answer": "E f.",
            "sentence": "E f.",
            "source": "A b.",
            "message": 0,
            "at": 0,
            "sentence_at": 0,
        },
        "swap": {"prompt": "a", "counterfactual": "b", "head": "L2.head.0"},
        "task": {
            "nodes": ["L2.head.0", "L1.ffn.3"],
            "pairs": [{"prompt": "a", "counterfactual": "b", "target": 3, "contrast": "c", "parts": ["ffn:differing"]}],
        },
    }
    assert set(lines) == set(KINDS)
    validator = jsonschema_rs.Draft202012Validator(json.loads(script("claims_schema").text()))
    for kind, what in lines.items():
        document = {
            "icebear_claims": 1,
            "claims": [{"what": {"kind": kind, **what}, "threshold": 1, "control_below": 1}],
        }
        validator.validate(document)
        ((claim,), _) = files._parsed(json.dumps(document), "here")  # JSON is YAML
        assert type(claim.what) is KINDS[kind]
        assert files._parsed("icebear_claims: 1\nclaims:\n" + files._text([claim]), "here") == ((claim,), ())
        document["claims"][0]["what"]["more"] = 1
        assert not validator.is_valid(document)
        with pytest.raises(InputError, match="more"):
            files._parsed(json.dumps(document), "here")


def test_the_published_schema_is_that_of_the_records():
    assert (ROOT / "docs" / "claims.schema.json").read_text() == script("claims_schema").text()


def test_the_source_of_an_answer_holds_and_breaks(smol, tmp_path):
    """It breaks for an answer that hangs on another sentence, and cannot be measured for a text that is not there."""
    text = "Snow fell. Anna lives in Oslo. Eve sings. It is late. Where does Anna live?"
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Anna lives in Oslo."}]
    answer = answer_of(smol, Chat(messages), 1)
    measured = sources(smol, answer)
    claims, refused, _ = files.append_drafts(smol, tmp_path / "c.yaml", SourceClaim.of(measured, answer))
    assert not refused
    what = claims[0].what
    value = what.measured(smol)
    assert value.value == pytest.approx(-measured.sentences[0].sources[0].change, abs=1e-3)
    assert value.control == pytest.approx(-min(measured.sentences[0].random.singles), abs=1e-3)
    assert (what.source, what.message, what.at, what.sentence_at) == ("Anna lives in Oslo.", 0, 11, 0)
    assert check(smol, tmp_path / "c.yaml").passed
    eve = {"source": "Eve sings.", "at": text.index("Eve")}
    no_content = {"prompt": ({"role": "user"},)}
    wrong = ({"source": "Anna lives"}, {"message": 3}, {"at": 12}, {"sentence_at": 1}, {"at": -75}, no_content)
    for changed in (eve, *wrong):
        [row] = check(smol, [replace(claims[0], what=replace(what, **changed))]).rows
        assert row.verdict == ("broken" if changed is eve else "cannot be measured here")


@pytest.mark.release
def test_a_claim_is_about_one_of_two_equal_sentences(smol):
    """Of the context, and of the answer."""
    text = "Anna lives in Oslo. Eve sings. Anna lives in Oslo. It is late. Where does Anna live?"
    answer = "Anna lives in Oslo. She sings. Anna lives in Oslo."
    chat = Chat([{"role": "user", "content": text}, {"role": "assistant", "content": answer}])
    effect = effect_of_source(smol, chat, 0, text.rindex("Anna lives in"))
    positions = (text.rindex("Anna lives in"), answer.rindex("Anna"))
    measured = SourceClaim(chat.messages[:1], answer, "Anna lives in Oslo.", "Anna lives in Oslo.", 0, *positions)
    value = measured.measured(smol).value
    assert value == pytest.approx(-effect.sentences[2].change, abs=1e-3)
    assert value != pytest.approx(-effect.sentences[0].change, abs=1e-2)


LINE = "{what: {kind: answer, prompt: a, answer: b}, threshold: 1, control_below: 1}"
HEAD = "icebear_claims: 1\nclaims:\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "icebear_claims: 2\nclaims: []",
        "icebear_claims: 1\nclaims: {}",
        "icebear_claims: 1\nclaims: []\nmore: 1",
        "a: &a [1]\nb: *a",
        f"{HEAD}- &x {LINE}",
        "!!python/object/apply:os.system ['true']",
        f"{HEAD}- !!map {LINE}",
        "{" * 5000,
        "[" * 50_000,
        f"{HEAD}- 7",
        f"{HEAD}- {LINE.replace('threshold: 1', 'threshold: .nan')}",
        f"{HEAD}- {LINE.replace('threshold: 1', 'threshold: nan')}",
        f"{HEAD}- {LINE.replace('control_below: 1', 'control_below: .inf')}",
        f"{HEAD}- {LINE.replace('threshold: 1', 'threshold: 2026-01-01')}",
        f"{HEAD}- {LINE.replace('threshold: 1, ', '')}",
        f"{HEAD}- {LINE.replace('kind: answer', 'kind: magic')}",
        f"{HEAD}- {LINE.replace('answer: b', 'answer: no')}",
        f"{HEAD}- {LINE.replace('answer: b', 'answer: [b]')}",
        f"{HEAD}- {LINE.replace('prompt: a', 'prompt: 7')}",
        "a: 1\n\tb: 2",
        "\x00",
        "a" * 10_000_000,
    ],
)
def test_a_hostile_file_gets_a_sentence(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        read_claims(tmp_path / "c.yaml")
    assert "c.yaml" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    with pytest.raises(InputError):
        append_claims(tmp_path / "c.yaml", [Claim(AnswerClaim("a", "b"), 0.5, 0.5)])
    assert (tmp_path / "c.yaml").read_text() == text


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(), st.floats(-1e6, 1e6))
def test_any_text_is_read_as_it_was_written(prompt, answer, number):
    answer = answer.encode(errors="ignore").decode()
    claim = Claim(AnswerClaim(prompt, answer), number, number, value=number)
    assert files._parsed("icebear_claims: 1\nclaims:\n" + files._text([claim]), "here") == ((claim,), ())


def test_a_file_that_could_not_be_read_again_is_not_written(tmp_path):
    claim, path = Claim(AnswerClaim("a" * 600_000, "b"), 0.5, 0.5), tmp_path / "c.yaml"
    write_claims(path, [claim])
    with pytest.raises(InputError, match="bytes"):
        append_claims(path, [claim])
    assert read_claims(path) == (claim,)


def test_what_a_person_wrote_stays_when_claims_are_appended(tmp_path):
    claim, path = Claim(AnswerClaim("a", "b"), 0.5, 0.5), tmp_path / "c.yaml"
    path.write_text(f"# mine\n{HEAD}- {LINE}  # to be true\n")
    append_claims(path, [claim])
    assert len(read_claims(path)) == 2
    assert path.read_text().startswith(f"# mine\n{HEAD}- {LINE}  # to be true\n")
    path.write_text(f"{HEAD}    - {LINE}\n")  # in another style, which cannot be gone on with
    append_claims(path, [claim])
    assert read_claims(path)[1] == claim
    with pytest.raises(InputError, match="missing"):
        read_claims(tmp_path / "missing.yaml")


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(), st.floats(-1e6, 1e6))
def test_a_json_file_is_json_and_is_read_as_it_was_written(tmp_path_factory, prompt, answer, number):
    answer = answer.encode(errors="ignore").decode()
    claim = Claim(AnswerClaim(prompt, answer), number, number, value=number)
    path = tmp_path_factory.mktemp("json") / "c.json"
    assert [append_claims(path, [claim]) for _ in range(3)] == [0, 1, 2]
    rows = json.loads(path.read_text())["claims"]
    assert rows[0] == rows[2]
    assert rows[1]["what"]["prompt"] == prompt
    assert read_claims(path) == (claim,) * 3


def test_a_json_file_of_an_earlier_version_is_read_and_becomes_json(tmp_path):
    claim, path = Claim(AnswerClaim("a", "b"), 0.5, 0.5), tmp_path / "c.json"
    path.write_text(f"{HEAD}- {LINE}\n")
    (before,) = read_claims(path)
    assert append_claims(path, [claim]) == 1
    assert len(json.loads(path.read_text())["claims"]) == 2
    assert read_claims(path) == (before, claim)


@pytest.mark.parametrize("text", ['{"icebear_claims": 1, "icebear_claims": 1, "claims": []}', "{", "{" * 90_000, "{}"])
def test_a_file_that_is_no_json_of_claims_gets_a_sentence(tmp_path, text):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InputError, match=r"c\.json"):
        read_claims(tmp_path / "c.json")


# --- verbs and the plugin ---


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    """A file of claims of the tiny model, and a copy of it with another last layer."""
    home = tmp_path_factory.mktemp("claims")
    damaged, path = home / "damaged", home / "tiny.claims.yaml"
    model = load_model(tiny_folder, device="cpu", dtype="float32")
    with torch.no_grad():
        for parameter in model.layer_modules[-1].parameters():
            parameter.normal_(0, 1.0, generator=torch.Generator().manual_seed(3))
    model.net.save_pretrained(damaged)
    model.tokenizer.save_pretrained(damaged)
    where = ["--model", tiny_folder, "--device", "cpu", "--claim", str(path)]
    pair = [" Paris is", "--counterfactual", " Rome are"]
    for words in (
        ["rank", *pair, "--site", "ffn", "--top", "40", "--ablate", *where],
        ["explain", *pair, *where],
        ["circuit", *pair, "--nodes", "12", "--ablate", *where],
    ):
        before = len(read_claims(path)) if path.exists() else 0
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        assert (f"the {before} that it had" in done.stderr) is bool(before)
    return path, tiny_folder, str(damaged)


def test_verbs_append_claims_that_check_measures(folders):
    path, _, damaged = folders
    kinds = {claim.what.kind for claim in read_claims(path)}
    assert {"sufficiency", "necessity", "effect", "relevance", "edge"} <= kinds
    again = CliRunner().invoke(main, ["check", str(path), "--device", "cpu", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["passed"]
    broken = CliRunner().invoke(main, ["check", str(path), "--model", damaged, "--device", "cpu", "--json"])
    assert broken.exit_code == 1
    rows = json.loads(broken.stdout)["claims"]
    assert "broken" in {row["verdict"] for row in rows}
    assert len(rows) == len(read_claims(path))


@pytest.mark.parametrize(
    "words",
    [
        ["rank", "Paris is", "--base-model", "MODEL"],
        ["explain", "Paris is", "--span", "all"],
        ["explain", "Paris is", "--at", "1"],
        ["label", "L1.ffn.3", "x"],
    ],
)
def test_what_no_claim_is_about_is_refused(words, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, tiny_folder, damaged = folders
    words = [damaged if word == "MODEL" else word for word in words]
    done = CliRunner().invoke(main, [*words, "--model", tiny_folder, "--device", "cpu", "--claim", "c.yaml"])
    assert done.exit_code in (1, 2)
    assert "--claim" in done.stderr
    assert not Path("c.yaml").exists()


def test_the_plugin_makes_each_claim_a_test(folders, pytester):
    path, _, damaged = folders
    plugin = ["-p", "icebear.claims"]
    pytester.path.joinpath("tiny.claims.yaml").write_text(path.read_text())
    pytester.path.joinpath("bad.claims.yaml").write_text("claims: []")
    pytester.path.joinpath("other.yaml").write_text("claims: []")
    count = len(read_claims(path))
    good = pytester.runpytest_inprocess("-q", "tiny.claims.yaml", *plugin)
    good.assert_outcomes(passed=count)
    bad = pytester.runpytest_inprocess("-q", "tiny.claims.yaml", "--claims-model", damaged, *plugin)
    assert bad.parseoutcomes()["failed"] > 0
    assert pytester.runpytest_inprocess("-q", *plugin).ret != 0
    assert "bad.claims.yaml" in pytester.runpytest_inprocess("-q", *plugin).stdout.str()


def test_the_plugin_loads_only_when_asked_and_without_torch():
    assert not [point for point in entry_points(group="pytest11") if "icebear" in point.value]
    code = "import sys, icebear.claims; assert not {'torch', 'transformers', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_kind_is_one_class_in_one_file():
    assert LabelClaim in KINDS.values()
    for name, kind in KINDS.items():
        assert kind.kind == name
        assert kind.__doc__
        assert fields(kind)


def test_the_messages_of_a_prompt_are_claimed_and_token_ids_are_not():
    message = {"role": "user", "content": "Where?"}
    assert claimed_prompt("Where?") == "Where?"
    assert claimed_prompt(Chat([message])) == (message,)
    with pytest.raises(InputError):
        claimed_prompt([1, 2])


def test_only_a_flip_to_a_word_is_claimed(desert):
    with pytest.raises(InputError, match="--to"):
        FlipClaim.of(replace(desert, provenance={}))


@pytest.mark.release
def test_a_flip_holds_at_its_side_effects_and_breaks_without_its_neurons(smol, desert, few_contexts, monkeypatch):
    monkeypatch.setattr("icebear.claims.kinds.edits.RANDOM_DRAWS", 3)
    outcome = outcome_of(smol, desert, HeldOutContexts(smol))
    recipe = desert.noting(**outcome.provenance())
    ((what, _),) = FlipClaim.of(recipe)
    claim = Claim.of(smol, what)
    assert check(smol, [claim]).passed
    cheaper = replace(claim, what=replace(what, max_kl=outcome.off_target_kl / 2))
    assert "off-target KL" in check(smol, [cheaper]).rows[0].why
    net = deepcopy(smol.net)
    with torch.no_grad():
        for edit in desert:
            net.model.layers[edit.neuron.layer].mlp.down_proj.weight[:, edit.neuron.index] = 0
    (row,) = check(Model(net, smol.tokenizer, "silenced"), [claim]).rows
    assert row.verdict == "broken"
    assert "do not make" in row.why


def test_verbs_refuse_a_concept_and_a_flip_that_chance_does_as_well(tiny_folder, tmp_path, monkeypatch, few_contexts):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for name in ("with.txt", "without.txt"):
        rows = [" ".join(draw.choice(["A", "B", "C", "D", "is", "are"], 8)) for _ in range(40)]
        Path(name).write_text("\n".join(rows))
    where = ["--model", tiny_folder, "--device", "cpu", "--claim", "c.yaml"]
    words = ["concept", "find", "x", "--with", "with.txt", "--without", "without.txt", "--store", "s.db"]
    chance = CliRunner().invoke(main, [*words, *where])
    assert chance.exit_code == 1
    assert "cannot fail" in chance.stderr
    to = load_model(tiny_folder, device="cpu", dtype="float32").predict(" Paris is", 2)[1].text
    flipped = CliRunner().invoke(main, ["flip", " Paris is", "--to", to, "--unbounded", "--json", *where])
    assert flipped.exit_code == 1
    assert "cannot fail" in flipped.stderr
    assert json.loads(flipped.stdout)["edits"]  # the result is not lost
    assert not Path("c.yaml").exists()

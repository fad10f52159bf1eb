"""Labels: planted neurons get the right ones, chance gets none, scores equal slow reference implementations."""

import html
import json
import math
import random
import re
import shlex
import shutil
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from cattrs.errors import CattrsError
from click.testing import CliRunner
from conftest import printed, started_alone
from hypothesis import given
from hypothesis import strategies as st
from planted import CODES, COMMON, TOPICS, bare
from reference import labels as reference
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score

from benchmarks import labels as evaluation
from icebear import Model, build_index, describe, open_store, read_corpus
from icebear.actmax.index import build as index
from icebear.actmax.labels import kinds, nulls, sample, scores
from icebear.actmax.labels.auto import NEURONS_PER_BATCH, control_name, label_neurons
from icebear.actmax.labels.choice import score_parts
from icebear.actmax.labels.descriptions import score_label
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.nulls import RandomNeuronNulls
from icebear.actmax.labels.sample import Sample, prepare_samples, read_activations, split_of
from icebear.actmax.labels.sides import sides, true_share
from icebear.actmax.labels.significance import THRESHOLDS, benjamini_hochberg, most_significant
from icebear.actmax.labels.strongest import StrongestSentences
from icebear.app.cli.main import main
from icebear.app.cli.options import ModelOptions
from icebear.app.cli.tables.cards import card_report, labels_table
from icebear.app.cli.verbs.evaluate import command
from icebear.claims.kinds.meanings import LabelClaim
from icebear.concepts.passes.sites import eager
from icebear.concepts.statistics import auroc
from icebear.convert import CONVERTER
from icebear.errors import InputError, StoreError
from icebear.records import Neuron, Sentence

HEAD = Neuron(0, "head", 1)
RANDOM = [Neuron(0, "ffn", number) for number in range(40, 50)]
WORD, TOPIC, OTHER = (Neuron(0, "ffn", number) for number in (3, 4, 5))


def planted() -> Model:
    """One neuron fires on a word, one on how much of a topic stands before, one on a common word; others at random."""
    made = bare()
    with torch.no_grad():
        block = made.net.transformer.h[0]
        block.attn.c_attn.weight[6, 64] = 1  # attention is the mean over what stands before, of one feature
        block.attn.c_proj.weight[0, 8] = 8
        block.attn.c_attn.bias[16] = 4  # the other head looks for the word
        block.attn.c_attn.weight[5, 48] = 4
        tokens, positions = made.net.transformer.wte.weight, made.net.transformer.wpe.weight
        positions.zero_()
        tokens[:, 5:9] = 0
        tokens[CODES["zebra"], 5] = 20
        tokens[CODES[COMMON[0]], 7] = 20
        for word in TOPICS["song"]:
            tokens[CODES[word], 6] = 4
        for neuron, feature in ((WORD, 5), (TOPIC, 8), (OTHER, 7)):
            block.mlp.c_fc.weight[:, neuron.index] = 0
            block.mlp.c_fc.weight[feature, neuron.index] = 1
            block.mlp.c_fc.bias[neuron.index] = 0
    return made


def texts(count: int) -> list[str]:
    """Documents of a sentence, half of whose words are of its topic, of 15 one about songs."""
    draw, result = random.Random(1), []
    for _ in range(count):
        topic = TOPICS[draw.choices(list(TOPICS), (1, 7, 7))[0]]
        row = [draw.choice(topic if draw.random() < 0.5 else COMMON) for _ in range(draw.randint(6, 14))]
        result.append(" ".join(row) + ".")
    return result


SENTENCES = {"train": 150, "validation": 150, "test": 300}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(sample, "SENTENCES", SENTENCES)
    monkeypatch.setattr(nulls, "CONTROLS", 50)
    monkeypatch.setattr(sample, "TOPICS", 6)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """The planted model, and the path of its index."""
    folder = tmp_path_factory.mktemp("labels")
    (folder / "t.txt").write_text("\n".join(texts(1000)))
    model, path = planted(), folder / "l.db"
    with pytest.MonkeyPatch.context() as patch, open_store(path, create=True) as store:
        patch.setattr(index, "SHARD", 64)
        build_index(model, read_corpus(str(folder / "t.txt")), store, k=16)
    return model, path


def test_a_planted_neuron_gets_the_right_label(indexed):
    model, path = indexed
    with open_store(path) as store:
        label_neurons(model, store, [WORD, TOPIC, OTHER])
        result = store.labels.automatic([WORD, TOPIC, OTHER])
        topic, word = (result[neuron, "+"] for neuron in (TOPIC, WORD))
        assert topic.kind == "topic"
        assert topic.significant
        assert topic.score > 0.9
        assert set(topic.text.removeprefix("sentences about ").split(", ")) <= set(TOPICS["song"])
        assert (word.kind, word.text, word.by) == ("tokens", "at 'zebra'", "pattern")
        assert word.significant
        assert word.score > 0.95
        assert {meaning.text for meaning in most_significant(store.labels.all_automatic())} >= {topic.text, word.text}
        card = describe(store, TOPIC, model)
        hits = card.held_out["+"]["hits"]
        assert len(hits) == 4
        assert all(set(map(str.strip, hit.sentence.tokens)) & set(TOPICS["song"]) for hit in hits)
        assert all(split_of(hit.sentence.title) == "test" for hit in hits)
        assert f"{topic.text} ({topic.score:.2f} by {topic.by})" in html.unescape(card.to_html())


def test_a_label_is_true_at_the_strongest_sentences(indexed):
    """Counted by hand; the label of another neuron, however significant, is not shown."""
    model, path = indexed
    with open_store(path) as store:
        label_neurons(model, store, [WORD, TOPIC, OTHER])
        result = store.labels.automatic([WORD, TOPIC])
        word, topic = result[WORD, "+"], result[TOPIC, "+"]
        rows = store.examples(WORD, "+", 6)
        assert word.record["strongest"] == [sum(row.token_text.strip() == "zebra" for row in rows), 6] == [6, 6]
        strongest = StrongestSentences(store)
        for step, kind in ((0, "tokens"), (1, "before"), (-1, "after")):
            around = [row.sentence.tokens[row.token + step : row.token + step + 1] for row in rows]
            tokens = [token[0].lower() for token in around if token]
            by_hand = sum(token == tokens[0] for token in tokens)
            assert strongest.true(Label(kind, (tokens[0],)), rows).sum() == by_hand
        label = Label("topic", tuple(topic.record["label"]["items"]))
        songs = store.examples(TOPIC, "+")
        fits = dict(zip([row.sentence.id for row in songs], strongest.true(label, songs).tolist(), strict=True))
        parts = prepare_samples(model, store).values()
        of_samples = {}
        for part in parts:
            ids = (sentence.id for sentence in part.sentences)
            of_samples |= dict(zip(ids, label.degree(part) >= kinds.TOPIC_COSINE, strict=True))
        both = fits.keys() & of_samples.keys()
        assert both
        assert {sentence: fits[sentence] for sentence in both} == {sentence: of_samples[sentence] for sentence in both}
        [moved] = strongest.fitting([replace(word, neuron=OTHER)])
        assert (moved.significant, moved.record["strongest"][0] < 2) == (False, True)


def test_a_candidate_that_did_not_pass_is_not_shown(indexed, tmp_path):
    model, path = indexed
    _copy(path, tmp_path / "l.db")
    with open_store(tmp_path / "l.db") as store:
        label_neurons(model, store, RANDOM)
        candidate = next(m for m in store.labels.automatic(RANDOM).values() if m.text and not m.significant)
        card = describe(store, candidate.neuron)
    for shown in (html.unescape(card.to_html()), printed(card_report(card)), printed(labels_table([candidate]))):
        assert "no label passed" in shown
        assert candidate.text not in " ".join(shown.split())


def test_the_hint_of_a_card_without_a_label_is_a_command_that_makes_one(indexed, tmp_path, monkeypatch):
    """As typed, beside the store that the card is of."""
    model, path = indexed
    shutil.copytree(path.parent, tmp_path / "my folder")
    store = str(tmp_path / "my folder" / path.name)
    monkeypatch.setattr(ModelOptions, "load", lambda *_: model)

    def run(*words):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        return done.output

    card = ("neuron", "L0.ffn.41", "--store", store, "--model", model.name)
    _, hint = run(*card).replace("\n", " ").split("Label it: icebear ")
    words = shlex.split(hint)
    assert words[:3] == ["label", "L0.ffn.41", "--auto"]
    run(*words[: words.index(store) + 1])
    labeled = run(*card)
    assert "Label it" not in labeled
    assert "not labeled yet" not in labeled


def test_the_claim_of_a_topic_that_the_index_has_no_more_is_an_error(indexed):
    model, path = indexed
    with open_store(path) as store:
        label_neurons(model, store, [TOPIC])
        (draft, _), *_ = LabelClaim.of(str(path), [store.labels.automatic([TOPIC])[TOPIC, "+"]])
    assert draft.measured(model).value > 0.9
    with pytest.raises(InputError):
        replace(draft, label=Label("topic", ("no", "such", "topic"))).measured(model)


def test_a_head_is_labelled_by_what_it_attends_to(indexed):
    model, path = indexed
    with open_store(path) as store:
        label_neurons(model, store, [HEAD, WORD])
        head, _ = score_label(model, store, HEAD, "zebra")
        assert head.significant
        assert head.score > 0.97
        assert store.controls.get(control_name(store, heads=True))["labels"]
        x = prepare_samples(model, store)["test"]
        ids = x.ids[0]
        result = read_activations(model, x, [HEAD])[0][: len(ids)]
    with eager(model):
        weights = model.net(torch.tensor([ids]), output_attentions=True).attentions[0][0, 1].detach()
    for place in range(len(ids) - 1):
        assert result[place] == pytest.approx(weights[place + 1 :, place].mean().item(), abs=1e-5)


def test_chance_is_seldom_called_clear(indexed):
    """100 pairs a null, against thresholds of another seed: at most 8 (a twentieth is expected)."""
    model, path = indexed
    with open_store(path) as store:
        label_neurons(model, store, [WORD])
        known = store.controls.get(control_name(store))
        parts = prepare_samples(model, store, 1)
        neurons = [Neuron(0, "ffn", number) for number in range(10, 60)]
        read_of = {part: read_activations(model, x, neurons) for part, x in parts.items()}
        clear = {"shifted": 0, "other": 0}
        both = sides(parts, neurons, read_of)
        moved, known = both.shifted("another seed"), RandomNeuronNulls(known)
        for row, (shifted, own) in enumerate(zip(moved.choose(), both.choose(), strict=True)):
            clear["shifted"] += bool(moved.active[row]) and known.is_significant(shifted, 0)
            for other in known.others(own, 0, true_share(own.label, both))[:1]:
                clear["other"] += known.is_significant(score_parts(other, own.by, both.top, row), 0)
        assert max(clear.values()) <= 8


@pytest.mark.release
def test_labels_are_the_same_killed_or_not(indexed, tmp_path):
    """A killed run keeps the labels of every batch that it has scored, and the next run adds the others."""
    model, path = indexed
    neurons = [Neuron(0, "ffn", number) for number in range(2 * NEURONS_PER_BATCH)]
    result, checksums = [], set()
    for name in ("whole", "killed"):
        _copy(path, tmp_path / f"{name}.db")
        with open_store(tmp_path / f"{name}.db") as store:
            store.database.execute("DELETE FROM meanings")
    process = started_alone(_label_alone, tmp_path / "killed.db", neurons)
    deadline = time.monotonic() + 60
    with open_store(tmp_path / "killed.db") as store:
        while time.monotonic() < deadline and not store.labels.all_automatic():
            time.sleep(0.01)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        scored = store.labels.automatic(neurons)
        assert 0 < len(scored) < 4 * NEURONS_PER_BATCH
        assert {(neuron, "-") in scored for neuron, _ in scored} == {True}
    for name in ("whole", "killed"):
        with open_store(tmp_path / f"{name}.db") as store:
            label_neurons(model, store, neurons)
            result.append(store.labels.automatic(neurons))
            label_neurons(model, store, neurons)  # nothing is left to do
            checksums.add(store.checksum())
    assert len(checksums) == 1
    assert len(result[0]) == 4 * NEURONS_PER_BATCH
    assert result[0] == result[1]
    assert {key: result[1][key] for key in scored} == scored


def _copy(path, to):
    """A store with its vectors."""
    for file in (path, *path.parent.glob(f"{path.name}.*.faiss")):
        shutil.copy(file, to.with_name(file.name.replace(path.name, to.name)))


def _label_alone(path, neurons, started):
    sample.SENTENCES, nulls.CONTROLS, sample.TOPICS = SENTENCES, 50, 6
    started.set()
    with open_store(path) as store:
        label_neurons(planted(), store, neurons, on_progress=lambda *done: time.sleep(0.2))  # to be killed in time


def test_ones_own_label_is_scored(indexed):
    model, path = indexed
    with open_store(path) as store:
        right, wrong = (score_label(model, store, WORD, text)[0] for text in ("the zebra", "a courtak"))
        assert right.score > 0.97 > 0.6 > wrong.score
        assert not wrong.significant
        with pytest.raises(InputError):
            score_label(model, store, WORD, "...")
        store.labels.set_manual(WORD, "stripes", [right])
        assert describe(store, WORD).title.startswith("stripes (+ ")
        store.labels.set_manual(WORD, "")


def test_another_result_has_other_labels(indexed, tmp_path):
    """Those of fewer documents go when the index goes on to more."""
    model = indexed[0]
    (tmp_path / "t.txt").write_text("\n".join(texts(1000)))
    with open_store(tmp_path / "l.db", create=True) as store:
        build_index(model, read_corpus(str(tmp_path / "t.txt"), limit=600), store, k=4)
        label_neurons(model, store, [WORD])
        assert store.labels.all_automatic()
        build_index(model, read_corpus(str(tmp_path / "t.txt"), limit=1000), store, k=4)
        assert store.labels.all_automatic() == []
        assert store.controls.get("topics") is None


def test_search_prefers_labels_that_hold(indexed):
    model, path = indexed
    with open_store(path) as store:
        label_neurons(model, store, [WORD, TOPIC])
        text = store.labels.automatic([TOPIC])[TOPIC, "+"].text
        hit = store.search(text.split()[-1], 1)[0]
        assert (hit.neuron, hit.polarity) == (TOPIC, "+")
        assert any(why.startswith("label") for why in hit.why)
        assert store.labels.shown(TOPIC, "+").startswith(f"{text} (")
        assert store.labels.shown(Neuron(0, "ffn", 59), "+") is None


def test_too_few_documents_are_told(model, corpus, tmp_path):
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=4)
        with pytest.raises(StoreError):
            label_neurons(model, store, [Neuron(0, "ffn", 1)])


# --- reference implementations --------------------------------------------------------------------------

TIED = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40)


@given(TIED)
def test_auroc_is_the_share_of_pairs_in_order(rows):
    values, positive = np.array([x for x, _ in rows]), np.array([y for _, y in rows])
    hits, rest = values[positive], values[~positive]
    if not len(hits) or not len(rest):
        assert math.isnan(auroc(values, positive))
    else:
        pairs = [(a > b) + (a == b) / 2 for a in hits for b in rest]
        assert auroc(values, positive) == pytest.approx(np.mean(pairs))
        assert auroc(values, positive) == pytest.approx(roc_auc_score(positive, values))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_accepted_is_benjamini_and_hochberg(p):
    ranked = sorted(p)
    limit = max((x for rank, x in enumerate(ranked, 1) if x <= 0.1 * rank / len(p)), default=-1)
    assert benjamini_hochberg(p) == [x <= limit for x in p]


def made(lines: list[list[str]]) -> Sample:
    rows = [
        (Sentence(i, "".join(line), str(i), 0, 0, tuple(line)), [0] * len(line), len(line))
        for i, line in enumerate(lines)
    ]
    return Sample(rows, {})


LINES = st.lists(
    st.lists(st.sampled_from([" ice", " bear", "s", ".", " The", " 4"]), min_size=1, max_size=8), min_size=1, max_size=6
)


@given(LINES)
def test_detection_is_the_auroc(lines):
    lines = [[" x", *line, " x"] for line in lines] * 8
    x = made(lines)
    pieces = [piece for line in lines for piece in line]
    values = np.array([float(place % 7 + (piece == " ice")) for place, piece in enumerate(pieces)])
    top = scores.top_activations(x, values[None, x.counted])
    label = Label("tokens", (" ice",))
    order = np.argsort(np.where(x.counted, -values, np.inf), kind="stable")
    expected = [place for place in order if x.counted[place] and values[place] > 0]
    expected = expected[: max(kinds.FEWEST_TOKENS, math.ceil(kinds.TOP_TOKENS * x.counted.sum()))]
    assert np.flatnonzero(x.counted)[top.tokens[0]].tolist() == sorted(expected)
    if top.active[0]:
        slow = reference.Part(x, values)
        for by in THRESHOLDS:
            assert scores.score(label, by, top, 0) == pytest.approx(slow.score(label, by))
            assert scores.responding([label], by, top)[0, 0] == slow.raises(label, by)


@pytest.mark.parametrize("heads", [False, True])
def test_labels_of_a_batch_are_those_of_the_slow_reference(indexed, heads):
    """Every label, unit and score, of 100 sides, and of as many with shifted activations."""
    model, path = indexed
    with open_store(path) as store:
        parts = prepare_samples(model, store)
    neurons = [Neuron(0, "head" if heads else "ffn", number) for number in range(2 if heads else 50)]
    read_of = {part: read_activations(model, x, neurons) for part, x in parts.items()}
    both = sides(parts, neurons, read_of)
    for batch in (both, both.shifted("another")):
        for row, label in enumerate(batch.choose()):
            slow = {}
            for part, top in batch.top.items():
                values = np.zeros(len(top.sample), dtype=np.float32)
                values[top.sample.counted] = top.values[row]
                slow[part] = reference.Part(top.sample, values)
            if batch.active[row]:
                assert (label.label, label.by) == reference.chosen(batch.candidates, slow)[:2]
                assert label.test == pytest.approx(slow["test"].score(label.label, label.by), abs=1e-9)


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=6), st.integers(1, 6))
def test_the_largest_of_rows_are_the_first_of_a_stable_sort(rows, count):
    values = np.array(rows, dtype=float)
    for row, chosen, ranks in zip(values, scores.largest(values, count), scores.mean_ranks(values), strict=True):
        assert np.flatnonzero(chosen).tolist() == sorted(np.argsort(-row, kind="stable")[:count].tolist())
        assert ranks.tolist() == rankdata(row).tolist()


def test_labels_come_back_from_json(indexed):
    model, path = indexed
    with open_store(path) as store:
        x = prepare_samples(model, store)["train"]
    labels = [Label("tokens", (" zebra", "nope")), *(Label("topic", words) for words in x.topics)]
    assert len(labels) > 1
    for label in labels:
        assert CONVERTER.structure(json.loads(json.dumps(CONVERTER.unstructure(label))), Label) == label
        assert label.true(x).shape == (len(x),)
        assert label.degree(x).shape == (len(x.ids),)
    pieces = [piece for sentence in x.sentences for piece in sentence.tokens]
    assert labels[0].true(x).tolist() == [piece == " zebra" for piece in pieces]
    with pytest.raises(CattrsError):
        CONVERTER.structure({"kind": "n-gram", "items": [" ice"]}, Label)


def test_reading_is_what_a_whole_pass_has(indexed):
    model, path = indexed
    with open_store(path) as store:
        x = prepare_samples(model, store)["train"]
    result = read_activations(model, x, [WORD, Neuron(0, "attn", 3)])
    seen = []
    hook = model.site_module("ffn", 0).register_forward_pre_hook(lambda _, args: seen.append(args[0][0, :, 3]))
    for ids in x.ids[:20]:
        model.net(torch.tensor([ids]))
    hook.remove()
    assert result[0, : x.ends[19]] == pytest.approx(torch.cat(seen).detach().numpy(), abs=1e-5)


# --- as commands ----------------------------------------------------------------------------------------


@pytest.fixture
def run(indexed, monkeypatch, tmp_path):
    """A verb on the planted model and a copy of its store."""
    model, path = indexed
    _copy(path, tmp_path / "l.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ModelOptions, "load", lambda self, name=None: model)

    def verb(*words):
        result = CliRunner().invoke(main, [*words, "--store", "l.db"])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    return verb


def test_labels_are_made_and_told_by_commands(run):
    assert "sentences about song" in run("label", "--auto", str(TOPIC), str(OTHER))
    output = json.loads(run("label", "--auto", str(TOPIC), "--json"))["meanings"]
    assert [(row["neuron"], row["polarity"]) for row in output] == [(str(TOPIC), "+"), (str(TOPIC), "-")]
    assert "sentences about song" in run("neuron", "--significant")
    assert json.loads(run("neuron", "--significant", "--json"))["tried"] >= 4
    card = run("neuron", str(TOPIC), "--top", "2")
    assert "Polarity +: sentences about song" in card
    assert "Hits: maximally activating tokens" in card
    known = json.loads(run("rank", "the old zebra", "--site", "ffn", "--by", "absolute", "--top", "60", "--json"))[
        "meanings"
    ]
    texts = {row["polarity"]: row["text"] for row in output}
    assert [texts[row["polarity"]] == row["text"] for row in known if row["neuron"] == str(TOPIC)] == [True]
    assert "sentences about song" in run("search", output[0]["text"].split()[-1])
    assert "'zebra'" in run("label", str(WORD), "zebra", "--score")
    assert re.search(r"zebra \(.*\+ 1\.00", run("neuron", str(WORD)))
    run("label", "--auto", str(HEAD))
    assert "from 'zebra' (" in run("neuron", str(HEAD))


def test_the_text_of_a_label_may_look_like_a_neuron_of_another_model(run):
    run("label", str(WORD), "dates/12/2020")
    assert "dates/12/2020" in run("neuron", str(WORD))


def test_a_claim_of_a_label_breaks_where_its_neuron_is_another_one(run, indexed):
    from icebear import check
    from icebear.claims.claims_files import read_claims

    model, _ = indexed
    run("label", str(WORD), "zebra", "--score", "--claim", "c.yaml")
    run("label", "--auto", str(TOPIC), "--claim", "c.yaml")
    claims = read_claims("c.yaml")
    assert {claim.what.neuron for claim in claims} == {WORD, TOPIC}
    assert check(model, claims).passed
    assert max(claim.value for claim in claims) > 0.95
    other = planted()
    with torch.no_grad():
        other.net.transformer.h[0].mlp.c_fc.weight[:, [WORD.index, TOPIC.index]] = 0
    assert {row.verdict for row in check(other, claims).rows} == {"broken"}


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["L0.ffn.3"],
        ["--auto"],
        ["--auto", "L0.ffn.3", "--all"],
        ["L0.ffn.3", " ", "--score", "--claim", "c.yaml"],
    ],
)
def test_a_label_command_that_says_too_little_or_too_much(words):
    assert CliRunner().invoke(main, ["label", *words]).exit_code == 2


def test_labels_are_evaluated(run, tmp_path):
    words = ["--neurons", "6", "--out", "out", "--store", "l.db"]
    result, again = (CliRunner().invoke(command(evaluation.Labels), words) for _ in range(2))
    assert result.exit_code == 0, (result.output, result.exception)
    text = result.stdout
    assert text == again.stdout  # from what was kept
    assert "circular" in text
    result = json.loads((tmp_path / "out" / "first third" / "results.json").read_text())
    for pair in result["samples"]:
        assert set(pair["methods"]) == set(evaluation.METHODS)
        assert all(set(numbers) == set(evaluation.METRICS) for numbers in pair["methods"].values())

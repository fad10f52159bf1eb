"""Concepts: found from examples, measured, turned at a price, kept, compared."""

import itertools
import json
import math
import random
import re
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from conftest import printed
from hypothesis import example, given
from hypothesis import strategies as st
from planted import CODES, COMMON, TOPICS, bare
from sklearn.metrics import roc_auc_score
from torch.nn.functional import gelu

from benchmarks import steering as evaluation
from benchmarks import topics as latent_topics
from benchmarks.task_pairs import named
from benchmarks.topics import CONCEPTS, split_of, topics
from icebear import Concept, VectorEdit, find_concept, open_store, steer
from icebear.app.cli.main import main
from icebear.app.cli.tables.steering import concept_report, concepts_table, provenance_lines
from icebear.app.cli.verbs.evaluate import command
from icebear.app.web.steering.concepts import name_of
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS
from icebear.concepts.statistics import auroc, auroc_by_chance, auroc_error
from icebear.errors import InputError, RecipeError, StoreError
from icebear.records import Neuron, RandomControl
from icebear.steering import outcome
from icebear.steering.concept import reading
from icebear.steering.concept.concept import similar_concepts
from icebear.steering.concept.finding import choose, ranked, universal
from icebear.steering.concept.reading import read
from icebear.steering.concept.texts import prepared
from icebear.steering.outcome import concept_outcome, steer_concept
from icebear.steering.provenance import Outcome
from icebear.steering.random_edits import random_edits
from icebear.steering.side_effects import HELD_OUT_TEXTS, HeldOutContexts, strength_at

EXAMPLES = Path(__file__).parent.parent / "examples"
SONGS = [TOPICS["song"][start::3] for start in range(3)]
"""A third of a topic's words each."""
PLANTED = [Neuron(0, "ffn", number) for number in (3, 4, 5)]


def planted():
    """Three neurons, each of which fires on a third of the words of a topic."""
    made = bare()
    with torch.no_grad():
        block = made.net.transformer.h[0]
        made.net.transformer.wpe.weight.zero_()
        made.net.transformer.wte.weight[:, 5:8] = 0
        for neuron, words, feature in zip(PLANTED, SONGS, (5, 6, 7), strict=True):
            made.net.transformer.wte.weight[[CODES[word] for word in words], feature] = 20
            block.mlp.c_fc.weight[:, neuron.index] = 0
            block.mlp.c_fc.weight[feature, neuron.index] = 1
            block.mlp.c_fc.bias[neuron.index] = 0
    return made


def texts(count, songs, seed=0):
    """Sentences of common words; with songs a third of them is of one third of the topic."""
    draw, results = random.Random(f"{seed} {songs}"), []
    for _ in range(count):
        words = draw.choice(SONGS)
        row = [draw.choice(words if songs and draw.random() < 1 / 3 else COMMON) for _ in range(11)]
        results.append(" ".join([draw.choice(COMMON), *row, draw.choice(words if songs else COMMON)]) + ".")
    return results


WORDS = "football, soccer"


@pytest.mark.parametrize("words", ["", WORDS])
def test_a_score_on_sentences_that_were_chosen_by_words_says_so(words):
    tested = {"auroc": 1.0, "error": 0.0, "tested_on": [5, 5]}
    chosen = {"chosen_by_words": words} if words else {}
    concept = Concept("football", (), "m", "0", {**tested, **chosen})
    assert (repr(WORDS) in concept.about) is bool(words)
    assert (repr(WORDS) in " ".join(provenance_lines(concept))) is bool(words)
    assert Concept.from_json(concept.to_json()).about == concept.about


@pytest.mark.parametrize(
    ("words", "name"), [(WORDS, "football"), ("soup, ,meat", "soup"), (", ", "my concept"), ("co-op shop", "co-op")]
)
def test_a_concept_of_words_has_a_name_without_a_comma(words, name):
    assert name_of(words) == name


@pytest.fixture(scope="module")
def model():
    return planted()


@pytest.fixture(scope="module")
def results(model):
    return find_concept(model, texts(80, True), texts(80, False), "song", sites=("ffn",))


# --- finding --------------------------------------------------------------------------------------------


def test_a_planted_concept_is_found_exactly(results):
    assert {part.neuron for part in results.parts} == set(PLANTED)
    assert all(part.polarity == "+" for part in results.parts)
    assert results.provenance["auroc"] == 1


def test_nothing_is_chosen_on_the_texts_that_test(model, results):
    """With others in their place, of the wrong kind, it is the same concept with another score."""
    _, _, parts = prepared(texts(80, True), texts(80, False), 0)
    rows = [texts(80, kind) for kind in (True, False)]
    wrong = [texts(80, not kind, 1) for kind in (True, False)]
    swapped = [
        [theirs if part == 2 else own for own, theirs, part in zip(mine, others, of, strict=True)]
        for mine, others, of in zip(rows, wrong, np.split(parts, [80]), strict=True)
    ]
    other = find_concept(model, *swapped, "song", sites=("ffn",))
    assert [(p.neuron, p.weight, p.mean, p.std) for p in other.parts] == [
        (p.neuron, p.weight, p.mean, p.std) for p in results.parts
    ]
    assert other.provenance["path"] == results.provenance["path"]
    assert other.provenance["auroc"] == 0
    assert results.provenance["tested_on"] == [20, 20]


@pytest.mark.release
def test_shuffled_texts_give_no_concept(model):
    """The whole way on texts whose kinds were drawn by chance is at chance on the last part."""
    scores = []
    for seed in range(12):
        rows = texts(80, False, seed) + texts(80, True, seed)
        random.Random(seed).shuffle(rows)
        scores.append(find_concept(model, rows[:80], rows[80:], sites=("ffn",), seed=seed).provenance["auroc"])
    assert abs(np.mean(scores) - 0.5) < 0.1


def test_sizes_that_are_tried_grow_by_steps_that_never_shrink():
    """So that the smallest set that is good enough is never missed by more than the next step."""
    draw = np.random.default_rng(0)
    parts = [(draw.normal(size=(40, 150)), np.arange(40) < 20) for _ in range(2)]
    _, tried = choose(np.arange(150), np.ones(150), *parts, 120, 0)
    sizes = [len(choice.columns) for choice in tried if choice.weighting == "means"]
    steps = np.diff([0, *sizes[:-1]])
    assert (sizes[0], sizes[-1]) == (1, 120)
    assert (np.diff(steps) >= 0).all()
    assert max(later / earlier for earlier, later in itertools.pairwise(sizes)) <= 2


def test_universal_neurons_are_left_out():
    values = np.random.default_rng(0).normal(size=(50, 2000))
    values[:, 7] += 50
    values[:20, 9] -= 60  # in less than most texts
    assert np.flatnonzero(universal(values)).tolist() == [7]


def test_columns_are_ranked_by_the_size_of_their_difference_without_the_excluded_ones():
    generator = np.random.default_rng(0)
    x, positive = generator.standard_normal((40, 9)), np.arange(40) % 3 == 0
    excluded = np.zeros(9, bool)
    excluded[[2, 5]] = True
    order, weights = ranked(x, positive, excluded)
    slow = [x[positive, n].mean() - x[~positive, n].mean() for n in range(9)]
    assert weights == pytest.approx(slow)
    assert order.tolist() == sorted({*range(9)} - {2, 5}, key=lambda n: -abs(slow[n]))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=20))
def test_auroc_counts_pairs(rows):
    values, positive = (np.array(part) for part in zip(*rows, strict=True))
    if 0 < positive.sum() < len(positive):
        pairs = [(a > b) + (a == b) / 2 for a in values[positive] for b in values[~positive]]
        assert auroc(values, positive) == pytest.approx(np.mean(pairs)) == roc_auc_score(positive, values)


def test_the_error_of_an_auroc_is_what_draws_give():
    draw = np.random.default_rng(0)
    positive = np.arange(60) < 30
    scores = [auroc(draw.normal(size=60) + positive, positive) for _ in range(2000)]
    assert auroc_error(float(np.mean(scores)), 30, 30) == pytest.approx(np.std(scores), rel=0.1)


@pytest.mark.parametrize(
    ("with_", "without", "text"),
    [
        (texts(3, True), texts(80, False), "16"),
        (texts(40, True), texts(40, True), "40"),
        (["the"] * 40, ["a"] * 40, "16"),
        ([f"{word}" for word in TOPICS["song"][:20]], texts(40, False), TOPICS["song"][0]),
    ],
)
def test_bad_texts_are_told(model, with_, without, text):
    with pytest.raises(InputError, match=text):
        find_concept(model, with_, without)


def test_a_concept_has_at_least_one_neuron(model):
    with pytest.raises(InputError, match="not 0"):
        find_concept(model, texts(20, True), texts(20, False), max_neurons=0)


# --- measuring ------------------------------------------------------------------------------------------


def test_a_value_is_what_a_slow_reference_gives(model, results):
    """Standardised activations, weighed, token by token; a text's value is their mean."""
    text = texts(1, True, 7)[0]
    seen = read(model, [text], [part.neuron for part in results.parts])
    reference = sum(
        part.weight * part.sign * (mean - part.mean) / part.std
        for part, mean in zip(results.parts, seen.means[0], strict=True)
    )
    measured = results.measure(model, text)
    assert measured.value == pytest.approx(reference, rel=1e-5)
    assert measured.value == pytest.approx(np.mean(measured.values[1:]))
    assert measured.values[0] == 0
    assert measured.excluded == (0,)
    assert "".join(measured.tokens).strip() == text
    songs = [word.strip() in TOPICS["song"] for word in measured.tokens]
    output = [value for value, song in zip(measured.values, songs, strict=True) if song]
    assert min(output[1:] or output) > max(v for v, song in zip(measured.values, songs, strict=True) if not song)


def test_the_unit_is_a_standard_deviation_of_the_others(model, results):
    rows, positive, part = prepared(texts(80, True), texts(80, False), 0)
    rank = [text for text, with_, number in zip(rows, positive, part, strict=True) if number == 0 and not with_]
    values = [one.value for one in results.measures(model, rank)]
    assert np.mean(values) == pytest.approx(0, abs=1e-4)
    assert np.std(values) == pytest.approx(1, rel=1e-4)


def test_weights_scale_measures(model, results):
    text = texts(1, True, 3)[0]
    assert (2 * results).measure(model, text).value == pytest.approx(2 * results.measure(model, text).value)


def test_a_page_escapes_what_it_shows(model, results):
    hostile = Concept.of(model, "<script>", {("L0.ffn.3", "+"): 1.0})
    page = hostile.measure(model, texts(1, True)[0]).to_html()
    assert "<script>" not in page.split("</title>")[1]
    assert "<script>" not in hostile._repr_html_()
    assert "not measured on other texts" in hostile.about
    shown = results._repr_html_()
    assert f"AUROC {results.provenance['auroc']:.2f}" in shown
    assert all(str(part.neuron) in shown for part in results.parts)
    assert results.to_frame().weight.tolist() == [part.weight for part in results.parts]


# --- turning --------------------------------------------------------------------------------------------


def test_no_strength_steers_to_the_plain_text(model, results):
    prompt = texts(1, False)[0]
    plain = model.generate(prompt, max_new_tokens=8)
    with steer(model, results.recipe(model, 0.0)):
        assert model.generate(prompt, max_new_tokens=8) == plain


@pytest.mark.parametrize(("detector", "suppress"), [("neurons", False), ("neurons", True), ("means", False)])
def test_the_outcome_of_steering_is_the_measure_of_each_text(model, results, few_contexts, detector, suppress):
    """The texts of all draws, which are rows of a batch, are those of generations on their own."""
    prompt = texts(1, True)[0]
    recipe = results.recipe(model, 0.5, suppress=suppress, detector=detector)
    comparison, outcome = steer_concept(model, results, prompt, recipe, 4)
    draws = random_edits(model, list(recipe), RANDOM_DRAWS, outcome.seed)
    written = []
    for edits in ([], list(recipe), *draws):
        with steer(model, edits):
            written.append(model.generate(prompt, max_new_tokens=4))
    before, after, *drawn = (results.measure(model, prompt + text).value for text in written)
    assert [comparison.plain.text, comparison.steered.text] == written[:2] == [outcome.plain, outcome.edited]
    control = outcome.control
    assert len(control.drawn) == RANDOM_DRAWS
    assert [control.before, control.after, *control.drawn] == pytest.approx([before, after, *drawn], abs=1e-4)
    contexts = HeldOutContexts(model)
    kls = [contexts.off_target_kl(edits) for edits in (list(recipe), draws[0])]
    assert [outcome.off_target_kl, *outcome.random_off_target_kl] == pytest.approx(kls, abs=1e-6)
    assert Outcome.of(recipe.noting(**outcome.provenance())) == outcome


@pytest.mark.parametrize(
    ("before", "after", "suppress", "drawn", "warns"),
    [
        (1.08, 0.94, False, [], True),
        (1.0, 1.0, False, [], True),
        (0.5, 0.7, True, [], True),
        (0.9, 1.0, False, [0.8, 1.1], True),
        (0.7, 0.5, True, [0.4, 0.9], True),
        (0.94, 1.08, False, [0.9, 1.0], False),
        (0.7, 0.5, True, [], False),
        (0.7, 0.5, True, [0.6], False),
    ],
)
def test_an_outcome_that_is_no_evidence_warns(before, after, suppress, drawn, warns):
    """Up when it should suppress, or down when it should not, or no further than random edits move it."""
    control = RandomControl("1 edit", "others", "cold in the text", before, after, tuple(drawn))
    assert bool(concept_outcome("cold", control, suppress, 48, ("", "")).warning) is warns


def test_an_off_target_kl_is_met(smol, few_contexts):
    concept = Concept.of(smol, "north", {(Neuron(29, "ffn", 860), "+"): 1.0, (Neuron(24, "ffn", 299), "+"): 0.5})
    contexts = HeldOutContexts(smol, HELD_OUT_TEXTS[:3])
    for kl in (0.02, 0.25):
        recipe = concept.recipe(smol, kl=kl, held_out=contexts)
        assert contexts.off_target_kl(list(recipe)) == pytest.approx(kl, rel=0.05)
        assert recipe.provenance["off_target_kl"] == pytest.approx(kl, rel=0.05)


@given(st.floats(1e-4, 2), st.floats(0.01, 30), st.floats(1.2, 3))
def test_the_strength_of_any_growing_cost_is_found(wanted, scale, power):
    strength, cost = strength_at(wanted, lambda s: 3 * math.tanh((s / scale) ** power))
    assert cost == pytest.approx(wanted, rel=0.02)
    assert 3 * math.tanh((strength / scale) ** power) == cost


@given(st.floats(1, 256))
@example(256)
def test_every_strength_up_to_256_can_be_found(strength):
    result, cost = strength_at(strength**2, lambda s: s**2, near=1e-5)
    assert (result, cost) == pytest.approx((strength, strength**2), rel=1e-5)


@pytest.mark.parametrize("suppress", [False, True])
def test_a_strength_of_one_adds_the_largest_activation_of_the_heaviest_neuron(model, few_texts, suppress):
    """And of the others by their weights; a neuron whose activations have the other sign does not move."""
    concept = Concept.of(model, "song", {("L0.ffn.3", "+"): 4.0, ("L0.ffn.4", "-"): 1.0, ("L0.ffn.5", "+"): 2.0})
    ends = [part.max_activation for part in concept.parts]
    values = [ends[0], min(ends[1], 0) / 4, ends[2] / 2]
    assert min(ends[0], ends[2]) > 0.1
    assert [edit.value for edit in concept.recipe(model, 1.0, suppress=suppress)] == pytest.approx(
        [-value if suppress else value for value in values]
    )


def test_a_concept_adds_its_difference_of_means(model, results, few_contexts):
    vector, contexts = results.detector("means"), HeldOutContexts(model)
    (edit,) = results.recipe(model, 2.0, None, "generated", 0.5, detector="means")
    assert edit == VectorEdit(vector.layer, [2 * number for number in vector.vector], "generated", 0.5)
    (suppressed,) = results.recipe(model, 2.0, detector="means", suppress=True)
    assert suppressed.vector == tuple(-number for number in edit.vector)
    recipe = results.recipe(model, kl=0.05, held_out=contexts, detector="means")
    assert contexts.off_target_kl(list(recipe)) == pytest.approx(0.05, rel=0.05)
    by_hand = Concept.of(model, "song", {("L0.ffn.3", "+"): 1.0})
    with pytest.raises(InputError):
        by_hand.recipe(model, 1.0, detector="means")


def test_an_off_target_kl_out_of_reach_is_an_error(model, results):
    costs = {}
    with pytest.raises(InputError) as raised:
        strength_at(9, lambda s: costs.setdefault(s, 1 - math.exp(-s / 9)))
    wanted, nearest, strength = map(float, re.findall(r"[\d.]+\d|\d", str(raised.value)))
    assert (wanted, nearest) == (9, pytest.approx(max(costs.values()), rel=0.01))
    assert costs[strength] == max(costs.values())
    with pytest.raises(InputError, match="not -1"):
        results.recipe(model, kl=-1)
    with pytest.raises(InputError):
        results.recipe(model)


def test_away_is_the_other_way_and_places_are_kept(model, results):
    there, suppressed = (
        results.recipe(model, 0.5, where="last", decay=0.5, suppress=suppressed) for suppressed in (False, True)
    )
    assert [edit.value for edit in there] == [-edit.value for edit in suppressed]
    assert {(edit.where, edit.decay) for edit in there} == {("last", 0.5)}


# --- kept -----------------------------------------------------------------------------------------------


def test_saved_and_loaded_is_the_same_to_the_bit(results, tmp_path):
    results.save(tmp_path / "song.json")
    assert Concept.load(tmp_path / "song.json") == results
    with open_store(tmp_path / "c.db", create=True) as store:
        store.concepts.set({"song": results.to_dict()})
        store.concepts.set({"song": results.to_dict()})
        assert Concept.from_dict(store.concepts.get("song")) == results
        assert list(store.concepts.all()) == ["song"]
        with pytest.raises(StoreError, match="'hymn'"):
            store.concepts.get("hymn")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"icebear_concept": 2}', '{"icebear_concept": 1, "parts": []}', "[" * 100_000],
)
def test_what_is_no_concept_is_told(text):
    with pytest.raises(RecipeError):
        Concept.from_json(text)


@pytest.mark.parametrize("bad", [{"std": 0}, {"weight": "nan"}, {"polarity": "?"}, {"neuron": "L0"}, {"mean": None}])
def test_a_bad_part_is_told(results, bad):
    record = json.loads(results.to_json())
    record["parts"][0] |= bad
    with pytest.raises(RecipeError):
        Concept.from_dict(record)


def test_another_models_concept_is_told(results):
    other = bare()
    with torch.no_grad():
        other.net.transformer.wte.weight.add_(1)
    for use in (lambda m: results.measure(m, "the old ship"), lambda m: results.recipe(m, 1.0)):
        with pytest.raises(InputError):
            use(other)


# --- compared -------------------------------------------------------------------------------------------


def test_concepts_that_share_neurons_are_near(model, results):
    other = Concept.of(model, "half", {(PLANTED[0], "+"): 1.0})
    assert similar_concepts(results, [other, Concept.of(model, "none", {(Neuron(0, "ffn", 50), "+"): 1.0})]) == [
        ("half", 1 / 3)
    ]


def test_by_hand_a_neuron_stands_once(model):
    for weights in ({(PLANTED[0], "+"): 1.0, (PLANTED[0], "-"): 1.0}, {(PLANTED[0], "+"): -1.0}):
        with pytest.raises(InputError):
            Concept.of(model, "twice", weights)


@pytest.mark.parametrize("bias", [0, -0.25, 3.3])  # means of -0.1 and 3.3 are rounded
def test_a_neuron_that_never_changes_is_measured_in_its_own_unit(few_texts, bias):
    constant = planted()
    maps = constant.net.transformer.h[0].mlp.c_fc
    with torch.no_grad():
        maps.weight[..., 9], maps.bias[9] = 0, bias
    (part,) = Concept.of(constant, "nothing", {("L0.ffn.9", "+"): 1.0}).parts
    assert part.mean == pytest.approx(float(gelu(torch.tensor(float(bias)))), abs=1e-3)
    assert part.std == 1


def test_a_concept_without_neurons_and_one_of_heads_are_refused(model, few_texts):
    neuron = Neuron(0, "ffn", 3)
    concept = Concept.of(model, "c", {(neuron, "+"): 1.0})
    nothing = replace(concept, parts=())
    weightless = replace(concept, parts=(replace(concept.parts[0], weight=0.0),))
    for unusable in (nothing, weightless):
        for use in (
            lambda: unusable.measure(model, "abc"),
            lambda: unusable.recipe(model, kl=0.1),
            lambda: unusable.recipe(model, strength=1.0),
        ):
            with pytest.raises(InputError):
                use()
    saved = concept.to_dict()
    for part in ({"neuron": "L0.head.3"}, {"weight": -1.0}):
        with pytest.raises(RecipeError):
            Concept.from_dict({**saved, "parts": [{**saved["parts"][0], **part}]})


@pytest.mark.parametrize(
    "provenance",
    [
        {"auroc": 0.5},
        {"auroc": "x", "error": 0.1, "tested_on": [1, 2]},
        {"auroc": 0.5, "error": 0.1, "tested_on": [1]},
        {"auroc": 0.5, "error": 0.1, "tested_on": [3, 4]},
        {
            "auroc": 0.5,
            "error": 0.1,
            "tested_on": [3, 4],
            "examples": 1,
            "others": 1,
            "path": [5, {}],
            "universal": [6],
        },
        {"found_by": ["x"]},
    ],
)
def test_a_concept_with_any_provenance_is_shown(model, few_texts, provenance):
    concept = replace(Concept.of(model, "c", {(Neuron(0, "ffn", 3), "+"): 1.0}), provenance=provenance)
    whole = {"error", "tested_on"} <= set(provenance) and isinstance(provenance["auroc"], float)
    whole = whole and len(provenance["tested_on"]) == 2
    assert ("0.50" in concept.about) == whole
    assert ("AUROC 0.500" in printed(concept_report(concept, {}))) == whole
    assert ("0.500" in printed(concepts_table([concept.to_dict()]))) == whole


def test_a_name_that_means_a_file_is_refused(tiny_folder, tmp_path):
    (tmp_path / "x.txt").write_text("The bear.")
    texts = ("--with", str(tmp_path / "x.txt"), "--without", str(tmp_path / "x.txt"))
    command = ["concept", "find", "x.json", *texts, "--model", tiny_folder, "--store", str(tmp_path / "i.db")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert ".json" in result.output
    assert not (tmp_path / "i.db").exists()


# --- the repository's topics ------------------------------------------------------------------------------


def test_topics_split_words_and_documents():
    words = {name: text.split() for name, text in CONCEPTS.items()}
    assert all(len(set(own)) == 16 and own == [word.lower() for word in own] for own in words.values())
    rows = []
    for name, number in itertools.product(("music", "war"), range(1200)):
        own = random.Random(number).choice(words[name])
        rows += [
            (f"{name} {number}", f"It has {own} in it."),
            (f"{name} {number}", f"A plain line of {name}, number {number}."),
        ]
    rows += [(f"other {number}", f"Nothing here, number {number}.") for number in range(2000)]
    results = topics(rows, ["music", "war"])
    title_of = {text: title for title, text in rows}
    for topic in results.concepts:
        assert set(topic.known).isdisjoint(topic.held_out)
        for part, sentences in topic.sentences.items():
            used, unused = (topic.held_out, topic.known) if part == "report" else (topic.known, topic.held_out)
            assert all(any(word in text for word in used) for text in sentences)
            assert not any(word in text.split() for word in unused for text in sentences)
        assert all(split_of(title_of[text]) == "report" for text in topic.silent)
    assert not any(name in title_of[text] for texts_ in results.others.values() for text in texts_ for name in words)
    with pytest.raises(InputError, match="'magic'"):
        named("magic", "concept", CONCEPTS)
    with pytest.raises(InputError, match="music"):
        topics(rows[:200], ["music"])


@pytest.mark.release
@pytest.mark.real
def test_the_wrong_sign_lowers_the_measure_of_what_is_written(smol, few_contexts):
    """Each measured by the plain model, over what begins as texts with the concept do."""
    music = Concept.load(EXAMPLES / "music.json")
    openings = [" ".join(text.split()[:6]) for text in (EXAMPLES / "music.txt").read_text().splitlines()[:4]]
    held_out = HeldOutContexts(smol, HELD_OUT_TEXTS[:4])

    def json_of(edits):
        with steer(smol, edits):
            texts = smol.generate(openings, 12, temperature=1.0, seed=0)
        return statistics.mean(row.value for row in music.measures(smol, texts))

    there, suppressed = (
        json_of(music.recipe(smol, kl=0.1, suppress=steered, held_out=held_out)) for steered in (False, True)
    )
    assert there > json_of([]) > suppressed


# --- the command line ---------------------------------------------------------------------------------------


def test_the_verbs(tiny_folder, few_contexts, tmp_path, monkeypatch):
    """Of a random model; docs/concepts.md has them with the real one."""
    lines = {
        name: [f"The {a} {verb} a {b} for the {c}." for a, b, c in itertools.product(who, what, ("queen", "crowd"))]
        for name, verb, who, what in (
            ("with", "played", ("orchestra", "pianist", "singer"), ("song", "symphony", "melody")),
            ("without", "bought", ("farmer", "teacher", "lawyer"), ("table", "ladder", "lamp")),
        )
    }
    for name, rows in lines.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(rows))
    (tmp_path / "empty.txt").write_text("\n")
    files = {name: str(tmp_path / f"{name}.txt") for name in ("with", "without", "empty")}
    store, model = ["--store", str(tmp_path / "c.db")], ["--model", tiny_folder]

    def run(*words, code=0):
        result = CliRunner().invoke(main, ["concept", *words, *store])
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr

    assert "No concepts yet" in run("list")
    assert "AUROC" in run("find", "music", "--with", files["with"], "--without", files["without"], *model)
    assert "music" in run("list")
    assert json.loads(run("show", "music", "--json"))["provenance"]["examples"] == 18
    file = str(tmp_path / "music.json")
    run("export", "music", file)
    ours, saved = (json.loads(run("measure", it, lines["with"][0], *model, "--json")) for it in ("music", file))
    other = json.loads(run("measure", "music", lines["without"][0], *model, "--json"))
    assert ours["measured"] == saved["measured"]
    assert ours["measured"][0]["value"] > other["measured"][0]["value"]
    words = ("steer", "music", "Yesterday I", "--kl", "0.05", "--max-new-tokens", "8", *model)
    monkeypatch.setattr(outcome, "RANDOM_DRAWS", 6)
    raised = json.loads(run(*words, "--json"))["measured"]
    shown = " ".join(run(*words, "--suppress").split())
    plain, suppressed = map(float, re.search(r"goes from (\S+) to ([^\s;]+)", shown).groups())
    assert plain == pytest.approx(raised["plain"], rel=0.02)
    assert len({plain, suppressed, round(raised["steered"], 3)}) == 3
    assert float(re.search(r"off-target KL ([\d.]+\d)", shown)[1]) == pytest.approx(0.05, rel=0.05)
    assert "lower music as far" in shown
    assert "(6 draws, seed 0)" in shown
    assert "has no concept 'film' (it has 'music')" in run("show", "film", code=1)
    assert "has no text" in run("find", "x", "--with", files["empty"], "--without", files["without"], *model, code=1)


def test_evaluate_steering(tiny_folder, few_contexts, tmp_path, monkeypatch):
    """A small one, of a random model: tables for detection and each off-target KL, and off-target KLs as requested."""
    monkeypatch.setattr(latent_topics, "ENOUGH", {"find": 6, "choose": 4, "report": 4})
    monkeypatch.setattr(latent_topics, "FEWEST", 4)
    monkeypatch.setattr(evaluation, "read_corpus", partial(evaluation.read_corpus, limit=2000))
    monkeypatch.setattr(evaluation, "KLS", (0.01,))
    monkeypatch.setattr(evaluation, "LAYER_KL", 0.01)
    monkeypatch.setattr(evaluation, "STEERED_SIZES", (5,))
    monkeypatch.setattr(evaluation, "HELD_OUT_TEXTS", [text[:18] for text in HELD_OUT_TEXTS[:2]])
    monkeypatch.setattr(evaluation, "OPENINGS", evaluation.OPENINGS[:1])
    monkeypatch.setattr(evaluation, "NEW_TOKENS", 3)
    monkeypatch.setattr(reading, "TEXT_TOKENS", 16)
    words = ["--concepts", "music", "--out", str(tmp_path), "--json", "--model", tiny_folder]
    result = CliRunner().invoke(command(evaluation.ConceptSteering), words)
    assert result.exit_code == 0, result.output
    (part,) = json.loads(result.stdout)["parts"]
    assert {table["table"] for table in part["tables"]} == {"detection", "0.01 nats"}
    (line,) = [json.loads(row) for row in (tmp_path / "samples.jsonl").read_text().splitlines()]
    cells = line["steered"]["0.01"]
    assert {"5 neurons", "residual stream", "noise", "random neurons", "wrong sign", "prompt", "plain"} <= set(cells)
    assert all(
        cell["off_target_kl"] == pytest.approx(0.01, rel=0.05) for cell in cells.values() if "off_target_kl" in cell
    )


def test_repeated_trigrams():
    assert evaluation.repeated_trigrams([1, 2, 3, 1, 2, 3]) == pytest.approx(1 - 3 / 4)


def test_a_vector_is_added_behind_a_layer_and_gone_afterwards(model):
    prompt, vector = texts(1, False)[0], torch.randn(32)
    plain = model.next_logits(prompt)
    with steer(model, VectorEdit(0, 0 * vector)):
        assert torch.equal(model.next_logits(prompt), plain)
    with steer(model, VectorEdit(0, vector)):
        stream = model.final_stream(model.encode([prompt]))
    reference = model.net.transformer.ln_f(model.net.transformer.h[0](_embedded(model, prompt)) + vector)
    torch.testing.assert_close(stream, reference)
    assert torch.equal(model.next_logits(prompt), plain)


def _embedded(model, prompt):
    ids = torch.tensor([model.ids(prompt)])
    return model.net.transformer.wte(ids) + model.net.transformer.wpe(torch.arange(ids.shape[1]))


def test_streams_are_means_behind_each_layer(model):
    rows = texts(3, True)
    results = read(model, rows, ()).stream
    for row, text in zip(results, rows, strict=True):
        reference = model.net.transformer.h[0](_embedded(model, text))[0, 1:].mean(0)
        np.testing.assert_allclose(row[0], reference.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_perplexity_of_a_batch_is_that_of_singles(smol):
    openings, rows = ["In the", "My friend told me"], [smol.tokens_of(" end it was quite"), smol.tokens_of(" of a dog")]
    losses = []
    for opening, row in zip(openings, rows, strict=True):
        read_ = smol.ids(opening)
        for token in row:
            losses.append(-smol.next_logits(read_).log_softmax(-1)[token].item())
            read_ = [*read_, token]
    assert evaluation.perplexity(smol, openings, rows) == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_the_auroc_by_chance_is_reached_by_few_of_all_orders():
    """At most about one order in twenty; and the next smaller AUROC by more than one in forty."""
    for positive, negative in ((4, 4), (5, 3), (6, 6)):
        size = positive + negative
        scores = np.arange(size)
        reached = []
        for places in itertools.combinations(range(size), positive):
            labels = np.isin(scores, places)
            reached.append(auroc(scores, labels))
        bar = auroc_by_chance(positive, negative)
        assert np.mean(np.array(reached) >= bar) <= 0.055
        assert np.mean(np.array(reached) >= bar - 1 / (positive * negative)) > 0.025

"""Monitors: thresholds of a known false positive rate, what is read while a model writes, controls, claims."""

import random
import re
from contextlib import ExitStack
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from few import few_of
from planted import COMMON
from scipy.stats import beta
from test_concepts import SONGS, planted, texts

from icebear import Concept, Monitor, check, find_concept, monitor, steer, watching
from icebear.claims.claim import Claim
from icebear.claims.kinds.meanings import MonitorClaim
from icebear.errors import InputError
from icebear.steering.concept.detectors import contributions
from icebear.steering.monitor.controls import BagOfWords, longer, without_words
from icebear.steering.monitor.fitting import fewest
from icebear.steering.monitor.monitor import BAG, HELD_OUT
from icebear.steering.monitor.text_values import interval, text_values, threshold_of
from icebear.steering.monitor.watching import read_message

PROMPT = "the ice bear"


@pytest.fixture(scope="module")
def model():
    return planted()


@pytest.fixture(scope="module")
def concept(model):
    return find_concept(model, texts(80, True), texts(80, False), "song", sites=("ffn",))


@pytest.fixture(scope="module")
def made(model, concept):
    return monitor(model, concept, texts(130, False, 1), 0.01)


# --- rates ----------------------------------------------------------------------------------------------


def test_the_interval_is_clopper_and_pearsons():
    for events, trials in ((0, 122), (1, 122), (3, 40), (40, 40)):
        low = beta.ppf(0.025, events, trials - events + 1) if events else 0
        high = beta.ppf(0.975, events + 1, trials - events) if events < trials else 1
        assert interval(events, trials) == pytest.approx((low, high))


@pytest.mark.parametrize(("fpr", "count"), [(0.01, 122), (0.05, 23)])
def test_the_fewest_negatives_bound_the_rate_by_three_times_what_was_asked(fpr, count):
    assert fewest(fpr) == count
    assert interval(0, count)[1] <= 3 * fpr < interval(0, count - 1)[1]


def test_the_expected_rate_is_at_most_what_was_asked():
    """For values in random order: of n + 1, the last is above the threshold of the others in at most fpr of all."""
    for count, fpr in ((122, 0.01), (199, 0.01), (60, 0.05), (23, 0.05)):
        ranks = np.arange(count + 1.0)
        above = [rank > threshold_of(np.delete(ranks, int(rank)), fpr)[0] for rank in ranks]
        assert np.mean(above) <= fpr + 1e-12
        assert np.mean(above) + 1 / (count + 1) > fpr or threshold_of(ranks, fpr)[1] == 0


def stories(count, dependent, seed):
    """Texts of four sentences without the concept; if dependent, all sentences of a text share a few words."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words = draw.sample(COMMON, 3) if dependent else COMMON
        rows.append(" ".join(" ".join(draw.choices(words, k=6)) + "." for _ in range(4)))
    return rows


@pytest.mark.parametrize("dependent", few_of([False, True], True))
def test_the_rate_on_fresh_texts_lies_in_the_interval(model, concept, dependent):
    """In at least 93 of 100 draws of negatives, also where the sentences of a text depend on each other."""
    pool = text_values(model, [concept.parts], stories(2000, dependent, 0), "sentence")[0]
    inside = 0
    for seed in range(100):
        chosen = np.random.default_rng(seed).permutation(len(pool))
        negatives, fresh = pool[chosen[:122]], pool[chosen[122:]]
        threshold, above = threshold_of(negatives, 0.01)
        low, high = interval(above, len(negatives))
        inside += low <= np.mean(fresh > threshold) <= high
    assert inside >= 93


def test_sentences_as_units_would_promise_too_much(model, concept):
    """The interval of all sentences is too narrow for the rate of texts, so the test above can fail."""
    rows = stories(600, True, 0)
    pool = text_values(model, [concept.parts], rows, "sentence")[0]
    sentences = text_values(model, [concept.parts], [part for row in rows for part in row.split(". ")], "sentence")[0]
    inside = 0
    for seed in range(100):
        draw = np.random.default_rng(seed)
        threshold, above = threshold_of(draw.choice(sentences, 4 * 122), 0.01)
        low, high = interval(above, 4 * 122)
        inside += low <= np.mean(pool > threshold) <= high
    assert inside < 50


# --- making ---------------------------------------------------------------------------------------------


def test_a_planted_concept_is_flagged_and_chance_is_not(made):
    held = made.rate(HELD_OUT)
    assert held.auroc > 0.99
    assert held.true_positive_rate > 0.9
    assert held.false_positive_rate <= 0.1
    for name in ("random neurons", "shuffled labels"):
        assert abs(made.rate(HELD_OUT, name).auroc - 0.5) < 0.3
    assert {row.texts for row in made.rates} == {HELD_OUT, "five times longer", "without keywords"}


def test_rates_are_those_of_a_plain_count(model, concept, made):
    with_it, without = concept.texts.tests()
    flagged = [[made.measure(model, text).flagged for text in rows] for rows in (with_it, without)]
    held = made.rate(HELD_OUT)
    assert held.true_positive_rate == pytest.approx(np.mean(flagged[0]))
    assert held.false_positive_rate == pytest.approx(np.mean(flagged[1]))
    assert list(map(int, re.findall(r"\d+", made.about[-1]))) == [sum(flagged[0]), len(flagged[0])]


def test_a_bag_of_words_that_does_as_well_is_said_first(made):
    assert made.rate(HELD_OUT, BAG).auroc >= made.rate(HELD_OUT).auroc - 0.01
    assert "bag of words" in made.about[0]
    worse = replace(made, rates=tuple(replace(row, auroc=0.6) if row.detector == BAG else row for row in made.rates))
    assert "bag of words" not in worse.about[0]


@pytest.mark.parametrize("detector", ["means", "logistic"])
def test_vectors_detect_too(model, concept, detector):
    vector = monitor(model, concept, texts(130, False, 1), 0.01, detector=detector)
    assert vector.rate(HELD_OUT).auroc > 0.9
    assert vector.rate(HELD_OUT, "random neurons").auroc < 0.9
    assert Monitor.from_json(vector.to_json()) == vector


def test_what_cannot_hold_is_refused(model, concept, made):
    with pytest.raises(InputError, match="122"):
        monitor(model, concept, texts(121, False, 1), 0.01)
    with pytest.raises(InputError, match="found the concept"):
        monitor(model, concept, [*texts(130, False, 1), concept.texts.others[0]])
    by_hand = Concept.of(model, "hand", {("L0.ffn.3", "+"): 1.0})
    with pytest.raises(InputError, match="no vector"):
        monitor(model, by_hand, texts(23, False, 1), 0.05, detector="means")
    assert monitor(model, by_hand, texts(23, False, 1), 0.05).rates == ()
    with pytest.raises(InputError, match="made in"):
        replace(made, model_fingerprint="other").measure(model, PROMPT)


def test_a_file_gives_the_same_monitor(model, made, tmp_path):
    made.save(tmp_path / "m.json")
    assert Monitor.load(tmp_path / "m.json") == made


def test_texts_of_nothing_but_keywords_are_left_out(model):
    """Without them no text with the concept is left, and no rate."""
    of_keywords = list(map(" ".join, combinations(SONGS[0][:7], 2)))
    concept = find_concept(model, of_keywords, texts(40, False), "song", sites=("ffn",))
    result = monitor(model, concept, texts(23, False, 1), 0.05)
    assert {row.texts for row in result.rates} == {HELD_OUT, "five times longer"}
    assert Monitor.from_json(result.to_json()) == result


def test_longer_texts_have_five_parts_and_keywords_go():
    with_it, without = longer(["a song."], [f"text {number}." for number in range(9)])
    assert all(text.count(".") == 5 for text in (*with_it, *without))
    assert "a song." in with_it[0]
    assert without_words(["A Song sung here now", "song"], ["song"]) == ["A  sung here now"]
    bag = BagOfWords.fit(["a song", "a loud song", "a dog", "a cat"], np.array([True, True, False, False]))
    assert bag.keywords()[0] == "song"


# --- units ----------------------------------------------------------------------------------------------


def test_the_value_of_a_text_is_the_largest_mean_of_a_unit(model, made):
    text = f"{' '.join(COMMON[:5])}. {' '.join(SONGS[0][:3])}. {' '.join(COMMON[5:9])}."
    by_unit = {unit: replace(made, unit=unit).measure(model, text) for unit in ("token", "sentence", "message")}
    tokens = by_unit["token"]
    assert tokens.value == max(tokens.values)
    assert by_unit["message"].value == pytest.approx(np.mean(tokens.values[1:]))
    sentence = by_unit["sentence"]
    assert by_unit["message"].value < sentence.value < tokens.value
    (flag,) = sentence.flags
    assert flag.text.strip() == f"{' '.join(SONGS[0][:3])}."
    assert flag.value == pytest.approx(np.mean(tokens.values[flag.start : flag.stop]))
    assert flag.neurons[0][1] == pytest.approx(flag.value, rel=0.2)


# --- while a model writes ---------------------------------------------------------------------------------


def test_tokens_have_the_values_of_the_whole_text(model, made):
    with watching(model, made) as log:
        written = model.answer(PROMPT, max_new_tokens=9)
    verdict = log.texts[0]["song"]
    row = [*written.prompt_ids, *written.ids]
    whole = contributions(model, [made.detector], [row])[0][0].sum(1)
    read = whole[len(written.prompt_ids) : len(written.prompt_ids) + len(verdict.values)]
    np.testing.assert_allclose(verdict.values, read, atol=1e-4)
    assert len(verdict.values) >= len(written.ids) - 1


def test_a_batch_is_read_row_by_row(model, made):
    prompts = [PROMPT, "the ice bear is a big bear of the north"]
    alone = []
    for prompt in prompts:
        with watching(model, made) as log:
            model.generate(prompt, 6)
        alone.append(log.texts[0]["song"].values)
    with watching(model, made) as log:
        model.generate(prompts, 6)
    for row, values in zip(log.texts, alone, strict=True):
        np.testing.assert_allclose(row["song"].values[: len(values)], values, atol=1e-4)


def low(made, unit="token"):
    """A monitor that flags everything."""
    return replace(made, threshold=-1e6, unit=unit)


def test_a_token_is_flagged_at_once_and_a_message_at_its_end(model, made):
    for unit, count in (("token", 5), ("message", 1)):
        flags = []
        with watching(
            model, low(made, unit), on_flag=lambda name, flag, flags=flags: flags.append((name, flag))
        ) as log:
            model.generate(PROMPT, 6, eos_token_id=None)
        assert len(flags) == count
        assert [flag for _, flag in flags] == list(log.texts[0]["song"].flags)


def test_a_flagged_answer_ends(model, made):
    with watching(model, low(made)) as log:
        ended = model.answer(PROMPT, max_new_tokens=9, stopping_criteria=[log], eos_token_id=None)
    assert log.flagged
    assert len(ended.ids) == 2  # the first token is read when the second is written
    with watching(model, replace(made, threshold=1e6)) as log:
        assert len(model.answer(PROMPT, max_new_tokens=9, stopping_criteria=[log], eos_token_id=None).ids) == 9
    assert not log.flagged


def test_a_callback_that_raises_ends_the_generation_and_leaves_no_hook(model, made):
    def refuse(name, flag):
        raise RuntimeError(name)

    before = sum(len(part._forward_hooks) for part in model.net.modules())
    with pytest.raises(RuntimeError, match="song"), watching(model, low(made), on_flag=refuse):
        model.generate(PROMPT, 6)
    assert sum(len(part._forward_hooks) for part in model.net.modules()) == before


def test_a_recipe_acts_from_the_flag_on(model, made):
    edits = [f"L0.ffn.{number}=1000" for number in range(8, 16)]

    def written(*contexts):
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return model.answer(PROMPT, max_new_tokens=6, eos_token_id=None).ids

    plain = written()
    assert written(steer(model, edits))[0] != plain[0]
    with watching(model, low(made)) as log:
        late = written(steer(model, edits, when=lambda: log.flagged))
    assert late[:2] == plain[:2]
    assert late != plain


def test_monitors_of_one_name_beams_and_other_models_are_refused(model, made):
    with pytest.raises(InputError, match="same name"), watching(model, [made, made]):
        pass
    with watching(model, made), pytest.raises(InputError, match="beam"):
        model.generate(PROMPT, 4, num_beams=2)
    with pytest.raises(InputError, match="made in"), watching(model, replace(made, model_fingerprint="x")):
        pass


def test_a_message_is_read_by_all_monitors_as_by_each(model, concept, made):
    means = replace(monitor(model, concept, texts(130, False, 1), 0.01, detector="means"), name="means")
    text = texts(1, True)[0]
    verdicts = read_message(model, [made, means], text)
    for verdict, alone in zip(verdicts, (made, means), strict=True):
        np.testing.assert_allclose(verdict.values, alone.measure(model, text).values, atol=1e-5)
    assert read_message(model, [made], COMMON[0]) == []


# --- claims ---------------------------------------------------------------------------------------------


def test_a_claim_holds_and_breaks_where_the_layer_is_damaged(concept, made):
    model = planted()
    ((what, _),) = MonitorClaim.of(made, concept)
    claim = Claim.of(model, what)
    assert claim.value == pytest.approx(made.rate(HELD_OUT).true_positive_rate)
    assert check(model, [claim]).passed
    with torch.no_grad():
        model.net.transformer.h[0].mlp.c_fc.weight.normal_(0, 0.02)
    assert check(model, [claim]).rows[0].verdict == "broken"


def test_a_claim_breaks_where_other_texts_are_flagged(model, concept, made):
    ((everything, _),) = MonitorClaim.of(low(made, "sentence"), concept)
    assert everything.measured(model).broken_by

"""Flips: found, verified, priced; evaluated; the commands."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from configurations import dense, different, mixtures
from conftest import CAMEL, ICE_BEAR, IDS, LLAMA, Letters, random_model, started_alone
from few import FEW, few_of
from test_tasks import make

from icebear import ATTNLRP, Chat, Edit, Model, Neuron, Recipe, attribute, build_index, flip, open_store, steer
from icebear.app.cli.main import main
from icebear.concepts.nodes.random_controls import RANDOM_DRAWS
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import IcebearError, InputError
from icebear.evaluation import runner
from icebear.evaluation.flips import NEURONS, SEARCHES, FlipPair, Flips, at_random, flips
from icebear.models.loading.loading import load_model
from icebear.records import Example, Hit, Sentence
from icebear.steering import side_effects
from icebear.steering.flipping.flip import (
    MARGIN,
    WAYS,
    FlipRequest,
    _edits,
    _neurons,
    _proposals,
    _pruned,
    _Result,
    _search,
    _start,
    by_distance,
    margins,
)
from icebear.steering.flipping.last_token import LastToken
from icebear.steering.flipping.phrases import flip_holds, phrase_logits, phrase_probability
from icebear.steering.outcome import outcome_of, outcomes
from icebear.steering.provenance import FlipRecord, Outcome
from icebear.steering.random_edits import random_edits
from icebear.steering.side_effects import (
    HELD_OUT_TEXTS,
    HeldOutContexts,
)

RUN = CliRunner()


@pytest.fixture(scope="module")
def letters():
    return Model(random_model(LLAMA, dtype=torch.float32).net, Letters(), "letters")


# --- flip ---


def test_the_ice_bear_moves_to_the_desert(smol, desert):
    assert 1 <= len(desert) <= 10
    assert {edit.where for edit in desert} == {"last"}
    with steer(smol, desert):
        assert smol.predict(ICE_BEAR, 1)[0].text == " desert"
    record = FlipRecord.of(desert)
    assert (record.prompt, record.source, record.text, record.left_source) == (ICE_BEAR, CAMEL, " desert", False)
    assert [row.neuron for row in record.neurons] == [edit.neuron for edit in desert]
    assert desert.provenance["after"][0]["text"] == " desert"
    assert_inside(smol, desert)


@pytest.mark.release
def test_two_heads_of_the_camel_move_the_ice_bear(smol, desert_by_heads, monkeypatch):
    """Each head alone, both, and the number of the outcome are those of steering."""
    monkeypatch.setattr("icebear.steering.outcome.RANDOM_DRAWS", 4)
    recipe = desert_by_heads
    assert {str(edit) for edit in recipe} == {f'L23.head.{head}<-"{CAMEL}"@last' for head in (4, 5)}
    for edit, row in zip(recipe, FlipRecord.of(recipe).neurons, strict=True):
        with steer(smol, edit):
            assert row.alone == pytest.approx(smol.probability(ICE_BEAR, " desert"), rel=1e-3)
        assert (row.neuron, row.activation, row.relevance) == (edit.neuron, None, None)
    contexts = HeldOutContexts(smol, HELD_OUT_TEXTS[:3])
    outcome = next(outcomes(smol, recipe, contexts))  # without texts and side effects
    with steer(smol, recipe):
        assert smol.predict(ICE_BEAR, 1)[0].text == " desert"
        assert outcome.control.after == pytest.approx(smol.probability(ICE_BEAR, " desert"), rel=1e-3)
    assert outcome.as_far == 0
    step = max(1, len(contexts.contexts) // 4)
    for source, drawn in zip(contexts.contexts[::step], outcome.other_sources.drawn[:2], strict=False):
        with steer(smol, [Edit.from_prompt(edit.neuron, tuple(source)) for edit in recipe]):
            assert drawn == pytest.approx(smol.probability(ICE_BEAR, " desert"), rel=1e-3)
    assert max(outcome.other_sources.drawn) < outcome.control.after


@pytest.mark.release
def test_heads_of_a_chat_are_swapped_by_its_token_ids(smol):
    prompt, source = Chat([{"role": "user", "content": "ice"}]), Chat([{"role": "user", "content": "a camel"}])
    state = _start(FlipRequest(smol, prompt, source=source), (7,))
    (edit,) = _edits(state, {(1, smol.width("ffn") + 2, 0): 1.0})
    assert edit == Edit.from_prompt("L1.head.2", tuple(smol.ids(source)))
    assert Edit.parse(str(edit)) == edit
    with steer(smol, edit):
        edited = smol.next_logits(smol.ids(prompt))
    assert torch.allclose(state.last.logits([{(1, smol.width("ffn") + 2, 0): 1.0}])[0, 0], edited, atol=1e-4)


def assert_inside(model, recipe):
    """What the neurons were seen to be."""
    seen = calibrate(model)
    for edit in recipe:
        place = edit.neuron.layer, edit.neuron.index
        assert seen.low[place] - 1e-4 <= edit.value <= seen.high[place] + 1e-4


def test_without_a_source_a_flip_stays_inside_too(letters):
    for wanted in (token.id for token in letters.predict("the ice bear", 4)[1:]):
        recipe = flip(letters, "the ice bear", wanted)
        assert 1 <= len(recipe) <= 10
        with steer(letters, recipe):
            assert letters.predict("the ice bear", 1)[0].id == wanted
        assert_inside(letters, recipe)


def test_unbounded_edits_leave_the_range(letters):
    shares = []
    for wanted in (token.id for token in letters.predict("the ice bear", 9)[1:]):
        recipe = flip(letters, "the ice bear", wanted, unbounded=True)
        shares += [row.range_share or 0.0 for row in FlipRecord.of(recipe).neurons]
    assert max(shares) > 1


def answer_alone(recipe, prompt, answer, started):
    """In a process that knows neither the model nor the flip."""
    started.set()
    model = load_model("smollm2-135m", dtype="float32", device="cpu")
    with steer(model, Recipe.load(recipe)):
        answer.write_text(model.predict(prompt, 1)[0].text)


@pytest.mark.release
def test_a_fresh_process_verifies_the_saved_recipe(desert, tmp_path):
    desert.save(tmp_path / "desert.json")
    process = started_alone(answer_alone, tmp_path / "desert.json", ICE_BEAR, tmp_path / "answer.txt")
    process.join()
    assert process.exitcode == 0
    assert (tmp_path / "answer.txt").read_text() == " desert"


def test_what_is_not_needed_goes(letters):
    """Pruned: a neuron set to what it is goes; without any of the others the flip does not hold by its margin."""
    wanted = letters.predict("the ice bear", 4)[3].id
    state = _start(FlipRequest(letters, "the ice bear"), (wanted,))
    result = _search(state, _Result({}, margins(state, [{}])[0].item()))
    edits = result.edits
    assert result.margin >= MARGIN
    useless = next((1, index, 0) for index in range(letters.width("ffn")) if (1, index, 0) not in edits)
    left = _pruned(state, {useless: state.now[useless].item(), **edits})
    assert useless not in left
    assert set(left) <= set(edits)
    assert margins(state, [left])[0] >= MARGIN
    for gone in left:
        rest = {place: value for place, value in left.items() if place != gone}
        assert margins(state, [rest])[0] < MARGIN


def test_a_narrow_lead_is_a_lead(letters, monkeypatch):
    """A token that is first by less than the margin needs nothing, and what holds by less is not thrown away."""
    first = letters.predict("the ice bear", 1)[0].id
    monkeypatch.setattr("icebear.steering.flipping.flip.MARGIN", 100.0)
    assert len(flip(letters, "the ice bear", first)) == 0
    wanted = letters.predict("the ice bear", 3)[2].id
    recipe = flip(letters, "the ice bear", wanted, source="a source prompt")
    with steer(letters, recipe):
        assert letters.predict("the ice bear", 1)[0].id == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "  "}, None),
        ({"to": " desert", "max_neurons": 0}, "not 0"),
        ({"to": " desert", "source": ICE_BEAR}, "source"),
        ({"to": " qux", "max_neurons": 1}, "' qux'"),
        ({"to": 10**7}, "not 10000000"),
        ({}, "suppress"),
        ({"to": " desert", "suppress": True}, "suppress"),
        ({"suppress": True, "top_k": 0}, "top_k"),
        ({"suppress": True, "top_k": 50}, "not 50"),  # of 50 tokens
    ],
)
def test_silly_requests_get_clear_answers(letters, arguments, message):
    with pytest.raises(InputError, match=message):
        flip(letters, ICE_BEAR, **arguments)


@pytest.mark.parametrize("top_k", [1, 4])
def test_the_answer_goes_away(letters, top_k):
    prompt = "the ice bear"
    answer = letters.predict(prompt, 1)[0].id
    recipe = flip(letters, prompt, suppress=True, top_k=top_k)
    assert 1 <= len(recipe) <= 10
    assert (FlipRecord.of(recipe).text, FlipRecord.of(recipe).top_k) == (letters.text(answer), top_k)
    with steer(letters, recipe):
        assert answer not in [token.id for token in letters.predict(prompt, top_k)]
    assert recipe.provenance["after"][top_k - 1]["id"] != answer


def test_away_without_a_source_goes_towards_zero(letters):
    recipe = flip(letters, ICE_BEAR, suppress=True, top_k=1)
    assert len(recipe)
    assert not FlipRecord.of(recipe).left_source
    for edit, row in zip(recipe, FlipRecord.of(recipe).neurons, strict=True):
        assert abs(edit.value - row.activation) <= 2.5 * abs(row.activation) + 1e-3
        assert edit.value * row.activation <= row.activation**2


def test_a_flip_is_deterministic_and_a_source_may_have_another_length(letters):
    wanted = letters.predict("the ice bear", 3)[2].id
    twice = [flip(letters, "the ice bear", wanted, source="a much longer source prompt") for _ in range(2)]
    assert twice[0] == twice[1]
    with steer(letters, twice[0]):
        assert letters.predict("the ice bear", 1)[0].id == wanted


def test_an_index_is_asked_and_tells_examples(letters):
    """An index that names a neuron of another recipe: it is tried, and its examples are in the provenance."""
    request = []

    class Store:
        def check(self, fingerprint, name):
            request.append((fingerprint, name))

        def search(self, text, k):
            request.append(text)
            return [Hit(Neuron(layer, site, 1), "-", 1.0, (), "sentences") for layer, site in ((1, "ffn"), (2, "attn"))]

        def examples(self, neuron, polarity, k):
            return [Example(1.0, 0, Sentence(1, f"{neuron} {polarity}", "t", 0, 1, ("a",)))]

    prompt, (first, *others) = "the ice bear", letters.predict("the ice bear", 9)
    wanted = next(token for token in others[1:] if token.text.isalpha())
    recipe = flip(letters, prompt, wanted.id, source="a source prompt", store=Store(), heads=False)
    assert request == [(letters.fingerprint, letters.name), wanted.text.strip()]
    for edit, row in zip(recipe, FlipRecord.of(recipe).neurons, strict=True):
        assert row.examples == (f"{edit.neuron} {'+' if edit.value > 0 else '-'}",)
    explained = attribute(letters, prompt, wanted.id, first.id, sites=("ffn",))
    for row in FlipRecord.of(recipe).neurons:
        place = row.neuron.layer, -1, row.neuron.index
        assert row.relevance == pytest.approx(explained.ffn[place].item(), abs=1e-4)


@pytest.mark.parametrize("to", [".", ")"])
def test_an_index_is_not_asked_for_a_token_without_letters(letters, to):
    class Store:
        def check(self, fingerprint, name):
            pass

        def search(self, text, k):
            return pytest.fail(text)

        def examples(self, neuron, polarity, k):
            return []

    recipe = flip(letters, "the ice bear", to, store=Store(), unbounded=True, max_neurons=40)
    assert recipe.edits == flip(letters, "the ice bear", to, unbounded=True, max_neurons=40).edits


def test_what_cannot_be_done_says_how_near_it_came(letters):
    reasons = []
    for wanted in range(12):
        try:
            flip(letters, "the ice bear", wanted, max_neurons=1)
        except InputError as error:
            reasons.append(str(error))
    assert len(reasons) > 1
    for reason in reasons:
        assert re.match(
            r"No flip to '.' was found with at most 1 neurons inside their activation range\. With [01] edits, the "
            r"probability of '.' is 0\.\d+, and '.' has 0\.\d+\. Try .*unbounded",
            reason,
        )


def test_other_models_are_refused():
    with pytest.raises(InputError):
        flip(make("bert"), [*IDS, 49], 3)


def test_margins_are_those_of_the_steered_model(letters, generator):
    model = letters
    state = _start(FlipRequest(model, "the ice bear"), (7,))
    proposals = [
        {(generator.randrange(3), generator.randrange(20), 0): generator.uniform(-5, 5) for _ in range(count)}
        for count in (0, 1, 3)
    ]
    for proposal, margin in zip(proposals, margins(state, proposals).tolist(), strict=True):
        edits = [
            Edit(Neuron(layer, "ffn", index), "set", value, where="last")
            for (layer, index, _), value in proposal.items()
        ]
        with steer(model, edits):
            result = model.predict("the ice bear", 50)
        own = next(token.logit for token in result if token.id == 7)
        assert margin == pytest.approx(own - max(token.logit for token in result if token.id != 7), abs=1e-4)


def test_flips_of_other_families():
    for name in ("gpt2", "opt"):
        model = Model(random_model(dense()[name], "eager", torch.float32).net, Letters(), name)
        wanted = model.predict("the ice bear", 4)[3].id
        recipe = flip(model, "the ice bear", wanted, unbounded=True)
        with steer(model, recipe):
            assert model.predict("the ice bear", 1)[0].id == wanted


# --- price ---


def test_no_edits_have_no_side_effects(smol, few_contexts):
    assert HeldOutContexts(smol, HELD_OUT_TEXTS[:1]).off_target_kl([]) == 0
    with pytest.raises(InputError):
        HeldOutContexts(smol, ["a"])


@pytest.mark.release
def test_off_target_kl_is_the_mean_over_48_contexts_where_the_edits_act(smol, desert):
    """Against a loop over some: at the last tokens of texts cut inside, and not zero there."""
    places = HeldOutContexts(smol).contexts
    assert (len(places), len(set(map(tuple, places)))) == (48, 48)
    texts = [smol.token_ids(text) for text in HELD_OUT_TEXTS]
    assert all(any(ids == text[: len(ids)] and len(ids) < len(text) for text in texts) for ids in places)
    some = HeldOutContexts(smol, [HELD_OUT_TEXTS[0][:40]])
    kl = some.off_target_kl(list(desert))
    result = []
    for ids in some.contexts:
        plain = smol.next_logits(ids).log_softmax(-1)
        with steer(smol, desert):
            edited = smol.next_logits(ids).log_softmax(-1)
        result.append((plain.exp() * (plain - edited)).sum().item())
    assert kl == pytest.approx(sum(result) / len(result), rel=1e-3)
    assert kl > 0.01


def test_sets_of_edits_that_share_passes_have_the_side_effects_that_they_have_alone(letters, monkeypatch):
    monkeypatch.setattr(side_effects, "SETS_PER_PASS", 2)
    at = lambda where: [Edit(Neuron(1, "ffn", 3), "set", 4.0, where=where)]  # noqa: E731
    swaps = [Edit.from_prompt("L1.head.0", "other"), Edit(Neuron(0, "ffn", 2), "add", 3.0, where="last")]
    sets = [at("last"), swaps, [], at("position:40"), swaps[1:], at("generated"), at("all"), at("last")]
    alone = [HeldOutContexts(letters, ["Good night.", "A bus."]).off_target_kl(edits) for edits in sets]
    contexts = HeldOutContexts(letters, ["Good night.", "A bus."])
    assert list(contexts.off_target_kls(sets)) == pytest.approx(alone, rel=1e-4)
    assert alone[0] != alone[1] != alone[4]
    assert min(kl for kl, edits in zip(alone, sets, strict=True) if edits) > 0


@pytest.mark.release
def test_generated_tokens_count_behind_the_contexts(letters):
    """Against teacher forcing one text at a time; an edit that names a position of its own prompt acts at the last."""
    contexts = HeldOutContexts(letters, ["Good night.", "A bus."])
    edits = [Edit(Neuron(1, "ffn", 3), "set", 4.0, where="generated")]
    total = []
    for ids in contexts.contexts:
        whole = list(ids)
        for _ in range(16):
            whole.append(int(letters.next_logits(whole).argmax()))
        for end in range(len(ids) + 1, len(whole) + 1):
            plain = letters.next_logits(whole[:end]).log_softmax(-1)
            with steer(letters, [f"L1.ffn.3=4@position:{len(ids)}-{end}"]):
                edited = letters.next_logits(whole[:end]).log_softmax(-1)
            total.append((plain.exp() * (plain - edited)).sum().item())
    assert contexts.off_target_kl(edits) == pytest.approx(sum(total) / len(total), rel=1e-3)
    last, at = (
        contexts.off_target_kl([Edit(Neuron(1, "ffn", 3), "set", 4.0, where=where)])
        for where in ("last", "position:40")
    )
    assert last == at > 0


def test_reading_a_prompt_once_changes_nothing():
    """In families that differ: logits under edits and gradients by AttnLRP are those of whole passes."""
    for name, config in different().items():
        model = Model(random_model(config, "eager", torch.float32).net, Letters(), name)
        last = LastToken(model, IDS)
        whole = attribute(model, IDS, 5, 6, sites=("ffn",))
        gradients = last.gradients({}, lambda logits: logits[0, 5] - logits[0, 6], ATTNLRP)
        assert torch.allclose(last.activations()[..., 0], whole.activation("ffn")[:, -1], atol=1e-5), name
        assert torch.allclose((gradients * last.activations())[..., 0], whole.ffn[:, -1], atol=1e-4), name
        first = model.layers_with("ffn")[0]
        with steer(model, [f"L{first}.ffn.3=2@last"]):
            edited = model.next_logits(IDS)
        assert torch.allclose(last.logits([{}, {(first, 3, 0): 2.0}])[1, 0], edited, atol=1e-4), name


def test_a_swap_of_a_head_is_that_of_steering():
    """In families that differ: logits under swaps, and the change of a number with the share of a swap."""
    for name, config in different().items():
        model = Model(random_model(config, "eager", torch.float32).net, Letters(), name)
        last, layer = LastToken(model, IDS, source=[3, 1, 4]), model.layers_with("attn")[-1]
        head = (layer, model.width("ffn") + model.width("head") - 1, 0)
        with steer(model, Edit.from_prompt(f"L{layer}.head.{model.width('head') - 1}", (3, 1, 4))):
            edited = model.next_logits(IDS)
        assert torch.allclose(last.logits([{head: 1.0}])[0, 0], edited, atol=1e-4), name
        if name in mixtures():
            continue  # where the choice of experts jumps
        slope = last.gradients({head: 0.3}, lambda logits: logits[0, 5], None)[head]
        below, above = last.logits([{head: 0.25}, {head: 0.35}])[:, 0, 5].double()
        left = 0.7  # of the way, of which the gradient is asked
        assert slope.item() / left == pytest.approx((above - below).item() / 0.1, rel=2e-2, abs=2e-3), name


def test_many_rows_go_in_parts(letters, monkeypatch):
    whole = LastToken(letters, IDS)
    proposals = [{(1, index, 0): 3.0} for index in range(9)]
    monkeypatch.setattr("icebear.steering.flipping.last_token.PASS_ROWS", 4)
    assert torch.equal(LastToken(letters, IDS).logits(proposals).argmax(-1), whole.logits(proposals).argmax(-1))
    assert LastToken(letters, IDS).rows == 4
    assert LastToken(letters, [3]).logits([{}]).shape == (1, 1, 50)


# --- phrases ---


def next_best(model, prompt, count, rank):
    """A phrase whose every token is the `rank`-th most probable one behind the prompt and those before it."""
    ids = model.ids(prompt)
    for _ in range(count):
        ids = [*ids, model.predict(ids, rank + 1)[rank].id]
    return ids[-count:]


@pytest.mark.parametrize("source", few_of([None, "a source prompt"], "a source prompt"))
def test_a_phrase_comes(letters, source):
    """What greedy decoding writes begins with it, with and without a KV cache."""
    prompt = "the ice bear"
    phrase = next_best(letters, prompt, 3, 2)
    recipe = flip(letters, prompt, "".join(map(letters.text, phrase)), source=source, max_neurons=20)
    assert {edit.where for edit in recipe} <= {"last", "step:1", "step:2"}
    for use_cache in (True, False):
        with steer(letters, recipe):
            assert list(letters.answer(prompt, max_new_tokens=3, use_cache=use_cache).ids) == phrase
    assert list(letters.answer(prompt, max_new_tokens=3).ids) != phrase
    assert list(FlipRecord.of(recipe).phrase) == phrase
    outcome = outcome_of(letters, recipe, HeldOutContexts(letters))
    assert outcome.reached
    assert outcome.off_target_kl > 0
    assert outcome.control.after == pytest.approx(phrase_probability(letters, recipe, prompt, phrase))


def test_a_phrase_goes(letters):
    prompt = "the ice bear"
    phrase = next_best(letters, prompt, 3, 0)
    recipe = flip(letters, prompt, suppress="".join(map(letters.text, phrase)), top_k=2)
    with steer(letters, recipe):
        assert list(letters.answer(prompt, max_new_tokens=3).ids) != phrase
    assert outcome_of(letters, recipe).reached
    assert (
        len(flip(letters, prompt, suppress="".join(map(letters.text, next_best(letters, prompt, 2, 9))), top_k=2)) == 0
    )


def test_a_phrase_that_is_there_needs_nothing(letters):
    phrase = next_best(letters, "the ice bear", 4, 0)
    assert len(flip(letters, "the ice bear", "".join(map(letters.text, phrase)))) == 0


def test_margins_of_a_phrase_are_those_of_the_steered_model(letters, generator):
    """The smallest of its tokens', each behind those before it; where some lack it, what all lack together."""
    phrase = (7, 3, 30)
    state = _start(FlipRequest(letters, "the ice bear"), phrase)
    for count in (0, 2, 5):
        edits = {
            (generator.randrange(3), generator.randrange(20), generator.randrange(3)): generator.uniform(-9, 9)
            for _ in range(count)
        }
        result = phrase_logits(letters, _edits(state, edits), "the ice bear", phrase)
        own = result[range(3), list(phrase)].clone()
        result[range(3), list(phrase)] = -torch.inf
        by_token = own - result.amax(-1)
        lacking = (MARGIN - by_token).clamp(min=0).sum()
        wanted = MARGIN - lacking if lacking > 0 else by_token.min()
        assert margins(state, [edits])[0].item() == pytest.approx(wanted.item(), abs=1e-4)


class Signs(Letters):
    """Every token is a word."""

    def decode(self, ids):
        return "".join(chr(20000 + id) for id in ids)


@pytest.mark.parametrize("count", [3, 1])
def test_words_are_those_that_an_edit_alone_moves(count):
    """At its step, against no edits; likely words are those without edits and with all of them."""
    model, prompt = Model(random_model(LLAMA, dtype=torch.float32).net, Signs(), "signs"), "the ice bear"
    phrase = next_best(model, prompt, count, 2)
    recipe = flip(model, prompt, "".join(map(model.text, phrase)), max_neurons=20)
    rows = FlipRecord.of(recipe).neurons
    for row, edit in zip(rows, recipe, strict=True):
        step = 0 if edit.where == "last" else int(edit.where.removeprefix("step:"))
        plain, edited, alone = (
            phrase_logits(model, edits, prompt, phrase)[step].double() for edits in ([], recipe, [edit])
        )
        chance = torch.maximum(plain.softmax(-1), edited.softmax(-1)).tolist()
        likely = sorted(range(len(chance)), key=lambda id: -chance[id])
        change = (alone - plain)[likely]
        order = sorted(zip((change - change.mean()).tolist(), likely, strict=True))
        assert list(row.raises) == [model.text(id) for size, id in order[::-1][:4] if size >= 1e-3]
        assert list(row.lowers) == [model.text(id) for size, id in order[:4] if size <= -1e-3]
    assert any(len(row.raises) == len(row.lowers) == 4 for row in rows)
    assert len({edit.where for edit in recipe}) > 1 or count == 1


# --- many flips ---


def test_evaluating_flips(letters, few_contexts, tmp_path):
    prompt = "the ice bear"
    first, *_, wanted = (token.text for token in letters.predict(prompt, 3))
    pairs = [
        {"prompt": prompt, "to": wanted, "source": "a source prompt"},
        {"prompt": prompt, "to": ""},
        {"prompt": prompt, "to": first},
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    evaluation = Flips(str(tmp_path / "pairs.json"))
    (part,) = runner.run(evaluation, letters, tmp_path / "out")
    (again,) = runner.run(evaluation, letters, tmp_path / "out")
    assert part.to_dict() == again.to_dict()  # from the folder
    lines = [json.loads(row) for row in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [len(line["runs"]) for line in lines] == [len(SEARCHES), 0, 0]
    assert ("is empty" in lines[1]["why"], lines[2]["already"]) == (True, True)
    for row in lines[0]["runs"]:
        if row["search"] == NEURONS:
            assert (row["flipped"], row["off_target_kl"] > 0, row["after"] > lines[0]["before"]) == (True, True, True)
            assert FlipRecord.of(Recipe.load(tmp_path / "out" / "00-neurons.json")).text == wanted
    (counts,) = part.listings["pairs"]
    assert (counts["pairs"], counts["left out, as the token was first already"]) == (1, 1)
    medians = {row["search"]: row for row in part.listings["medians over flips"]}
    assert (medians[NEURONS]["flipped"], medians[NEURONS]["by heads"], set(medians)) == (1, 0, set(SEARCHES))
    assert part.tables[""].cells[NEURONS]["flipped"].mean == 1


def test_controls_have_the_same_budget_and_reach(letters):
    """FINDINGS A2: each way of choosing has as many edited rows a round, inside the same limits."""
    state = _start(FlipRequest(letters, "the ice bear", source="a source prompt", heads=False), (7,))
    unbounded = replace(state, request=replace(state.request, unbounded=True))
    for reach in (state, replace(state, goal=None), unbounded):
        for choose, *_ in (WAYS, *(how["ways"] for how in SEARCHES.values() if "ways" in how)):
            proposals = _proposals(reach, choose, {(1, 2, 0): 0.5})
            assert 40 <= len(proposals) <= 48, choose
            if not reach.request.unbounded:
                for proposal in proposals:
                    changed = {place: value for place, value in proposal.items() if place != (1, 2, 0)}
                    for place, value in changed.items():
                        assert state.low[place] - 1e-5 <= value <= state.high[place] + 1e-5
    *_, last = ways = [partial(at_random, seed=seed) for seed in range(3)]
    draws = [way(state, {})[0] for way in ways]
    assert not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[2], last(state, {})[0])
    moved = [last(state, {(0, 3, 0): value})[0] for value in (1.0, 2.0)]  # one neuron, twice
    assert not torch.equal(*moved)


def test_rows_that_were_spent_in_vain_are_counted(letters, monkeypatch):
    ways = (by_distance,)
    state = _start(FlipRequest(letters, "the ice bear", source="a source prompt", ways=ways), (7,))
    tried = len(_proposals(state, *ways, {}))
    monkeypatch.setattr(
        "icebear.steering.flipping.flip.margins", lambda state, proposals: torch.full((len(proposals),), -9.0)
    )
    first = _search(state, _Result({}, -1.0))
    assert (first.edits, first.rounds) == ({}, ((tried, -1.0),))
    assert _search(state, first).rounds == ((tried, -1.0), (2 * tried, -1.0))  # counted from those before it


def test_flips_are_judged_by_ids(letters):
    """Not by texts: a token that is spelt in another way than it is read back counts (FINDINGS A5)."""
    first = letters.predict("the ice bear", 1)[0]
    spelt = chr(ord(first.text) + 50)  # the same token for this tokenizer, which reads it back otherwise
    assert letters.token_id(spelt, "target") == first.id
    assert flips(letters, FlipPair("the ice bear", spelt), [])


# --- the commands ---


def test_the_commands(tiny_folder, few_contexts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_tiny = ["--model", tiny_folder, "--device", "cpu"]
    model = load_model(tiny_folder, device="cpu")
    answer = model.predict("Rome is", 1)[0].text
    words = ["flip", "Rome is", "--to", " Paris", "--source", "Paris is"]
    done = RUN.invoke(main, [*words, "--save", "d.json", "--json", *of_tiny])
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["provenance"]["outcome"]["off_target_kl"] > 0.01
    assert result["edits"] == json.loads((tmp_path / "d.json").read_text())["edits"]
    assert Outcome.of(Recipe.load("d.json")).off_target_kl == result["provenance"]["outcome"]["off_target_kl"]
    shown = RUN.invoke(main, ["recipe", "show", "d.json"])
    assert result["edits"][0] in shown.stdout
    assert "off-target KL" in shown.stdout
    (tmp_path / "n.txt").write_text("Good night.\n\nThe bus is late.\n")
    suppressed = RUN.invoke(
        main, ["flip", "Rome is", "--suppress", "--top-k", "2", "--held-out", "n.txt", "--save", "a.json", *of_tiny]
    )
    assert f"not {answer}" in suppressed.stdout, suppressed.stderr
    half = RUN.invoke(main, ["recipe", "combine", "d.json", "--share", "0.5", "--save", "h.json"])
    assert half.exit_code == 0, half.stderr
    assert Recipe.load("h.json").edits[0].share == 0.5
    result = json.loads((tmp_path / "d.json").read_text())
    record = result["provenance"]["flip"]
    for changes in ({"top_k": 0}, {"top_k": True}, {"phrase": []}, {"phrase": [-1]}, {"prompt": 3.5}, {"text": 4}):
        broken = {**result, "provenance": {"flip": {**record, **changes}}}
        with pytest.raises(IcebearError):
            outcome_of(model, Recipe.from_dict(broken))
    vector = {**result, "edits": [{"layer": 1, "vector": [1.0]}]}  # which no flip finds
    with pytest.raises(IcebearError):
        outcome_of(model, Recipe.from_dict(vector))
    big = {**result["provenance"]["outcome"], "off_target_kl": 10**400}
    outcomes = ({"outcome": value} for value in (3, {"contexts": 3}, big))
    for broken in ({"flip": 3}, {"flip": {**record, "neurons": [{}]}}, {"flip": {}}, *outcomes):
        (tmp_path / "b.json").write_text(json.dumps({**result, "provenance": broken}))
        wrong = RUN.invoke(main, ["recipe", "show", "b.json"])
        assert wrong.exit_code == 1
        assert "cannot be read" in wrong.stderr or "is not JSON" in wrong.stderr
    assert RUN.invoke(main, ["flip", "Rome is"]).exit_code == 2
    assert RUN.invoke(main, ["flip", "Rome is", "--to", " Paris", "--top-k", "3"]).exit_code == 2
    for text, message in (("", "text"), ("a", "shorter")):
        (tmp_path / "n.txt").write_text(text)
        wrong = RUN.invoke(main, ["flip", "Rome is", "--suppress", "--held-out", "n.txt", *of_tiny])
        assert (wrong.exit_code, message in wrong.stderr) == (1, True)
    unread = RUN.invoke(main, ["flip", "Rome is", "--suppress", "--held-out", "none", *of_tiny])
    assert (unread.exit_code, "cannot be read" in unread.stderr) == (1, True)
    for command in (["recipe", "combine", "d.json"], ["flip", "Rome is", "--to", answer, *of_tiny]):
        nowhere = RUN.invoke(main, [*command, "--save", "no/x.json"])
        assert (nowhere.exit_code, "cannot be written" in nowhere.stderr) == (1, True)
    assert nowhere.stdout == "", "the path is checked before the work"


def test_the_commands_of_evaluations(tiny_folder, few_contexts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of_tiny = ["--model", tiny_folder, "--device", "cpu"]
    (tmp_path / "f.json").write_text(json.dumps([{"prompt": "Rome is", "to": " A"}]))
    flips = RUN.invoke(main, ["evaluate", "flips", "--data", "f.json", "--out", "f", *of_tiny])
    assert "medians over flips" in flips.stdout, flips.stderr
    assert '"flipped": true' in (tmp_path / "f" / "samples.jsonl").read_text()
    for text, message in (("nothing", "JSON"), ("[{}]", "JSON")):
        (tmp_path / "x.json").write_text(text)
        wrong = RUN.invoke(main, ["evaluate", "flips", "--data", "x.json", "--out", "f", *of_tiny])
        assert (wrong.exit_code, message in wrong.stderr) == (1, True)


def test_the_outcome_of_a_flip_is_what_its_edits_do(smol, desert, few_contexts):
    """The text is what the model writes under the edits, and the outcome is read back from the recipe's file."""
    outcome = outcome_of(smol, desert)
    with steer(smol, desert):
        text = smol.generate(ICE_BEAR, FEW["icebear.steering.outcome.NEW_TOKENS"])
    assert (outcome.old.number, outcome.control.number) == ("P(' Arctic')", "P(' desert')")
    assert (outcome.edited, outcome.reached, outcome.as_far) == (text, True, 0)
    saved = desert.noting(**outcome.provenance())
    assert Outcome.of(Recipe.from_json(saved.to_json())) == outcome
    with pytest.raises(InputError):
        outcome_of(smol, Recipe.for_model(smol, "by hand", ["L29.ffn.860=-20"]))


def test_the_outcome_has_the_probabilities_under_each_draw(letters, few_contexts):
    """Those of all draws, which are rows of one batch, are those of a pass each."""
    prompt = "the ice bear"
    phrase = next_best(letters, prompt, 3, 2)
    recipe = flip(letters, prompt, "".join(map(letters.text, phrase)), max_neurons=20)
    outcome, first = outcome_of(letters, recipe), FlipRecord.of(recipe).before[0].id
    draws = random_edits(letters, list(recipe), RANDOM_DRAWS)
    assert len(outcome.control.drawn) == len(draws) > 10
    new, old = ((one.before, one.after, *one.drawn) for one in (outcome.control, outcome.old))
    for edits, wanted, replaced in zip(([], recipe, *draws), new, old, strict=True):
        logs = phrase_logits(letters, edits, prompt, phrase).log_softmax(-1)
        assert wanted == pytest.approx(phrase_probability(letters, edits, prompt, phrase), abs=1e-6)
        assert replaced == pytest.approx(logs[0, first].exp().item(), abs=1e-6)
    assert outcome.reached
    assert outcome.as_far == sum(flip_holds(letters, edits, prompt, phrase) for edits in draws)


def test_a_suppressed_answer_has_the_control_of_a_wanted_one(letters, few_contexts):
    """Of a pass for each draw, whether the answer leaves the most probable tokens."""
    prompt = "the ice bear"
    recipe = flip(letters, prompt, suppress=True, top_k=2, max_neurons=20)
    outcome, record = outcome_of(letters, recipe), FlipRecord.of(recipe)
    draws = random_edits(letters, list(recipe), RANDOM_DRAWS)
    assert (outcome.reached, outcome.control) == (True, outcome.old)
    assert outcome.as_far == sum(flip_holds(letters, edits, prompt, record.phrase, 2) for edits in draws)
    assert outcome.control.after == pytest.approx(phrase_probability(letters, recipe, prompt, record.phrase), abs=1e-6)
    assert len(outcome.random_off_target_kl) == FEW["icebear.steering.outcome.KL_DRAWS"]


def test_a_flip_shows_the_sentences_of_its_neurons(model, corpus, tmp_path):
    state = _start(FlipRequest(model, "the ice bear"), (7,))
    edit = Edit(Neuron(2, "ffn", 13), "set", 5.0, where="last")
    with open_store(tmp_path / "i.db", create=True) as store:
        build_index(model, corpus, store, k=5)
        (row,) = _neurons(state, [edit], store)
        assert row.examples == tuple(e.sentence.text for e in store.examples(edit.neuron, "+", 3))

"""Answers: spans, phrases, units, source_breakdown."""

import pytest
import torch
from conftest import IDS, LLAMA, LLAMA_BIASES, Double, Letters, random_model
from hypothesis import given
from hypothesis import strategies as st
from test_chat import MODELS

from icebear import ATTNLRP, CP_LRP, Chat, Model, attribute, matrix, source_breakdown, units
from icebear.concepts.answers.units import units_of
from icebear.concepts.attribution.attribute import explain_requests
from icebear.concepts.attribution.request import AttributionRequest
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Logits, forward_backward, new_accounting
from icebear.errors import InputError
from icebear.models.objective import objective_of
from icebear.models.text.answer import Answer, read_span
from icebear.models.text.prompts import Prompt, PromptRequest

WRITTEN = (11, 4, 7, 30, 2, 9)
OTHER = [7, 3, 15, 40, 5, 3, 21, 9]


@pytest.fixture(scope="module")
def model():
    return random_model(LLAMA)


@pytest.fixture(scope="module")
def answer(model):
    return Answer(tuple(IDS), WRITTEN, model.pieces(WRITTEN), (0.5,) * 6, True)


def close(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-9)


# --- spans ----------------------------------------------------------------------------------------------


def test_a_span_of_one_token_is_its_attribution(model, answer):
    result = attribute(model, answer, span=(3, 4))
    plain = attribute(model, [*IDS, *WRITTEN[:3]], WRITTEN[3])
    assert torch.equal(result.tokens, plain.tokens)
    assert torch.equal(result.ffn, plain.ffn)
    assert result.target == plain.target
    assert result.prompt.answer_start == len(IDS)
    against = attribute(model, answer, contrast=8, span=(3, 4))
    assert torch.equal(against.tokens, attribute(model, [*IDS, *WRITTEN[:3]], WRITTEN[3], contrast=8).tokens)


@pytest.mark.parametrize("number", ["log-odds", "logit"])
def test_a_span_is_the_sum_of_its_tokens(model, answer, number):
    with Double():
        whole = attribute(model, answer, span=(1, 5), number=number)
        parts = [attribute(model, answer, span=(place, place + 1), number=number) for place in range(1, 5)]
    for name in ("tokens", "ffn", "attn"):
        own = getattr(whole, name)
        sums = torch.zeros_like(own)
        for part in parts:
            read = getattr(part, name)
            if name == "tokens":
                sums[: len(read)] += read
            else:
                sums[:, : read.shape[1]] += read
        assert close(sums, own)
    assert whole.conservation().target == pytest.approx(sum(part.conservation().target for part in parts), abs=1e-9)


@pytest.mark.parametrize("other", [(4, 8), (4, 8, 9, 1), (12,)])
def test_a_phrase_against_another_one_is_a_second_run_subtracted(model, answer, other):
    """On the common prompt; of different lengths by the means of centred logits."""
    before = [*IDS, *WRITTEN[:1]]
    with Double():
        result = attribute(model, answer, contrast=[other], span=(1, 3))
        rows = [
            PromptRequest(Prompt.of(before), tuple(ids), is_phrase=True, kind="centered-logit")
            for ids in (WRITTEN[1:3], other)
        ]
        runs = explain_requests(
            AttributionRequest(model, tuple(rows), ATTNLRP, ("ffn", "attn"), "all", None, None, True)
        )
    weights = [1, 1] if len(other) == 2 else [1 / 2, 1 / len(other)]
    here, there = (run.tokens * weight for run, weight in zip(runs, weights, strict=True))
    wanted = here.clone()
    wanted[: len(before)] -= there[: len(before)]
    assert close(result.tokens, wanted)
    assert close(result.contrast_phrase.tokens, there[len(before) :])
    numbers = [run.conservation().target * weight for run, weight in zip(runs, weights, strict=True)]
    assert result.conservation().target == pytest.approx(numbers[0] - numbers[1], abs=1e-9)
    assert result.conservation().tokens == pytest.approx(
        (result.tokens.sum() - result.contrast_phrase.tokens.sum()).item(), abs=1e-9
    )
    neurons = runs[0].ffn * weights[0]
    neurons[:, : len(before)] -= runs[1].ffn[:, : len(before)] * weights[1]
    assert close(result.ffn, neurons)


def test_phrases_of_a_batch_are_explained_as_alone(model):
    """Also where some are compared by means, since they have other lengths."""
    phrases, others = [(4, 8), (4, 8)], [(7, 9), (7, 9, 1)]
    both = attribute(model, [IDS, IDS], target_text=phrases, contrast=others)
    for result, phrase, other in zip(both, phrases, others, strict=True):
        alone = attribute(model, IDS, target_text=[phrase], contrast=[other])
        assert result.conservation().target == alone.conservation().target
        assert torch.equal(result.tokens, alone.tokens)
    with pytest.raises(InputError, match="pa-lrp"):
        attribute(model, IDS, target_text=[(4, 8)], contrast=[(7, 9)], method="pa-lrp")


def test_a_phrase_against_another_one_and_another_prompt(model, answer):
    result = attribute(model, answer, contrast=[(4, 8)], span=(1, 3), counterfactual=OTHER)
    output = result.conservation_text()
    numbers = [
        attribute(model, [*ids, WRITTEN[0]], target_text=[WRITTEN[1:3]], contrast=[(4, 8)]) for ids in (IDS, OTHER)
    ]
    here, there = (one.conservation().target for one in numbers)
    assert f"Difference {here - there:z.3f}: {here:z.3f} in the prompt, {there:z.3f} in the counterfactual" in output


def test_compared_with_another_prompt_both_go_on_alike(model, answer):
    result = attribute(model, answer, contrast=8, span=(2, 3), counterfactual=OTHER)
    plain = attribute(model, [*IDS, *WRITTEN[:2]], WRITTEN[2], 8, counterfactual=[*OTHER, *WRITTEN[:2]])
    assert torch.equal(result.tokens, plain.tokens)
    several = attribute(model, answer, span=(2, 4), counterfactual=OTHER)
    assert several.conservation().tokens == pytest.approx(several.conservation().target, abs=1e-4)


def test_every_explained_position_is_ranked(model, answer):
    result = attribute(model, answer, span=(1, 4))
    sums = result.ffn[:, list(result.prompt.target_positions)].sum(1)
    assert result.prompt.target_positions == tuple(range(len(IDS), len(IDS) + 3))
    best = result.top(1, "ffn")[0]
    assert best.relevance == pytest.approx(sums.max().item())


@pytest.mark.parametrize("span", [(3, 3), (-1, 2), (0, 7), (5, 2), "not there", "  "])
def test_spans_that_are_none(model, answer, span):
    with pytest.raises(InputError):
        attribute(model, answer, span=span)


def test_what_else_is_refused(model, answer):
    with pytest.raises(InputError, match="span"):
        attribute(model, IDS, span=(0, 1))
    with pytest.raises(InputError, match="target"):
        attribute(model, answer, 3)
    with pytest.raises(InputError, match="contrast"):
        attribute(model, IDS, target_text=[(1, 2)], contrast=[(1, 2)])


def test_phrases_are_found_by_their_text():
    own = Answer((1,), (5, 6, 7, 8), ("In", " the", " Arc", "tic."), (1.0,) * 4, True)
    assert own.token_range("the Arctic") == own.token_range(" the Arctic ") == (1, 4)
    assert own.token_range("In") == (0, 1)
    assert own.token_range("tic") == (3, 4)
    assert own.token_range() == (0, 4)
    assert own.token_range("1:3") == (1, 3)
    character = Answer((1,), (5, 6, 7, 8), ("the", "", "", "😀 he 3:5"), (1.0,) * 4, True)
    assert character.token_range("😀") == (1, 4)
    assert character.token_range("he") == (1, 4)  # not inside of "the"
    assert character.token_range("3:5") == (1, 4)  # a phrase before tokens
    assert read_span("3:5") == read_span("3-5") == (3, 5)
    for phrase in ("a 3:5", "²-3", "9" * 5000 + ":3"):
        assert read_span(phrase) == phrase


# --- answers --------------------------------------------------------------------------------------------


def test_an_answer_is_what_is_generated(smol):
    chat = Chat([{"role": "user", "content": "Where do ice bears live?"}])
    seen = []
    answer = smol.answer(chat, max_new_tokens=8, on_token=lambda ids: seen.append(len(ids)))
    assert answer.text == smol.generate(chat, max_new_tokens=8)
    assert answer.prompt_ids == tuple(smol.ids(chat))
    assert seen == list(range(1, 9))
    assert not answer.ended
    for place in (0, 5):
        logits = smol.next_logits(answer.before(place))
        assert answer.probabilities[place] == pytest.approx(logits.softmax(-1)[answer.ids[place]].item(), abs=1e-4)
    follow = answer.chat.then("user", "And camels?")
    assert smol.ids(follow)[: len(answer.before(8))] == answer.before(8)
    ended = smol.answer([{"role": "user", "content": "Hi"}], max_new_tokens=20)
    assert ended.ended
    assert len(ended.ids) < 20
    assert "<|im_end|>" not in ended.text
    with pytest.raises(InputError, match="Chat"):
        _ = smol.answer("The ice bear", max_new_tokens=2).chat


def test_an_answer_that_was_begun_goes_on(smol):
    begun = Chat([{"role": "user", "content": "Where do ice bears live?"}, {"role": "assistant", "content": "In the"}])
    answer = smol.answer(begun, max_new_tokens=3)
    assert answer.chat.messages[-1]["content"] == "In the" + answer.text


# --- units ----------------------------------------------------------------------------------------------


def test_units_add_up_and_cover_all():
    model = MODELS["qwen"]
    chat = Chat([{"role": "user", "content": "Ann is in Rome. Tom is in Oslo.\n\nSecond text. Where is Tom?"}])
    answer = model.answer(chat, max_new_tokens=12)
    result = attribute(model, answer, sites=())
    for by in ("token", "word", "sentence", "message", "document"):
        parts = units(result, by)
        assert [place for unit, _ in parts for place in range(unit.start, unit.stop)] == list(range(len(result.tokens)))
        assert sum(value for _, value in parts) == pytest.approx(result.tokens.sum().item(), abs=1e-4)
        assert "".join(unit.text for unit, _ in parts) == result.prompt.text

    def request_of(by):
        return [unit.text.strip() for unit, _ in units(result, by) if unit.turn == "user" and not unit.template]

    assert request_of("sentence") == ["Ann is in Rome.", "Tom is in Oslo.", "Second text.", "Where is Tom?"]
    assert request_of("document") == ["Ann is in Rome. Tom is in Oslo.", "Second text. Where is Tom?"]
    assert len(request_of("message")) == 1
    with pytest.raises(InputError, match="'page'"):
        units(result, "page")


@given(
    st.lists(st.text("ab .\n", max_size=4), min_size=1, max_size=12), st.sampled_from(["word", "sentence", "document"])
)
def test_units_of_any_text_cover_it(pieces, by):
    result = units_of(pieces, (), None, by)
    assert [place for unit in result for place in range(unit.start, unit.stop)] == list(range(len(pieces)))


def answered(question, text):
    """A random model with a template, and a text as its answer."""
    model = MODELS["qwen"]
    ids = tuple(model.tokens_of(text))
    prompt = tuple(model.ids(Chat([{"role": "user", "content": question}])))
    return model, Answer(prompt, ids, model.pieces(ids), (0.5,) * len(ids), True)


def test_a_matrix_row_is_a_span():
    model, answer = answered("Tell me a story of a bear.", "It is cold. He is big. So")
    result = matrix(model, answer)
    assert [row.turn for row in result.rows] == ["answer"] * len(result.rows)
    assert len(result.rows) > 1
    for row, values in zip(result.rows, result.values, strict=True):
        span = (row.start - len(answer.prompt_ids), row.stop - len(answer.prompt_ids))
        plain = attribute(model, answer, span=span, sites=(), number="logit").tokens
        wanted = [plain[part.start : part.stop].sum().item() for part in result.columns]
        assert values.tolist() == pytest.approx(wanted, abs=2e-3)
    assert result.to_frame().shape == tuple(result.values.shape)


# --- source_breakdown --------------------------------------------------------------------------------------------


def test_origins_add_up():
    """By CP-LRP; what goes through FFN neurons is what is missing where they are blocked."""
    model, answer = answered("Ann is in Rome. Tom is in Oslo. Where is Tom?", "In Oslo")
    result = source_breakdown(model, answer)
    names = [part.name for part in result.parts]
    assert names == ["template", "context", "question", "the answer's own start"]
    assert abs(result.remainder) < 1e-3 * abs(result.target)
    plain = attribute(model, answer, method=CP_LRP, sites=(), number="logit")
    assert result.target == pytest.approx(plain.conservation().target, rel=1e-5)
    user = next(turn for turn in plain.prompt.turns if turn.role == "user")
    text = sum(part.positive + part.negative for part in result.parts if part.name in ("context", "question"))
    assert text == pytest.approx(plain.tokens[user.text_start : user.text_stop].sum().item(), abs=1e-3)


def test_origins_with_biases_and_another_prompt():
    """Through FFN neurons goes what is missing where no relevance passes them; the drop is that of the same number."""
    made = Model(random_model(LLAMA_BIASES).net, Letters(), "letters")
    answer = Answer(tuple(IDS), WRITTEN, made.pieces(WRITTEN), (0.5,) * 6, True)
    for span in ((0, 2), (3, 4)):
        with Double():
            result = source_breakdown(made, answer, span, counterfactual=OTHER)
            plain = attribute(made, answer, span=span, method=CP_LRP, sites=(), number="logit").tokens.sum()
            hooks = [
                layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
                for layer in made.net.model.layers
            ]
            past = attribute(made, answer, span=span, method=CP_LRP, sites=(), number="logit").tokens.sum()
            for hook in hooks:
                hook.remove()
        assert abs(result.remainder) < 1e-6
        assert abs(result.biases) > 1e-3
        assert result.through_ffn == pytest.approx(((plain - past) / result.target).item(), abs=1e-9)
        assert result.drop == pytest.approx(1 - without_ffn(made, answer, span) / result.target, abs=1e-4)


@pytest.mark.parametrize(("span", "contrast"), [((1, 2), 7), ((1, 3), (5, 9)), ((0, 2), (4, 8, 20)), ((2, 4), 31)])
def test_the_sources_of_a_difference_are_the_differences_of_the_sources(span, contrast):
    """Each part is that of the answer minus that of an answer that says the contrast; means if the lengths differ."""
    made = Model(random_model(LLAMA_BIASES).net, Letters(), "letters")
    start, stop = span
    other = contrast if isinstance(contrast, tuple) else (contrast,)

    def written(ids):
        return Answer(tuple(IDS), ids, made.pieces(ids), (0.5,) * len(ids), True)

    def slow(ids, kind):
        """Relevance (T,) and biases of the sum of logits, centered or not, of all tokens from `start` on."""
        objective = objective_of(made, [Prompt(ids=(*IDS, *ids[:start]))], target_text=[ids[start:]], kind=kind)
        inputs, sums = Inputs(), new_accounting(made, 1)
        numbers, _ = forward_backward(made, Logits(objective), [inputs], CP_LRP, accounting=sums)
        return inputs.relevance()[0][0], sums["biases"][0].item(), numbers[0].item()

    with Double():
        text = contrast if isinstance(contrast, int) else "".join(made.pieces(other))
        result = source_breakdown(made, written(WRITTEN[:stop]), span, contrast=text)
        kind = "logit" if stop - start == len(other) == 1 else "centered-logit"
        kind = kind if stop - start == len(other) else "mean-centered-logit"
        own, against = (slow((*WRITTEN[:start], *ids), kind) for ids in (WRITTEN[start:stop], other))
    assert result.target == pytest.approx(own[2] - against[2], abs=1e-9)
    assert abs(result.remainder) < 1e-6
    assert result.biases == pytest.approx(own[1] - against[1], abs=1e-9)
    parts = {part.name: part.total for part in result.parts}
    before = len(IDS) + start
    assert sum(parts.values()) == pytest.approx((own[0].sum() - against[0].sum()).item(), abs=1e-9)
    assert parts.get("the contrast's own start", 0.0) == pytest.approx(-against[0][before:].sum().item(), abs=1e-9)
    prompt = own[0][: len(IDS)].sum() - against[0][: len(IDS)].sum()
    outside = sum(value for name, value in parts.items() if "start" not in name)
    assert outside == pytest.approx(prompt.item(), abs=1e-9)
    with pytest.raises(InputError):
        source_breakdown(made, written(WRITTEN[:stop]), span, counterfactual=OTHER, contrast=contrast)


def without_ffn(model, answer, span):
    """The sum of logits with every FFN neuron as it is behind the other prompt."""
    seen = {}
    modules = [layer.mlp.down_proj for layer in model.net.model.layers]
    rows = [[*prompt, *answer.ids[: span[1] - 1]] for prompt in (OTHER, answer.prompt_ids)]
    for ids, change in ((rows[0], False), (rows[1], True)):
        hooks = [
            module.register_forward_pre_hook(
                lambda module, args, change=change: (seen[module],) if change else seen.update({module: args[0]})
            )
            for module in modules
        ]
        with torch.no_grad():
            logits = model.net(torch.tensor([ids])).logits[0]
        for hook in hooks:
            hook.remove()
    begin = len(answer.prompt_ids) - 1
    return sum(logits[begin + place, answer.ids[place]].item() for place in range(*span))


# --- the number that is explained -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["attnlrp", "cp-lrp", "gxi"])
def test_by_default_it_is_the_log_odds_number(model, method):
    """Relevance is linear in the logits read: that of the target less that of each other token by its probability."""
    with Double():
        result = attribute(model, IDS, 7, method=method, sites=())
        logits = model.logits(model.read_ids([list(IDS)]), [len(IDS) - 1])[0, 0].double().detach()
        others = logits.clone()
        others[7] = -torch.inf
        weights = others.softmax(-1)
        reference = attribute(model, IDS, 7, method=method, sites=(), number="logit").tokens.clone()
        for token, weight in enumerate(weights.tolist()):
            if token != 7:
                reference -= weight * attribute(model, IDS, token, method=method, sites=(), number="logit").tokens
    assert close(result.tokens, reference)
    assert result.conservation().target == pytest.approx((logits[7] - weights @ logits).item(), abs=1e-6)
    assert result.prediction.objective == "log-odds"
    assert "against all others" in result.conservation_text()
    p = logits.softmax(-1)[7]
    odds = torch.autograd.functional.jacobian(lambda z: torch.logit(z.softmax(-1)[7]), logits)
    assert torch.allclose(odds, torch.nn.functional.one_hot(torch.tensor(7), len(logits)) - weights, atol=1e-9)
    assert 0 < p < 1


def test_what_the_number_is_against_is_said_once(model):
    for options in ({"contrast": 8}, {"counterfactual": OTHER}):
        assert attribute(model, IDS, 7, **options).prediction.objective == "logit"
        with pytest.raises(InputError):
            attribute(model, IDS, 7, number="log-odds", **options)
    with pytest.raises(InputError, match="'odds'"):
        attribute(model, IDS, 7, number="odds")


@pytest.mark.parametrize(
    "make", [list, tuple, torch.tensor, lambda ids: [tuple(ids)]], ids=["list", "tuple", "tensor", "of one"]
)
def test_token_ids_as_a_phrase(model, make):
    """However they are given, for one prompt or for each of several."""
    phrase = [7, 8, 9]
    right = attribute(model, [*IDS], target_text=tuple(phrase))
    got = attribute(model, [*IDS], target_text=make(phrase))
    assert torch.equal(got.tokens, right.tokens)
    if make is list:
        for row in attribute(model, [IDS, IDS], target_text=phrase):
            assert close(row.tokens, right.tokens)

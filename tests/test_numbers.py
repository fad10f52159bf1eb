"""Numbers of others: gold spans, subjects and answers of ten rows of each public data set, and the measures by hand."""

from itertools import islice

import pytest
import torch

from benchmarks.numbers import agreement, bipia, common, dpa, function_vectors, knowledge_neurons, ravel

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not common.DATA.exists(), reason="the data of others, ../shared/data, is not here"),
]
TEN = 10


def begins(model, prompt, answer):
    """Whether the answer's first token, with its space, is how the text goes on after the prompt."""
    token = common.answer_token(model, prompt, answer)
    text = model.text(token)
    return text.startswith(" ") and f" {answer}".startswith(text) and not prompt.endswith(" ")


# --- data ---


def test_dpa_facts_have_their_answers_first_token_and_other_subjects(smol):
    rows = common.read("dpa/known_1000.json")
    for row, others in islice(dpa.known(rows, 0), TEN):
        assert begins(smol, row["prompt"], row["answer"])
        assert row["prompt"] not in others
    for row in rows[:TEN]:
        assert row["prompt"].count(row["subject"]) >= 1


def test_dpa_indirect_objects_are_compared_with_the_receiver_as_giver(smol):
    for row, (other,) in islice(dpa.indirect_objects(common.read("dpa/ioi.json"), 0), TEN):
        assert begins(smol, row["prompt"], row["answer"])
        words, others = row["prompt"].split(), other.split()
        (changed,) = [pair for pair in zip(words, others, strict=True) if pair[0] != pair[1]]
        assert changed[1] == row["answer"]
        assert words.count(changed[0]) == 1 + others.count(changed[0])


def test_knowledge_subjects_end_at_their_token_in_every_wording(smol):
    for one in islice(knowledge_neurons.questions(0), TEN):
        for frame in one.frames:
            wording = knowledge_neurons.worded(frame, one.subject, one.answer)
            start, end = wording.span
            assert wording.prompt[start:end] == one.subject
            assert not wording.prompt.endswith(" ")
            assert not {"[X]", "[Y]", "{}"} & set(wording.prompt.split())
            at = knowledge_neurons.subject_at(smol, wording)
            ids = smol.token_ids(wording.prompt)
            read = "".join(map(smol.text, ids[: at + 1]))
            assert read.startswith(wording.prompt[:end])
            assert not "".join(map(smol.text, ids[:at])).startswith(wording.prompt[:end])
        assert all(answer != one.answer for _, answer in one.others)


@pytest.mark.parametrize("name", agreement.SETS)
def test_agreement_pairs_differ_in_one_token_and_their_answers_are_single(smol, name):
    for pair in agreement.pairs(name, 0)[:TEN]:
        ids, others = smol.token_ids(pair.prompt), smol.token_ids(pair.counterfactual)
        if len(ids) == len(others):
            assert sum(a != b for a, b in zip(ids, others, strict=True)) == 1
        for answer in (pair.answer, pair.counterfactual_answer):
            assert len(smol.continuation(answer, pair.prompt)) == 1


def test_agreement_prompts_are_in_one_pair_only():
    prompts = [text for pair in agreement.pairs("nounpp", 0) for text in (pair.prompt, pair.counterfactual)]
    assert len(prompts) == len(set(prompts))


def test_ravel_answers_follow_their_prompts_with_a_space(smol):
    for one in islice(ravel.questions(0), TEN):
        for name, frames in one.frames.items():
            for frame in frames:
                assert begins(smol, frame % one.city, ravel.values_of(one.city)[name])


@pytest.mark.parametrize("task", function_vectors.tasks() if common.DATA.exists() else [])
def test_function_vector_examples_keep_their_tokens_and_lose_their_answers(smol, task):
    part = function_vectors.split(smol, task, 0)
    assert len(part.queries) > TEN / 2
    for (clean, answer), (reordered, same) in zip(part.clean, part.reordered, strict=True):
        assert answer == same
        assert sorted(smol.token_ids(clean)) == sorted(smol.token_ids(reordered))
        assert clean.rpartition("\n\n")[2] == reordered.rpartition("\n\n")[2]
        assert begins(smol, clean, answer)
    asked = {prompt for prompt, _ in part.queries}
    choosing = {f"Q:{line}" for prompt, _ in (*part.means, *part.clean) for line in prompt.split("Q:")[1:]}
    assert not asked & {line.partition("A:")[0] + "A:" for line in choosing}


def test_bipia_spans_are_their_tokens_and_leave_with_them(smol):
    for item in islice(bipia.items(0), TEN):
        ids = smol.ids(bipia.chat(smol, item.user()))
        spans = bipia.span_tokens(smol, item)
        flat = [token for tokens in spans for token in tokens]
        assert flat == sorted(set(flat))
        for text, tokens in zip(item.spans, spans, strict=True):
            read = "".join(smol.text(ids[at]) for at in tokens)  # a token that is a space alone is in no span
            assert "".join(read.split()) == "".join(text.split())
        injected = item.spans[item.injected]
        assert item.user().replace(injected, "", 1).split() == item.user(item.injected).split()


def test_a_space_alone_is_no_right_answer(smol):
    prompt = "The first of January is the day"
    space = smol.text(common.answer_token(smol, prompt, "1"))
    assert space == " "
    assert common.first_tokens(smol, ["My phone number is"]) == [common.answer_token(smol, "My phone number is", "5")]
    assert not common.is_right(smol, "My phone number is", "5")
    assert common.is_right(smol, "The capital of France is", "Paris")


# --- measures ---


def test_areas_of_curves_by_hand():
    half = torch.full((20,), 50.0)
    areas = dpa.areas(half, list(dpa.SHARES))
    # Disrupt has (0, 100) before its tenth points, and recover (1, 100) at its last one.
    assert areas["disrupt"] == pytest.approx(50 * 0.9 + 75 * 0.1)
    assert areas["recover"] == pytest.approx(50 * 0.9)
    assert dpa.areas(half, [torch.tensor(x).log().item() for x in dpa.PART_SHARES])["score"] < 0


def test_the_right_order_of_tokens_scores_best_and_the_reverse_worst():
    carries = torch.tensor([0.0, 1.0, 0.0, 0.0])
    measure = lambda zero: 0.5 * (~zero[:, 1]).float()  # noqa: E731  # only token 1 matters
    scores = {"right": carries, "reverse": -carries, "late": torch.arange(4.0)}
    rows = dpa.curves(scores, dpa.SHARES, 0.5, measure)
    assert rows["right"]["score"] > rows["late"]["score"] > rows["reverse"]["score"]
    assert rows["right"]["disrupt"] == pytest.approx(5)  # gone from the first tenth on
    assert rows["right"]["recover"] == pytest.approx(90)


def test_spans_are_ranked_by_their_sums_and_recovered_by_their_tokens():
    spans = [[2, 3, 4], [5, 6], [8, 9, 10, 11, 12]]
    values = torch.zeros(14)
    values[[5, 8]] = torch.tensor([3.0, 2.0])
    values[13] = 9.0  # the question: no span
    right = bipia.numbers(values, spans, 1)
    assert right["first"] == right["rank"] == 1
    assert right["recovery 5%"] == right["recovery 10%"] == 0.5
    assert bipia.numbers(values, spans, 0)["rank"] == pytest.approx(1 / 3)

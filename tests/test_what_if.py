"""What if: which word is explained, what exchanges change, and how the table and the comparisons are chosen."""

import json
import shlex
from itertools import pairwise
from statistics import median

import pytest
import torch
from test_cli import RUN, run

from icebear import what_if
from icebear.app.cli.main import main
from icebear.concepts.answers.comparisons import GOOD_SCORE, LOST, one_word
from icebear.concepts.answers.content_words import (
    APPENDED,
    LIKELY_SHARE,
    Reader,
    is_content,
    likely_words,
    words_of,
)
from icebear.concepts.answers.what_if import SHOWN_EACH, SHOWN_WORDS, look
from icebear.errors import InputError

CHEF = "The chef added salt to the"
PROMPTS = [
    CHEF,
    "2 + 2 =",
    "The president of the United States lives in the",
    "In 1945 the war ended, and the soldiers went",
    "Paris and Rome, the cities of",
]


@pytest.fixture(scope="module")
def found(smol):
    return {prompt: look(smol, prompt) for prompt in PROMPTS}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        *(
            (" Paris", True),
            ("ice", True),
            (" 1945", True),
            ("7", True),
            (" हिन्दी", True),
            ("海", True),
            (" über", True),
        ),
        *((" the", False), ("The", False), (" of", False), (",", False), ("", False), (" ", False), (" ok", False)),
        *(("don't", False), ("a1", False), ("\ufffd", False), ("<|im_end|>", False)),
    ],
)
def test_content_words(text, right):
    assert is_content(text) is right


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["The", " ca", "bin", "et", ",", " she", " said"], ["The", " cabinet", " she", " said"]),
        (["1", "9", "4", "5", " (", "Rome", ")", "."], ["1945", "Rome"]),
        ([" don", "'", "t", "  ", "x"], [" don", "t", "x"]),
        ([], []),
    ],
)
def test_words_are_without_the_punctuation_at_them(pieces, words):
    assert ["".join(pieces[slice(*span)]) for span in words_of(pieces)] == words


def slow_odds(model, ids, token):
    logits = model.next_logits(list(ids)).double()
    p = logits.softmax(-1)[token]
    return (p / (1 - p)).log().item()


def test_a_change_is_that_of_a_fresh_pass(smol, found):
    for prompt, result in found.items():
        ids, after = smol.token_ids(prompt), list(result.explained.after)
        before = slow_odds(smol, [*ids, *after], result.explained.token)
        assert "".join(smol.pieces(after)) == result.explained_after
        for row in result.exchanges[::4]:
            start, end = row.position, row.position + row.length
            assert len(row.tokens) == row.length
            assert "".join(smol.pieces(ids[start:end])).strip() == row.word
            changed = [*ids[:start], *row.tokens, *ids[end:]]
            assert smol.token_ids(row.text) == changed
            assert row.change == pytest.approx(
                slow_odds(smol, [*changed, *after], result.explained.token) - before, abs=1e-3
            )
            read = [*changed, *after, *row.likely.after]
            probability = smol.next_logits(read).softmax(-1)[row.likely.token].item()
            assert row.probability == pytest.approx(probability, rel=1e-3)


def test_the_explained_word_is_likely_and_a_content_word(smol, found):
    for prompt, result in found.items():
        ids, word = smol.token_ids(prompt), result.explained
        assert is_content(word.text), prompt
        assert len(word.after) <= APPENDED
        for at in range(len(word.after) + 1):
            probabilities = smol.next_logits([*ids, *word.after[:at]]).softmax(-1)
            if at < len(word.after):
                assert int(probabilities.argmax()) == word.after[at]
            else:
                assert probabilities[word.token] >= LIKELY_SHARE * probabilities.max()
        assert result.is_next == (not word.after and int(probabilities.argmax()) == word.token)
    assert found["2 + 2 ="].explained_after == " "


def test_many_prompts_together_are_each_alone(smol):
    ids = smol.token_ids(CHEF)
    reader = Reader(smol, ids)
    rows = [ids, [*ids[:3], 17, *ids[4:]], [5, *ids[1:]], ids[:4]]
    logits = reader.next_logits(rows)
    for row, values in zip(rows, logits, strict=True):
        assert torch.allclose(values, smol.next_logits(row), atol=2e-4)
    together = likely_words(reader, rows, logits)
    for row, values, word in zip(rows, logits, together, strict=True):
        (alone,) = likely_words(Reader(smol, row), [row], [values])
        assert (alone.token, alone.text, alone.after) == (word.token, word.text, word.after)


def test_the_table_and_its_control(found):
    for result in found.values():
        medians = [median(abs(row.change) for row in word) for word in result.words]
        assert medians == sorted(medians, reverse=True)
        for word in result.words:
            assert all(abs(a.change) >= abs(b.change) for a, b in pairwise(word))
        assert len(result.shown) <= SHOWN_WORDS * SHOWN_EACH
        others = [row.change for word in result.words[SHOWN_WORDS:] for row in word]
        assert result.control == ((min(others), max(others)) if len(result.words) >= SHOWN_WORDS + 2 else None)
        assert result.matters == any(abs(row.change) >= 1 for row in result.exchanges)
        document = result.to_dict()["exchanges"]
        assert sum(row["shown"] for row in document) == len(result.shown)
        assert [row["word"] for row in document] == [row.word for row in result.exchanges]


def test_a_comparison_loses_the_word_and_has_an_answer_of_its_own(smol):
    result = look(smol, "The capital of France is")
    assert {"Germany", "Spain"} <= {row.instead for row in result.comparisons}
    assert list(result.comparisons) == sorted(result.comparisons, key=lambda row: -row.score)
    for row in result.comparisons:
        assert row.score >= GOOD_SCORE
        assert row.change <= -LOST
        assert row.likely.token != result.explained.token
        assert not row.likely.after
        for word, other in ((row.word, row.instead), (row.answer, result.explained.text), (row.answer, row.instead)):
            assert not one_word(word.strip(), other.strip())


@pytest.mark.parametrize(
    ("word", "other", "same"),
    [("wrote", "writer", False), ("write", "writer", True), ("stealing", "steals", True), ("cat", "cats", True)],
)
def test_forms_of_one_word(word, other, same):
    assert one_word(word, other) is same


def test_numbers_and_phrases_are_exchanged_whole(found):
    words = {row.word for row in found["In 1945 the war ended, and the soldiers went"].exchanges}
    assert {"1945", "ended", "soldiers"} <= words
    for row in found["In 1945 the war ended, and the soldiers went"].exchanges:
        assert row.word != "1945" or row.instead.isdecimal()
    assert "United States" in {row.word for row in found["The president of the United States lives in the"].exchanges}
    assert {"Paris", "Rome"} <= {row.word for row in found["Paris and Rome, the cities of"].exchanges}


def test_of_a_chat_only_messages_are_exchanged(smol):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = smol.ids(chat)
    inside = {place for turn in smol.turns(ids) for place in range(turn.first, turn.last)}
    rows = look(smol, chat).exchanges
    assert {"capital", "France"} <= {row.word for row in rows}
    assert all(inside.issuperset(range(row.position, row.position + row.length)) for row in rows)


def test_a_frame_with_the_commands(smol, found):
    frame = what_if(smol, CHEF)
    assert list(frame["change"]) == [row.change for row in found[CHEF].exchanges]
    assert {"word", "position", "length", "instead", "tokens", "answer", "probability", "shown"} <= {*frame.columns}
    words = shlex.split(frame["command"].iloc[0])
    assert words[:3] == ["icebear", "explain", CHEF]
    assert words[words.index("--counterfactual") + 1] == found[CHEF].exchanges[0].text
    assert what_if(smol, ",").empty


def test_the_command_of_a_row_names_the_tokens_that_were_measured(smol, found):
    for result in found.values():
        for row in result.shown:
            _, _, prompt, *words = shlex.split(result.command(row))
            options = dict(zip(words[::2], words[1::2], strict=True))
            assert smol.token_ids(prompt) == [*smol.token_ids(result.prompt), *result.explained.after]
            target = options.get("--target")
            likeliest = int(smol.next_logits(prompt).argmax())
            assert (smol.answer_id(target, "target", prompt) if target else likeliest) == result.explained.token
            if "--contrast" in options:
                assert smol.answer_id(options["--contrast"], "contrast", prompt) == row.contrast


def test_other_models_are_refused(tmp_path):
    from test_tasks import make

    with pytest.raises(InputError, match="causal"):
        what_if(make("bert"), [1, 2, 3])


# --- the command ---


def test_the_command_has_all_exchanges(smol, found, few_contexts):
    document = json.loads(run("explain", CHEF, "--json"))
    assert document["explained_after"] == ""
    assert [row["instead"] for row in document["exchanges"]] == [row.instead for row in found[CHEF].exchanges]
    assert "stages" not in document
    prompt = "The capital of France is"
    document = json.loads(run("explain", prompt, "--json"))
    assert document["chosen_counterfactual"]["text"] == look(smol, prompt).comparisons[0].text
    assert "stages" in document
    alone = json.loads(run("explain", prompt, "--json", "--no-counterfactual"))
    assert alone["exchanges"] == document["exchanges"]
    assert "stages" not in alone
    assert "exchanges" not in json.loads(run("explain", CHEF, "--json", "--target", " soup"))


def test_the_next_token_is_explained_as_it_is_where_one_asks_for_it(smol, few_contexts):
    likeliest = smol.predict("2 + 2 =", 1)[0].text
    document = json.loads(run("explain", "2 + 2 =", "--json", "--next-token"))
    assert (document["target"]["text"], document["explained_after"]) == (likeliest, "")
    document = json.loads(run("explain", "2 + 2 =", "--json"))
    assert document["explained_after"] == " "
    assert document["target"]["text"].isdecimal()


def test_the_screen_has_the_table_with_its_commands(found, few_contexts):
    screen = run("explain", CHEF, "--no-counterfactual")
    assert str(found[CHEF]) in " ".join(screen.split())
    for number, row in enumerate(found[CHEF].shown, 1):
        assert f" {number} {row.word}" in screen
        assert f"{row.change:+.1f}" in screen
    assert "too few other words" in screen


def test_a_number_in_a_terminal_explains_that_row(found, few_contexts, monkeypatch):
    monkeypatch.setattr("icebear.app.cli.verbs.explain.is_terminal", lambda: True)
    result = RUN.invoke(main, ["explain", CHEF], input="1\n\n")
    row = found[CHEF].shown[0]
    assert result.exit_code == 0, result.output
    assert "Keep:" in result.output or "Not explained" in result.output
    assert row.text in result.output


def test_a_model_without_words_has_no_exchanges(tiny_folder, few_contexts):
    document = json.loads(run("explain", "Paris Rome A", "--model", tiny_folder, "--json"))
    assert isinstance(document["exchanges"], list)

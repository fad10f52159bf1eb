"""What if: which word is explained, what exchanges change, and how the table and the comparisons are chosen."""

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
import torch
from few import few_of
from test_cli import RUN, run

from icebear import Chat, Model, what_if
from icebear.app.cli.main import main
from icebear.concepts.answers import what_if as what_if_module
from icebear.concepts.answers.comparisons import GOOD_SCORE, LOST, one_word
from icebear.concepts.answers.content_words import first_content_word, is_content, words_of
from icebear.concepts.answers.likely_words import APPENDED, LIKELY_SHARE, Reader, likely_words
from icebear.concepts.answers.what_if import (
    SHOWN_EACH,
    SHOWN_WORDS,
    exchange_words,
    exchange_words_if_short,
    is_message,
)
from icebear.concepts.attribution.request import answer_request
from icebear.errors import InputError
from icebear.explanation.sentences import answer_sentence
from icebear.models.text.answer import read_span

CHEF = "The chef added salt to the"
WORDS = {
    "In 1945 the president of the United States went": {"1945", "president", "United States"},
    "In 1945 the war ended, and the soldiers went": {"1945", "ended", "soldiers"},
    "The president of the United States lives in the": {"United States"},
    "Paris and Rome, the cities of": {"Paris", "Rome"},
}
"""What is exchanged whole."""
PROMPTS = [CHEF, "2 + 2 =", *WORDS]


@pytest.fixture(scope="module", autouse=True)
def exchanged_once():
    """The exchanges of a prompt are the same in every command and page that makes them."""
    exchange, known = what_if_module._what_if, {}

    def once(model, source, next_token):
        key = model, repr(source), next_token
        if key not in known:
            known[key] = exchange(model, source, next_token)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(what_if_module, "_what_if", once)
        yield


@pytest.fixture(scope="module", params=few_of([3, len(PROMPTS)], 3), ids=str)
def found(request, smol):
    return {prompt: exchange_words(smol, prompt) for prompt in PROMPTS[: request.param]}


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
        for row in result.exchanges[::7]:
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


@pytest.mark.release
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
        medians = [median(row.change for row in word) for word in result.words]
        assert medians == sorted(medians)
        for word in result.words:
            assert all(a.change <= b.change for a, b in pairwise(word))
        assert len(result.shown) <= SHOWN_WORDS * SHOWN_EACH
        others = [row.change for word in result.words[SHOWN_WORDS:] for row in word]
        assert result.control == ((min(others), max(others)) if len(result.words) >= SHOWN_WORDS + 2 else None)
        assert result.matters == any(abs(row.change) >= 1 for row in result.exchanges)
        document = result.to_dict()["exchanges"]
        assert sum(row["shown"] for row in document) == len(result.shown)
        assert [row["word"] for row in document] == [row.word for row in result.exchanges]


def test_a_comparison_loses_the_word_and_has_an_answer_of_its_own(smol):
    result = exchange_words(smol, "The capital of France is")
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
    for prompt in WORDS.keys() & found.keys():
        assert {row.word for row in found[prompt].exchanges} >= WORDS[prompt]
        for row in found[prompt].exchanges:
            assert row.word != "1945" or row.instead.isdecimal()


@pytest.mark.release
def test_of_a_chat_only_messages_are_exchanged(smol):
    """As a list, not as a `Chat`."""
    chat = [{"role": "user", "content": FRANCE}]
    ids = smol.ids(chat)
    inside = {place for turn in smol.turns(ids) for place in range(turn.text_start, turn.text_stop)}
    rows = exchange_words(smol, chat).exchanges
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


@pytest.mark.release
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
    chosen = exchange_words(smol, prompt).comparisons[0]
    assert (document["chosen_counterfactual"]["text"], document["contrast"]["id"]) == (chosen.text, chosen.contrast)
    assert "stages" in document
    alone = json.loads(run("explain", prompt, "--json", "--no-counterfactual"))
    assert alone["exchanges"] == document["exchanges"]
    assert "stages" not in alone
    assert "exchanges" not in json.loads(run("explain", CHEF, "--json", "--target", " soup"))


def test_the_next_token_is_explained_as_it_is_where_one_asks_for_it(smol, few_contexts):
    likeliest = smol.predict("2 + 2 =", 1)[0].text
    document = json.loads(run("explain", "2 + 2 =", "--json", "--next-token"))
    assert (document["target"]["text"], document["explained_after"]) == (likeliest, "")


@pytest.mark.release
def test_else_the_content_word_after_it_is_explained(smol, few_contexts):
    document = json.loads(run("explain", "2 + 2 =", "--json"))
    assert document["explained_after"] == " "
    assert document["target"]["text"].isdecimal()


def test_the_answer_hangs_on_a_word_only_if_an_exchange_of_it_costs_a_nat(found):
    """The one whose exchanges cost most in the median; else the largest change is said, or that none is large."""

    def scaled(result, factor):
        return replace(result, exchanges=tuple(replace(row, change=row.change * factor) for row in result.exchanges))

    for result in found.values():
        if not result.exchanges:
            continue
        loss = -result.exchanges[0].change
        sentence = str(scaled(result, 1.01 / loss)) if loss > 0 else ""
        assert (not sentence) or result.exchanges[0].word in sentence
        if loss > 0:
            assert str(scaled(result, 1.01 / loss)).startswith("The answer hangs most on")
            assert not str(scaled(result, 0.99 / loss)).startswith("The answer hangs most on")
        largest = max(abs(row.change) for row in result.exchanges)
        assert "No single word matters" in str(scaled(result, 0.99 / largest))
        assert len(str(result).split()) <= 27  # 25, and words of an answer of two


def test_the_screen_has_the_table_with_its_commands(found, few_contexts):
    screen = run("explain", CHEF, "--no-counterfactual")
    assert str(found[CHEF]) in " ".join(screen.split())
    for number, row in enumerate(found[CHEF].shown, 1):
        assert f" {number} {row.word}" in screen
        assert f"{row.change:+.1f}" in screen
    assert "no control" in screen


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


# --- chats ---

FRANCE = "What is the capital of France?"


def chat_of(*contents):
    roles = ("user", "assistant") * len(contents)
    return Chat([{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)])


CHATS = {
    FRANCE: chat_of(FRANCE),
    "system": Chat([{"role": "system", "content": "Answer about Rome."}, *chat_of(FRANCE).messages], {"a": "b c"}),
    "second": chat_of("Where do bears live?", "In forests.", "Where do camels live?"),
}


@pytest.fixture(scope="module")
def chats(smol):
    return {name: exchange_words(smol, chat) for name, chat in CHATS.items()}


@pytest.mark.parametrize(
    ("pieces", "word"),
    [
        (["The", " ca", "bin", "et", " is"], " cabinet"),
        (["**", "Paris", "**"], "Paris"),
        (["1", ".", " Red"], "1"),
        (["It", " is", "."], "It"),
        ([":"], ":"),
    ],
)
def test_the_first_content_word_or_the_first_token(pieces, word):
    assert "".join(pieces[slice(*first_content_word(pieces))]) == word


def test_a_content_word_that_the_question_has_comes_after_others():
    pieces = ["The", " capital", " is", " Paris"]
    assert first_content_word(pieces, "What is the Capital?") == (3, 4)
    assert first_content_word(pieces[:3], "What is the Capital?") == (1, 2)


def test_of_a_chat_the_first_content_word_of_the_answer_is_explained(smol, chats):
    for name, result in chats.items():
        answer = smol.answer(CHATS[name], 40)
        words = (
            (start, end, "".join(answer.token_strings[start:end])) for start, end in words_of(answer.token_strings)
        )
        known = {word.strip("?.,").lower() for message in CHATS[name].messages for word in message["content"].split()}
        start, end = next((s, e) for s, e, word in words if is_content(word) and word.strip().lower() not in known)
        assert result.explained.token == answer.ids[start]
        assert result.explained.after == answer.ids[:start]
        assert result.explained_after + result.explained.text == "".join(answer.token_strings[:end])
        assert result.explained.probability == pytest.approx(answer.probabilities[start])
        assert result.answer == answer
    assert chats[FRANCE].explained.text == " Paris"


def test_a_change_of_a_message_is_that_of_a_fresh_pass(smol, chats):
    for name, result in chats.items():
        chat, after = CHATS[name], list(result.explained.after)
        before = slow_odds(smol, [*smol.ids(chat), *after], result.explained.token)
        assert result.exchanges
        for row in result.exchanges[::3]:
            changed = smol.ids(chat.asking(row.text))  # as the command reads it
            ids = smol.ids(chat)
            assert changed == [*ids[: row.position], *row.tokens, *ids[row.position + row.length :]]
            odds = slow_odds(smol, [*changed, *after], result.explained.token)
            assert row.change == pytest.approx(odds - before, abs=1e-3)


def test_only_messages_are_exchanged(smol, chats):
    for name, result in chats.items():
        turns = smol.turns(smol.ids(CHATS[name]))
        inside = {place for turn in turns for place in range(turn.text_start, turn.text_stop)}
        for row in result.exchanges:
            assert inside.issuperset(range(row.position, row.position + row.length))
    assert {"capital", "France"} <= {row.word for row in chats[FRANCE].exchanges}


def test_only_the_last_message_of_the_user_is_exchanged(chats):
    assert {row.word for row in chats["second"].exchanges} <= {"Where", "camels", "live"}
    assert {row.word for row in chats["system"].exchanges} <= {"capital", "France"}
    assert {row.text.replace(row.instead, row.word) for row in chats[FRANCE].exchanges} == {FRANCE}


def test_the_command_of_a_chat_compares_what_was_measured(smol, chats):
    for name, result in chats.items():
        for row in result.exchanges:
            _, _, *words = shlex.split(result.command(row))
            options = dict(zip(words[::2], words[1::2], strict=True))
            if name == "second":
                assert options["--messages"] == "FILE"
            else:
                assert options["--chat"] == FRANCE
            start = len(result.explained.after)
            assert result.answer.token_range(read_span(options["--span"])) == (start, start + 1)
            assert options["--counterfactual"] == row.text
            contrast = options.get("--contrast")
            typed = {"span": options["--span"], "contrast": contrast, "counterfactual": CHATS[name].asking(row.text)}
            read = answer_request(smol, result.answer, *typed.values())
            assert read == answer_request(smol, result.answer, *map(result.arguments(row).get, typed))
            assert read.contrast == row.contrast
    options = shlex.split(chats["system"].command(chats["system"].exchanges[0]))
    assert options[options.index("--system") + 1] == "Answer about Rome."
    assert options[options.index("--template-option") + 1] == 'a="b c"'


def test_each_row_has_two_answers_to_compare(smol, found, chats):
    seen = set()
    for result in (*found.values(), *chats.values()):
        for row in result.exchanges[::6]:
            ids = smol.ids(result.chat or result.prompt)
            changed = [*ids[: row.position], *row.tokens, *ids[row.position + row.length :], *result.explained.after]
            likeliest = int(smol.next_logits(changed).argmax())
            assert result.explained.token != (likeliest if row.contrast is None else row.contrast)
            seen.add(row.contrast is None)
    assert seen == {True, False}


@pytest.mark.release
def test_what_if_of_a_chat_has_the_rows_of_the_command(smol, chats, few_contexts):
    frame = what_if(smol, CHATS[FRANCE])
    assert list(frame["change"]) == [row.change for row in chats[FRANCE].exchanges]
    document = json.loads(run("explain", "--chat", FRANCE, "--json"))
    assert [row["change"] for row in document["exchanges"]] == list(frame["change"])
    assert (document["target"]["text"], document["explained_after"]) == (" Paris", "The capital of France is")
    assert document["answer"] == chats[FRANCE].answer.text
    assert "chat_command" not in document
    words = shlex.split(frame["command"].iloc[0])[1:]
    assert "stages" in json.loads(run(*words, "--json"))


@pytest.mark.release
def test_a_comparison_of_a_chat_is_chosen_as_of_a_text(smol, few_contexts):
    question = "Translate to French: The dog is red."
    chosen = exchange_words(smol, chat_of(question)).comparisons[0]
    document = json.loads(run("explain", "--chat", question, "--json"))
    assert document["chosen_counterfactual"]["text"] == chosen.text
    assert document["contrast"]["id"] == chosen.contrast
    assert "stages" in document


@pytest.mark.release
def test_next_token_of_a_chat(smol, few_contexts):
    likeliest = smol.predict(CHATS[FRANCE], 1)[0].text
    document = json.loads(run("explain", "--chat", FRANCE, "--json", "--next-token"))
    assert (document["target"]["text"], document["explained_after"]) == (likeliest, "")
    assert document["exchanges"]
    assert "answer" not in document


@pytest.mark.release
def test_a_number_in_a_terminal_compares_two_chats(chats, few_contexts, monkeypatch):
    monkeypatch.setattr("icebear.app.cli.verbs.explain.is_terminal", lambda: True)
    rows = chats[FRANCE].shown
    number = next(number for number, row in enumerate(rows, 1) if row.likely.token == chats[FRANCE].explained.token)
    result = RUN.invoke(main, ["explain", "--chat", FRANCE], input=f"{number}\n\n")
    assert result.exit_code == 0, result.output
    assert f"Why ' Paris', not {rows[number - 1].contrast_text!r}?" in result.output


def test_an_answer_without_a_content_word_is_explained_at_its_first_token(smol, chats):
    answer = chats[FRANCE].answer
    ids = tuple(smol.tokens_of("It is."))
    short = replace(answer, ids=ids, token_strings=smol.pieces(ids), probabilities=(0.5,) * 3)
    result = exchange_words(smol, short)
    assert (result.explained.text, result.explained_after) == ("It", "")
    assert "no content word" in answer_sentence(result, "")
    assert "no content word" not in answer_sentence(chats[FRANCE], "")


@pytest.mark.release
def test_a_model_that_answers_nothing_is_explained_at_the_token_that_ends_it(smol, chats, monkeypatch):
    empty = replace(chats[FRANCE].answer, ids=(), token_strings=(), probabilities=())
    monkeypatch.setattr(Model, "answer", lambda *_: empty)
    result = exchange_words_if_short(smol, CHATS[FRANCE])
    assert result.prompt == CHATS[FRANCE]
    assert result.explained.token == smol.predict(CHATS[FRANCE], 1)[0].id


def test_a_long_chat_is_explained_without_exchanges(smol, monkeypatch):
    monkeypatch.setattr("icebear.concepts.answers.what_if.LONGEST", 10)
    result = exchange_words_if_short(smol, CHATS[FRANCE])
    assert (result.explained.text, result.exchanges) == (" Paris", ())
    assert "10 tokens" in str(result)


@pytest.mark.release
def test_the_command_explains_a_long_chat_without_exchanges(smol, monkeypatch, few_contexts):
    monkeypatch.setattr("icebear.concepts.answers.what_if.LONGEST", 10)
    document = json.loads(run("explain", "--chat", FRANCE, "--json"))
    assert (document["target"]["text"], document["exchanges"]) == (" Paris", [])


# --- messages that are given as texts ---


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("What is the largest planet in the solar system?", True),
        (FRANCE, True),
        ("The capital of France is", False),
        ("Where do ice bears live?", False),
    ],
)
def test_a_text_that_goes_on_with_a_token_of_the_template_is_a_message(smol, text, right):
    assert is_message(smol, text) is right
    likeliest = int(smol.next_logits(text).argmax())
    assert (likeliest in smol.special_ids()) is right


def test_a_base_model_has_no_messages(smol, monkeypatch):
    monkeypatch.setattr(smol.tokenizer, "chat_template", None)
    assert not is_message(smol, FRANCE)
    assert exchange_words_if_short(smol, FRANCE).prompt == FRANCE


def test_a_bare_question_is_asked_as_a_chat_and_says_so(chats, few_contexts):
    screen = run("explain", FRANCE)
    assert shlex.join(["icebear", "explain", "--chat", FRANCE]) in screen
    assert "This is a question" in screen
    assert str(chats[FRANCE]) in " ".join(screen.split())


@pytest.mark.release
def test_the_document_of_a_bare_question_is_that_of_its_chat(smol, few_contexts):
    run("explain", FRANCE)  # the first pass of a kind proves its rules, which the document says
    document = json.loads(run("explain", FRANCE, "--json"))
    command = shlex.split(document.pop("chat_command"))
    assert command == ["icebear", "explain", "--chat", FRANCE]
    assert document == json.loads(run(*command[1:], "--json"))
    assert "explained_after" not in json.loads(run("explain", FRANCE, "--json", "--target", " The"))
    plain = json.loads(run("explain", FRANCE, "--json", "--next-token"))
    assert plain["target"]["text"] == smol.predict(FRANCE, 1)[0].text
    assert "chat_command" not in plain
    assert exchange_words(smol, FRANCE).chat is None  # in Python nothing unasked


@pytest.mark.release
@pytest.mark.parametrize("words", [("--chat", FRANCE), (FRANCE,)])
def test_a_claim_is_about_the_next_token(smol, words, tmp_path, few_contexts):
    file = tmp_path / "claims.json"
    document = json.loads(run("explain", *words, "--json", "--claim", str(file)))
    prompt = CHATS[FRANCE] if len(words) == 2 else FRANCE
    assert document["target"]["id"] == smol.predict(prompt, 1)[0].id
    assert "answer" not in document
    assert json.loads(file.read_text())["claims"][0]["what"]["kind"] == "answer"

"""The text of each token, where characters are split between tokens."""

import random
from dataclasses import replace

import pytest
from conftest import LLAMA, random_model

from icebear import Model
from icebear.app.cli.tables.cards import highlighted
from icebear.concepts.results.effect_words import effect_text
from icebear.records import Example, Sentence

SIGNS = {
    "latin": "abc DEF .,é",
    "emoji": "😀🐻‍❄️👩🏽‍🚀🏳️‍🌈",
    "marks": "éạ̈ǹẅ̰",
    "scripts": "北極熊ледяной медведь דוב ทะเล ᚠᛇᚻ𐍈𒀭",
    "stray": "�\u200d\u0301\x00\n\t",
}


class Counting:
    """The real tokenizer, counting the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **options):
        return self.tokenizer(*args, **options)

    def decode(self, ids):
        self.decoded += len(ids)
        return self.tokenizer.decode(ids)


@pytest.fixture(scope="module")
def model(smol):
    return Model(random_model(LLAMA).net, Counting(smol.tokenizer), "counting")


def reference(model, ids):
    """Every beginning decoded anew: what is new in it since the last one that ended in a whole character."""
    result = [model.text(token) for token in ids]
    if not any("\ufffd" in piece for piece in result):
        return tuple(result)
    before = ""
    for place in range(len(ids)):
        after = model.tokenizer.decode(ids[: place + 1])
        whole = not after.endswith("\ufffd") or place + 1 == len(ids)
        result[place] = after[len(before) :] if whole else ""
        before = after if whole else before
    return tuple(result)


@pytest.mark.release
def test_pieces_equal_every_beginning_decoded_anew(model):
    """Also of texts cut in the middle of a character, at either end, and of tokens in no order."""
    for seed in range(150):
        choice = random.Random(seed)
        signs = "".join(SIGNS[kind] for kind in choice.sample(list(SIGNS), choice.randint(1, 4)))
        ids = model.tokenizer("".join(choice.choices(signs, k=choice.randint(1, 60))))["input_ids"]
        cuts = ids[choice.randrange(len(ids)) :], ids[: choice.randrange(len(ids)) + 1]
        for case in (ids, *cuts, choice.sample(ids, len(ids)), choice.choices(range(model.tokenizer.vocab_size), k=40)):
            assert model.pieces(case) == reference(model, case), (seed, case)


@pytest.mark.parametrize("text", ["the ice bear 🐻 ", "🐻‍❄️", "ทะเล", "�"])
def test_the_work_grows_with_the_tokens_not_with_their_square(model, text):
    for times in (100, 400):
        ids = model.tokenizer(text * times)["input_ids"]
        model.tokenizer.decoded = 0
        model.pieces(ids)
        assert model.tokenizer.decoded < 20 * len(ids)


def test_parts_of_characters_are_named_in_effects_and_whole_in_examples():
    """The token that completes a character has its text; the peak may be at one before it."""
    assert "\ufffd" not in effect_text(["\ufffd"], ["day"])
    sentence = Sentence(1, "see 熊 now", "", 0, 9, ("see", " ", "", "熊", " now"))
    example = Example(3.0, 2, sentence)
    for peak in (2, 3):
        assert "«熊»" in highlighted(replace(example, token=peak)).plain
    assert "«now»" in highlighted(replace(example, token=4)).plain

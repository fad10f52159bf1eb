"""The word that a prediction begins: the likeliest content word after a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from icebear.concepts.answers.content_words import COMMON, first_content_word, is_content, is_word
from icebear.concepts.passes.prefix import Prefix
from icebear.models.model import Model
from icebear.models.text.answer import Answer
from icebear.values import common_length

COMPLETED = 3
"""The largest number of tokens by which a word is completed."""
LIKELY_SHARE = 1 / 3
"""A word as likely as this share of the likeliest token is taken before a token that is no word."""
LIKELIEST = 8
"""The largest number of tokens among which it is looked for."""
APPENDED = 4
"""The largest number of tokens that are appended until a content word is likely."""
PART = "\ufffd"
"""In the text of a token that is a part of a character."""
ROWS_PER_PASS = 16
"""The number of prompts in a forward pass."""


@dataclass(frozen=True)
class LikelyWord:
    """The likeliest content word after a prompt, or the likeliest token where none is likely."""

    token: int
    """The first token of the word."""
    token_text: str
    text: str
    """The word, completed."""
    probability: float
    """Of its first token."""
    after: tuple[int, ...]
    """The tokens that were appended to the prompt before it."""


class Reader:
    """Reads prompts that begin like one prompt, whose beginning is read once."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.model, self.ids, self.prefix = model, list(ids), Prefix.of(model, [list(ids)])

    @torch.no_grad()
    def next_logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits (V,) in float32 of the token after each row."""
        after: dict[int, Tensor] = {}
        alike = defaultdict(list)
        for number, row in enumerate(rows):
            alike[min(common_length(row, self.ids), len(row) - 1), len(row)].append(number)
        for (start, length), numbers in alike.items():
            for begin in range(0, len(numbers), ROWS_PER_PASS):
                part = numbers[begin : begin + ROWS_PER_PASS]
                after |= zip(part, self._pass([list(rows[number]) for number in part], start, length), strict=True)
        return [after[number] for number in range(len(rows))]

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return the logits (T, V) in float32 after each token of the prompt."""
        with self.model.lock:
            return self.model.logits(self.model.encode([self.ids]), list(range(len(self.ids))))[0].float()

    def _pass(self, rows: list[list[int]], start: int, length: int) -> Tensor:
        with self.model.lock:
            if self.prefix is None or start == 0:
                return self.model.logits(self.model.encode(rows), [length - 1])[:, 0].float()
            read = torch.tensor(rows, device=self.model.device)[:, start:]
            count = len(rows)
            return self.prefix.logits(read, [0] * count, [start] * count, [length - start - 1])[:, 0].float()


def likely_words(reader: Reader, rows: Sequence[Sequence[int]], logits: Sequence[Tensor]) -> list[LikelyWord]:
    """Return the likeliest content word after each row of token ids. logits: (V,) of the token after each row.

    A content word is taken if its first token has a third of the probability of the likeliest one. Else the likeliest
    token is appended, and a word is looked for behind it, at most `APPENDED` times and never behind a special token.
    Where there is none, it is the likeliest token itself.
    """
    model, words = reader.model, dict[int, LikelyWord]()
    waiting: dict[int, tuple[tuple[int, ...], Tensor]] = {number: ((), x) for number, x in enumerate(logits)}
    special = model.special_ids()
    for step in range(APPENDED + 1):
        begun = {number: list(_candidates(values)) for number, (_, values) in waiting.items()}
        content = _first_content(reader, {n: [*rows[n], *waiting[n][0]] for n in waiting}, begun)
        behind: dict[int, tuple[int, ...]] = {}
        for number, candidates in begun.items():
            appended, _ = waiting[number]
            if likely := content.get(number):
                token, probability, text = likely
                words[number] = LikelyWord(token, model.answer_text(token), text, probability, appended)
            elif step < APPENDED and candidates[0][0] not in special:
                behind[number] = (*appended, candidates[0][0])
        after = reader.next_logits([[*rows[number], *appended] for number, appended in behind.items()])
        waiting = dict(zip(behind, zip(behind.values(), after, strict=True), strict=True))
    lacking = [number for number in range(len(rows)) if number not in words]
    words |= {number: likeliest(model, logits[number]) for number in lacking}
    return [words[number] for number in range(len(rows))]


def word_of_answer(answer: Answer) -> LikelyWord:
    """Return the first content word of an answer that the conversation does not have; see `first_content_word`."""
    messages = answer.question.messages if answer.question else []
    conversation = " ".join(message["content"] for message in messages if isinstance(message["content"], str))
    start, end = first_content_word(answer.token_strings, conversation)
    text = "".join(answer.token_strings[start:end])
    return LikelyWord(
        answer.ids[start], answer.token_strings[start], text, answer.probabilities[start], answer.ids[:start]
    )


def likeliest(model: Model, logits: Tensor) -> LikelyWord:
    """Return the likeliest token as it is, from the logits (V,)."""
    token, probability = next(_candidates(logits))
    text = model.answer_text(token)
    return LikelyWord(token, text, text, probability, ())


def _candidates(logits: Tensor) -> Iterator[tuple[int, float]]:
    """Yield the likeliest tokens with their probabilities, down to a third of the first one's."""
    best = logits.softmax(-1).topk(min(LIKELIEST, len(logits)))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    yield from takewhile(lambda row: row[1] >= LIKELY_SHARE * best.values[0].item(), rows)


def _first_content(
    reader: Reader, rows: dict[int, list[int]], begun: dict[int, list[tuple[int, float]]]
) -> dict[int, tuple[int, float, str]]:
    """Return number -> the first of the likeliest tokens that begins a content word after a row, its probability, and
    the word; a token is completed only where those before it begin none."""
    content: dict[int, tuple[int, float, str]] = {}
    waiting = {number: iter(candidates) for number, candidates in begun.items()}
    while waiting:
        tried = {number: next(candidates, None) for number, candidates in waiting.items()}
        waiting = {number: candidates for number, candidates in waiting.items() if tried[number]}
        each = {number: candidate for number, candidate in tried.items() if candidate}
        texts = _completed(reader, rows, {number: token for number, (token, _) in each.items()})
        content |= {number: (*each[number], text) for number, text in texts.items() if is_content(text)}
        waiting = {number: candidates for number, candidates in waiting.items() if number not in content}
    return content


def _completed(reader: Reader, rows: dict[int, list[int]], begun: dict[int, int]) -> dict[int, str]:
    """Return number -> the word that a token begins after a row, continued greedily while it goes on.

    Only a token that may begin a content word is continued.
    """
    model = reader.model
    texts = {number: model.answer_text(token) for number, token in begun.items()}
    open_ends = {number: [begun[number]] for number, text in texts.items() if _may_go_on(text)}
    for _ in range(COMPLETED - 1):
        logits = reader.next_logits([[*rows[number], *ids] for number, ids in open_ends.items()])
        going = dict[int, list[int]]()
        for (number, ids), values in zip(open_ends.items(), logits, strict=True):
            best = int(values.argmax())
            if (is_word(text := model.answer_text(best)) or PART in text) and best not in model.special_ids():
                going[number] = [*ids, best]
                texts[number] = "".join(model.pieces(going[number]))
        open_ends = going
    return texts


def _may_go_on(text: str) -> bool:
    """Return whether a token may begin a word of several tokens: letters that are no common word, or a part of one."""
    word = text.strip()
    return PART in word or (is_word(word) and word.lower() not in COMMON)

"""Which exchanges of a word are comparisons, as a person would make them.

The explained word loses, another content word is likely in its place, and the new word is another word that fits there.
The score adds up how similar the words are and how likely the new one is there, how probable and how far apart the
answers are, and how similar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.answers.exchanges import Candidate, Embeddings
from icebear.concepts.answers.likely_words import LikelyWord
from icebear.models.model import Model

GOOD_SCORE = 0.7
"""An exchange with this score is a comparison."""
LIKELY = 30
"""Two answers are of one kind if each is among this many most probable ones after the other prompt."""
FAR = 5.0
"""A larger logit difference is capped here."""
LOST = 1.0
"""The smallest loss of the explained word, in nats, by an exchange that is a comparison."""
LESS_LIKELY = 5.0
"""The largest loss of log-probability, in nats, of the new word in the place of the old one."""
GOES_ON = 2.5
"""The largest loss of log-probability, in nats, of the next `READ_ON` tokens of the prompt together."""
READ_ON = 2
SAME_BEGINNING = 3
"""Two words are forms of one if they share this many first letters, and `SAME_SHARE` of the shorter one."""
SAME_SHARE = 0.6

WRITTEN = ("word", "position", "length", "instead", "tokens", "answer", "probability", "change")
"""The fields of an exchange in JSON and tables."""


@dataclass(frozen=True)
class Exchange:
    """A word of the prompt, another one in its place, and what this changes."""

    word: str
    position: int
    """Of the first token that is replaced."""
    length: int
    """The number of tokens that are replaced."""
    instead: str
    tokens: tuple[int, ...]
    answer: str
    """The likeliest content word after the exchange."""
    probability: float
    change: float
    """The log-odds of the explained word after the exchange, less those before it, in nats."""
    text: str
    """The changed prompt."""
    likely: LikelyWord
    contrast: int | None
    """The token that the explained word is compared with; None for the likeliest one after the exchange."""
    contrast_text: str
    score: float
    """How well it serves as a comparison; minus infinity if it is none."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in WRITTEN}


@dataclass(frozen=True)
class ExchangeContext:
    """Both prompts, before the explained word."""

    embeddings: Embeddings
    ids: Sequence[int]
    explained: LikelyWord
    logits: Tensor
    """(V,) after the prompt."""
    logits_after: Tensor
    """(V,) after the exchange."""


def comparison_score(model: Model, candidate: Candidate, row: Exchange, context: ExchangeContext) -> float:
    """Return the score of an exchange; minus infinity if it is no comparison."""
    answer, explained, ids = row.likely, context.explained, context.ids
    is_last = candidate.end == len(ids) and not explained.after
    has_answer = not answer.after and answer.token != explained.token and not is_last
    is_plain = row.length == 1 or row.word.isdecimal() or row.word[:1].isupper()  # parts of words have other neighbors
    if not (row.change <= -LOST and has_answer and is_plain and candidate.is_near):
        return -inf
    words = ((row.word, row.instead), (row.answer, explained.text), (row.answer, row.instead))
    repeats = row.instead in {model.text(token).strip() for token in ids}  # a word of the prompt itself
    if repeats or any(one_word(word.strip(), other.strip()) for word, other in words):
        return -inf
    if not _reads_well(model, ids, candidate):
        return -inf
    answers = explained.token, answer.token
    return pair_score(candidate, context.embeddings, answers, context.logits, context.logits_after)


def margin_of(answers: tuple[int, int], logits: Tensor, logits_after: Tensor) -> float:
    """Return by how much each of two answers leads the other one after its own prompt, the smaller of both."""
    answer, other = answers
    return min((logits[answer] - logits[other]).item(), (logits_after[other] - logits_after[answer]).item())


def pair_score(
    candidate: Candidate, embeddings: Embeddings, answers: tuple[int, int], logits: Tensor, logits_after: Tensor
) -> float:
    """Return how much two prompts with these answers are like a pair that a person would make. logits: (V,) after the
    prompt, and after the exchange."""
    answer, other = answers
    probability = min(logits.softmax(-1)[answer].item(), logits_after.softmax(-1)[other].item())
    rank = max(int((logits > logits[other]).sum()), int((logits_after > logits_after[answer]).sum()))
    return (
        candidate.score
        + 0.5 * probability
        + 0.03 * min(margin_of(answers, logits, logits_after), FAR)
        + 0.8 * embeddings.similarity([answer], [other])
        + 0.3 * (rank < LIKELY)
    )


def _reads_well(model: Model, ids: Sequence[int], candidate: Candidate) -> bool:
    """Return whether the new word is about as likely in its place, and the prompt goes on after it, as with the old
    one."""
    start, end = candidate.start, candidate.end
    following = list(ids[end : end + READ_ON])
    positions = [*([start - 1] if start else []), *range(end - 1, end - 1 + len(following))]
    with torch.no_grad(), model.lock:
        # (2, P, V)
        logs = model.logits(model.encode([list(ids), candidate.of(ids)]), positions).float().log_softmax(-1)
    written = [logs[0, 0, tokens[0]].item() for tokens in (ids[start:end], candidate.tokens)] if start else [0.0, 0.0]
    after = logs[:, len(positions) - len(following) :]
    old, new = (sum(row[at, token].item() for at, token in enumerate(following)) for row in after)
    return new >= old - GOES_ON and written[1] >= written[0] - LESS_LIKELY


def one_word(word: str, other: str) -> bool:
    """Return whether two words are forms of one, by their common beginning."""
    pairs = zip(word.lower(), other.lower(), strict=False)
    common = next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(word), len(other)))
    return word.lower() == other.lower() or (
        common >= SAME_BEGINNING and common >= SAME_SHARE * min(len(word), len(other))
    )

"""Suggestions of counterfactual prompts: one content word is exchanged for a similar one, which changes the answer.

1. The content words with the largest relevance are exchanged, `SUGGESTION_WORDS` at most, for `similar_words`.
2. A suggestion needs another answer, which is a word as well, by a clear margin in both prompts.
3. Its score adds up the similarity of the words, how likely the new word is there, how probable and how far apart the
   answers are, and their similarity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from icebear.concepts.answers.comparisons import margin_of, pair_score
from icebear.concepts.answers.content_words import COMMON
from icebear.concepts.answers.exchanges import (
    Candidate,
    Embeddings,
    by_absolute_relevance,
    exchangeable,
    may_change,
    similar_words,
)
from icebear.concepts.answers.likely_words import Reader
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike
from icebear.records import InNotebooks
from icebear.values import check_int, typed

SUGGESTION_WORDS = 3
"""The largest number of words that are exchanged, one at a time."""
RUNS = 80
"""The largest number of prompts that are run."""
ALIKE = 0.7
"""The smallest cosine of two words that a person exchanges for an answer of common words: "dogs" and "dog" for "are"
and "is"."""
FAR_ENOUGH = 1.0
"""The smallest logit difference between the two answers, in both prompts."""


@dataclass(frozen=True, repr=False)
class Suggestion(InNotebooks):
    """A prompt with as many tokens and another answer."""

    ids: tuple[int, ...]
    text: str
    word: str
    instead_of: str
    answer: str
    """The most probable next token of the suggestion."""
    probability: float
    score: float
    """Higher is more like a comparison that a person would make."""


@typed
def suggest_counterfactuals(model: Model, prompt: PromptLike, count: int = 3) -> list[Suggestion]:
    """Suggest counterfactual prompts for `attribute`.

    One content word is exchanged for another with as many tokens. In a chat, the word is part of a message. The first
    word, the last word and the 200 most common words stay.

    Parameters
    ----------
    model : Model
        A causal language model.
    prompt : str, sequence of int or Chat
    count : int
        The largest number of suggestions.

    Returns
    -------
    list of Suggestion
        Suggestions sorted by their score; empty if there are none.

    Raises
    ------
    InputError
        If the model does not predict the next token.
    """
    count = check_int(count, "The number of counterfactuals")
    if not model.task.is_causal:
        raise InputError(
            f"{model.name} is not a causal language model, and icebear suggests counterfactuals only for these; write "
            "a counterfactual yourself."
        )
    return _suggestions(model, prompt)[:count]


def _suggestions(model: Model, prompt: PromptLike) -> list[Suggestion]:
    """Return all suggestions, sorted."""
    ids = list(model.encode([prompt]).row_ids(0))
    reader, embeddings = Reader(model, ids), Embeddings(model)
    logits = reader.logits()
    candidates = sorted(
        (row for span in _exchanged(model, ids) for row in similar_words(reader, embeddings, span, logits)),
        key=lambda candidate: -candidate.score,
    )[:RUNS]
    rows = zip(candidates, reader.next_logits([candidate.of(ids) for candidate in candidates]), strict=True)
    suggestions = [row for pair in rows if (row := _suggestion(model, embeddings, ids, *pair, logits[-1]))]
    return sorted(suggestions, key=lambda suggestion: -suggestion.score)


def _exchanged(model: Model, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bounds of the words that are exchanged: those with the largest relevance, but the first and last."""
    spans = exchangeable(model, ids, may_change(model, ids) - {0, len(ids) - 1})
    return (by_absolute_relevance(model, ids, spans) if len(spans) > SUGGESTION_WORDS else spans)[:SUGGESTION_WORDS]


def _text(model: Model, tokens: Sequence[int]) -> str:
    return "".join(map(model.answer_text, tokens)).strip()


def _suggestion(
    model: Model, embeddings: Embeddings, ids: Sequence[int], exchange: Candidate, logits_c: Tensor, logits: Tensor
) -> Suggestion | None:
    """Return a suggestion, unless the answer is the same, is no word, or is hardly more probable. logits (V,)."""
    changed = exchange.of(ids)
    answer, other = int(logits.argmax()), int(logits_c.argmax())
    margin = margin_of((answer, other), logits, logits_c)
    texts = [_text(model, [token]) for token in (answer, other)]
    if answer == other or margin < FAR_ENOUGH or not all(text.isalpha() for text in texts):
        return None
    copies = [_text(model, tokens) for tokens in (ids[exchange.start : exchange.end], exchange.tokens)]
    if texts[0] == copies[1]:  # the new word is the answer, which the model then hardly repeats
        return None
    if texts[1] == copies[1] and texts[0] != copies[0]:  # the new answer repeats the new word, and the old one did not
        return None
    common = [text.lower() in COMMON for text in texts]
    is_likely = not any(common) or (all(common) and exchange.similarity >= ALIKE)
    score = pair_score(exchange, embeddings, (answer, other), logits, logits_c) - 0.3 * (not is_likely)
    return Suggestion(
        tuple(changed),
        model.tokenizer.decode(changed),
        _text(model, exchange.tokens),
        _text(model, ids[exchange.start : exchange.end]),
        model.answer_text(other),
        logits_c.softmax(-1)[other].item(),
        score,
    )

"""Suggestions of counterfactual prompts: one content word is exchanged for a similar one, which changes the answer.

1. The content words with the largest relevance are exchanged, `EXCHANGED_WORDS` at most, for `similar_words`.
2. A suggestion needs another answer, which is a word as well, by a clear margin in both prompts.
3. Its score adds up the similarity of the words, how likely the new word is there, how probable and how far apart the
   answers are, and their similarity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from icebear.concepts.answers.content_words import COMMON, Reader
from icebear.concepts.answers.exchanges import (
    Candidate,
    Embeddings,
    exchangeable,
    read_exchanges,
    similar_words,
)
from icebear.concepts.attribution.attribute import attribute
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.chat import inside
from icebear.models.text.prompts import PromptLike
from icebear.records import InNotebooks
from icebear.values import check_int, typed

EXCHANGED_WORDS = 3
"""The largest number of words that are exchanged, one at a time."""
RUNS = 80
"""The largest number of prompts that are run."""
ALIKE = 0.7
"""The smallest cosine of two words that a person exchanges for an answer of common words: "dogs" and "dog" for "are"
and "is"."""
LIKELY = 30
"""Two answers are of one kind if each is among this many most probable ones after the other prompt."""
FAR_ENOUGH = 1.0
"""The smallest logit difference between the two answers, in both prompts."""
FAR = 5.0
"""A logit difference above this counts as this."""


@dataclass(frozen=True)
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
    with torch.no_grad(), model.lock:
        logits = model.logits(model.encode([ids]), list(range(len(ids))))[0].float()  # (T, V)
    candidates = sorted(
        (row for span in _exchanged(model, ids) for row in similar_words(reader, embeddings, span, logits)),
        key=lambda candidate: -candidate.score,
    )[:RUNS]
    rows = zip(candidates, read_exchanges(reader, candidates), strict=True)
    suggestions = [row for pair in rows if (row := _suggestion(model, embeddings, ids, *pair, logits[-1]))]
    return sorted(suggestions, key=lambda suggestion: -suggestion.score)


def _exchanged(model: Model, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bounds of the words that are exchanged: those with the largest relevance, but the first and last."""
    turns = model.turns(ids)
    spans = exchangeable(model, ids, (inside(turns) if turns else set(range(len(ids)))) - {0, len(ids) - 1})
    if len(spans) > EXCHANGED_WORDS:
        relevance = attribute(model, list(ids), sites=()).tokens
        spans.sort(key=lambda span: -abs(relevance[slice(*span)].sum().item()))
    return spans[:EXCHANGED_WORDS]


def _text(model: Model, tokens: Sequence[int]) -> str:
    return "".join(map(model.answer_text, tokens)).strip()


def _suggestion(
    model: Model, embeddings: Embeddings, ids: Sequence[int], exchange: Candidate, logits_c: Tensor, logits: Tensor
) -> Suggestion | None:
    """Return a suggestion, unless the answer is the same, is no word, or is hardly more probable. logits (V,)."""
    changed = exchange.of(ids)
    answer, other = int(logits.argmax()), int(logits_c.argmax())
    margin = min((logits[answer] - logits[other]).item(), (logits_c[other] - logits_c[answer]).item())
    texts = [_text(model, [token]) for token in (answer, other)]
    if answer == other or margin < FAR_ENOUGH or not all(text.isalpha() for text in texts):
        return None
    copies = [_text(model, tokens) for tokens in (ids[exchange.start : exchange.end], exchange.tokens)]
    if texts[0] == copies[1]:  # the new word is the answer, which the model then hardly repeats
        return None
    if texts[1] == copies[1] and texts[0] != copies[0]:  # the new answer repeats the new word, and the old one did not
        return None
    ranks = int((logits > logits[other]).sum()), int((logits_c > logits_c[answer]).sum())
    probability, probability_c = (x.softmax(-1)[token].item() for x, token in ((logits, answer), (logits_c, other)))
    common = [text.lower() in COMMON for text in texts]
    is_likely = not any(common) or (all(common) and exchange.similarity >= ALIKE)
    score = (
        exchange.score
        + 0.5 * min(probability, probability_c)
        + 0.03 * min(margin, FAR)
        + 0.8 * embeddings.similarity([answer], [other])
        - 0.3 * (not is_likely)
        + 0.3 * (max(ranks) < LIKELY)
    )
    return Suggestion(
        tuple(changed),
        model.tokenizer.decode(changed),
        _text(model, exchange.tokens),
        _text(model, ids[exchange.start : exchange.end]),
        model.answer_text(other),
        probability_c,
        score,
    )

"""Suggestions of counterfactual prompts: one content word is exchanged for a similar one, which changes the answer.

1. The content words with the largest relevance are exchanged, `EXCHANGED_WORDS` at most.
2. Candidates are the words with the nearest embeddings, and those that the model expects there, of equal
   capitalization and as many tokens; those with the highest score before they are run are run.
3. A suggestion needs another answer, which is a word as well, by a clear margin in both prompts.
4. Its score adds up the similarity of the words, how likely the new word is there, how probable and how far apart the
   answers are, and their similarity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from math import inf
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.passes.prefix import Prefix
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.parts.linear import Linear
from icebear.models.text.chat import inside
from icebear.models.text.prompts import PromptLike
from icebear.records import InNotebooks
from icebear.values import check_int, typed

COMMON = frozenset(Path(__file__).with_name("common.txt").read_text(encoding="utf-8").split())
"""The 200 most common English words."""
EXCHANGED_WORDS = 3
"""The largest number of words that are exchanged, one at a time."""
CANDIDATES_PER_WORD = 40
"""Words with the nearest embeddings, and as many that the model expects."""
SEARCHED = 1000
"""The nearest, and the most expected, tokens among which they are."""
RUNS = 80
"""The largest number of prompts that are run."""
RUN_TOKENS = 800
"""The largest number of tokens of these prompts, from the exchanged word on, that are read unasked: a second or two."""
SHORTEST = 3
"""The smallest number of letters of a word."""
SIMILAR = 0.4
"""The smallest cosine of the embeddings of two words that are exchanged."""
ALIKE = 0.7
"""The smallest cosine of two words that a person exchanges for an answer of common words: "dogs" and "dog" for "are"
and "is"."""
LONGEST = 128
"""The largest number of tokens of a text that is compared without being asked for."""
LIKELY = 30
"""Two answers are of one kind if each is among this many most probable ones after the other prompt."""
FAR_ENOUGH = 1.0
"""The smallest logit difference between the two answers, in both prompts."""
GOOD_SCORE = 0.9
"""A suggestion with this score is shown without being asked for."""
UNLIKELY = -8.0
"""A log-probability below this counts as this: after "The", "flower" is unlikely where "flowers" is written."""
FAR = 5.0
"""A logit difference above this counts as this."""
ROWS_PER_PASS = 16
"""The number of prompts in a forward pass."""


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


@dataclass(frozen=True)
class _Exchange:
    """Tokens in the place of a word, with what is known before they are run."""

    start: int
    end: int
    tokens: tuple[int, ...]
    similarity: float
    log_probability: float

    @property
    def score(self) -> float:
        return self.similarity + 0.06 * max(self.log_probability, UNLIKELY)

    def of(self, ids: Sequence[int]) -> list[int]:
        return [*ids[: self.start], *self.tokens, *ids[self.end :]]


class _Embeddings:
    """The embeddings of a model's vocabulary, centered and of unit length."""

    def __init__(self, model: Model) -> None:
        rows = Linear(model.net.get_input_embeddings()).rows()[: model.output_size].float()
        self.rows = normalize(rows - rows.mean(0), dim=-1)

    def similarities(self, word: Sequence[int]) -> Tensor:
        """(V,) cosine of the embedding of each token with that of a word, the mean of its tokens."""
        return self.rows @ normalize(self.rows[list(word)].mean(0), dim=0)

    def similarity(self, word: Sequence[int], other: Sequence[int]) -> float:
        """Return the cosine of the embeddings of two words."""
        return cosine_similarity(self.rows[list(word)].mean(0), self.rows[list(other)].mean(0), dim=0).item()


def chosen_counterfactual(model: Model, prompt: str) -> Suggestion | None:
    """Return the first suggestion for a text, if it is good, and reads as the tokens that were run.

    It is quick: of a text of dozens of tokens fewer prompts are run than `suggest_counterfactuals` runs, and of more
    than `LONGEST` tokens none.
    """
    is_short = model.task.is_causal and len(model.ids(prompt)) <= LONGEST
    suggestions = _suggestions(model, prompt, RUN_TOKENS) if is_short else []
    good = (row for row in suggestions[:1] if row.score >= GOOD_SCORE and tuple(model.ids(row.text)) == row.ids)
    return next(good, None)


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


def _suggestions(model: Model, prompt: PromptLike, run_tokens: float = inf) -> list[Suggestion]:
    """Return all suggestions, sorted. run_tokens: the largest number of tokens that are read in all runs together."""
    ids = list(model.encode([prompt]).row_ids(0))
    embeddings, spans, prefix = _Embeddings(model), _exchanged(model, ids), Prefix.of(model, [ids])
    with torch.no_grad(), model.lock:
        logits = model.logits(model.encode([ids]), list(range(len(ids))))[0].float()  # (T, V)
    exchanges = sorted(
        (exchange for span in spans for exchange in _exchanges(model, embeddings, prefix, ids, span, logits)),
        key=lambda exchange: -exchange.score,
    )[:RUNS]
    read = accumulate(len(ids) - exchange.start for exchange in exchanges)
    exchanges = [exchange for exchange, tokens in zip(exchanges, read, strict=True) if tokens <= run_tokens]
    answers = _last_logits(model, prefix, ids, exchanges)
    rows = zip(exchanges, answers, strict=True)
    suggestions = [row for pair in rows if (row := _suggestion(model, embeddings, ids, *pair, logits[-1]))]
    return sorted(suggestions, key=lambda suggestion: -suggestion.score)


def _exchanged(model: Model, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bounds of the words that are exchanged: the content words with the largest relevance."""
    turns = model.turns(ids)
    allowed = inside(turns) if turns else set(range(len(ids)))
    spans = [span for span in _words([model.answer_text(token) for token in ids]) if allowed.issuperset(range(*span))]
    if len(spans) > EXCHANGED_WORDS:
        relevance = attribute(model, list(ids), sites=()).tokens
        spans.sort(key=lambda span: -abs(relevance[slice(*span)].sum().item()))
    return spans[:EXCHANGED_WORDS]


def _exchanges(
    model: Model,
    embeddings: _Embeddings,
    prefix: Prefix | None,
    ids: Sequence[int],
    span: tuple[int, int],
    logits: Tensor,
) -> Iterator[_Exchange]:
    """Yield similar and expected words for a word of the prompt. logits (T, V): those of the prompt."""
    start, end = span
    word, text = ids[start:end], _text(model, ids[start:end])
    logs = logits[start - 1].log_softmax(-1)
    expected = _first_words(model, logs, text)
    similar = _first_words(model, embeddings.similarities(word), text) if len(word) == 1 else []
    begun = [[token] for token in dict.fromkeys([*similar, *expected])]
    for _ in word[1:]:
        begun = _continued(model, prefix, ids[:start], begun)
    for tokens in begun:
        similarity = embeddings.similarity(tokens, word)
        if similarity >= SIMILAR and _text(model, tokens).lower() != text.lower():
            yield _Exchange(start, end, tuple(tokens), similarity, logs[tokens[0]].item())


def _first_words(model: Model, scores: Tensor, text: str) -> list[int]:
    """Return the content words with the largest scores (V,) and the capitalization of a text."""
    best = scores.topk(min(SEARCHED, len(scores))).indices.tolist()
    texts = ((token, model.answer_text(token)) for token in best)
    words = (token for token, word in texts if _content(word) and word.strip()[0].isupper() == text[0].isupper())
    return list(islice(words, CANDIDATES_PER_WORD))


def _text(model: Model, tokens: Sequence[int]) -> str:
    return "".join(map(model.answer_text, tokens)).strip()


def _suggestion(
    model: Model, embeddings: _Embeddings, ids: Sequence[int], exchange: _Exchange, logits_c: Tensor, logits: Tensor
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


def _words(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the bounds of the content words without the first and last token."""
    starts = [index for index, text in enumerate(texts) if text[:1].isspace()] + [len(texts)]
    return [(a, b) for a, b in pairwise(starts) if a > 0 and b < len(texts) and _content("".join(texts[a:b]))]


def _content(word: str) -> bool:
    text = word.strip()
    return text.isalpha() and word[:1].isspace() and len(text) >= SHORTEST and text.lower() not in COMMON


def _continued(model: Model, prefix: Prefix | None, before: Sequence[int], begun: list[list[int]]) -> list[list[int]]:
    """Extend each beginning by the most probable token that continues the word."""
    continued = []
    for start in range(0, len(begun), ROWS_PER_PASS):
        part = begun[start : start + ROWS_PER_PASS]
        logits = _logits(model, prefix, [[*before, *tokens] for tokens in part], len(before))
        for tokens, best in zip(part, logits.topk(min(20, logits.shape[-1])).indices.tolist(), strict=True):
            inside = [token for token in best if model.answer_text(token).isalpha()]
            if inside:
                continued.append([*tokens, inside[0]])
    return continued


def _last_logits(
    model: Model, prefix: Prefix | None, ids: Sequence[int], exchanges: Sequence[_Exchange]
) -> list[Tensor]:
    """Return the logits (V,) after each changed prompt."""
    logits: dict[int, Tensor] = {}
    for start in {exchange.start for exchange in exchanges}:
        numbers = [number for number, exchange in enumerate(exchanges) if exchange.start == start]
        for begin in range(0, len(numbers), ROWS_PER_PASS):
            part = numbers[begin : begin + ROWS_PER_PASS]
            after = _logits(model, prefix, [exchanges[number].of(ids) for number in part], start)
            logits |= zip(part, after.float(), strict=True)
    return [logits[number] for number in range(len(exchanges))]


@torch.no_grad()
def _logits(model: Model, prefix: Prefix | None, rows: list[list[int]], start: int) -> Tensor:
    """Return the logits (N, V) after rows of as many token ids, which begin with `start` tokens of the prefix."""
    last = len(rows[0]) - 1
    with model.lock:
        if prefix is None:
            return model.logits(model.encode(rows), [last])[:, 0]
        read = torch.tensor(rows, device=model.device)[:, start:]
        return prefix.logits(read, [0] * len(rows), [start] * len(rows), [last - start])[:, 0]

"""Exchanges: other words in the place of a content word of a prompt, and what the model then predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from icebear.concepts.answers.content_words import is_content, is_word, words_of
from icebear.concepts.answers.likely_words import Reader
from icebear.concepts.attribution.attribute import attribute
from icebear.models.model import Model
from icebear.models.parts.linear import Linear
from icebear.models.text.chat import inside

CANDIDATES_PER_WORD = 40
"""Words with the nearest embeddings, and as many that the model expects."""
SEARCHED = 1000
"""They are looked for among so many nearest, and so many most expected, tokens."""
SIMILAR = 0.4
"""The smallest cosine of the embeddings of two words that are exchanged."""
PER_WORD = 5
"""The number of other words that are read in the place of a word."""
BEST = 15
"""The number of candidates with the highest scores; those to which the old word is near are read first."""
MUTUAL = 60
"""Two words are near each other if the old one is among this many tokens nearest to the new one, too."""
UNLIKELY = -8.0
"""A smaller log-probability is capped here: after "The", "flower" is unlikely where "flowers" is written."""


@dataclass(frozen=True)
class Candidate:
    """Tokens in the place of a word, with what is known before they are read."""

    start: int
    end: int
    tokens: tuple[int, ...]
    similarity: float
    log_probability: float
    is_near: bool = True
    """Whether the old word is near to the new one, too (`Embeddings.are_mutual`)."""

    @property
    def score(self) -> float:
        return self.similarity + 0.06 * max(self.log_probability, UNLIKELY)

    def of(self, ids: Sequence[int]) -> list[int]:
        return [*ids[: self.start], *self.tokens, *ids[self.end :]]


class Embeddings:
    """The embeddings of a model's vocabulary, centered and of unit length."""

    def __init__(self, model: Model) -> None:
        rows = Linear(model.net.get_input_embeddings()).rows()[: model.output_size].float()
        self.rows = normalize(rows - rows.mean(0), dim=-1)

    def similarities(self, word: Sequence[int]) -> Tensor:
        """(V,) cosine of the embedding of each token with that of a word, the mean of its tokens."""
        return self.rows @ normalize(self.rows[list(word)].mean(0), dim=0)

    def are_mutual(self, others: Sequence[tuple[int, ...]], word: Sequence[int]) -> dict[tuple[int, ...], bool]:
        """Return whether a word is near to each of others; always, for words of several tokens."""
        if len(word) > 1 or not others:
            return dict.fromkeys(others, True)
        cosines = self.rows[[tokens[0] for tokens in others]] @ self.rows.T
        ranks = (cosines > cosines[:, list(word)]).sum(1)
        return dict(zip(others, (ranks <= MUTUAL).tolist(), strict=True))

    def similarity(self, word: Sequence[int], other: Sequence[int]) -> float:
        """Return the cosine of the embeddings of two words."""
        return cosine_similarity(self.rows[list(word)].mean(0), self.rows[list(other)].mean(0), dim=0).item()


def may_change(model: Model, ids: Sequence[int]) -> set[int]:
    """Return the positions of a text, or of a chat's messages without the template."""
    turns = model.turns(ids)
    return inside(turns) if turns else set(range(len(ids)))


def by_absolute_relevance(model: Model, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans of tokens, the largest absolute relevance first."""
    relevance = attribute(model, list(ids), sites=()).tokens
    return sorted(spans, key=lambda span: -abs(relevance[slice(*span)].sum().item()))


def exchangeable(model: Model, ids: Sequence[int], allowed: set[int]) -> list[tuple[int, int]]:
    """Return the bounds of the content words at allowed positions; capitalized ones in a row are one phrase."""
    texts = list(model.pieces(ids))
    words = [span for span in words_of(texts) if allowed.issuperset(range(*span))]
    phrases: list[list[tuple[int, int]]] = []
    for start, end in words:
        text = "".join(texts[start:end])
        follows = bool(phrases) and phrases[-1][-1][1] == start
        if follows and _is_name(text) and _is_name("".join(texts[slice(*phrases[-1][-1])])):
            phrases[-1].append((start, end))
        else:
            phrases.append([(start, end)])
    joined = [part for phrase in phrases for part in _split(model, texts, phrase)]
    return [(start, end) for start, end in joined if is_content("".join(texts[start:end]).replace(" ", ""))]


def _is_name(text: str) -> bool:
    word = text.strip()
    return is_word(word) and word[:1].isupper() and not word.isupper()


def _split(model: Model, texts: Sequence[str], phrase: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a phrase as one span, apart from a first word of the text that is an ordinary one: its lower case is one
    token."""
    (start, end), *others = phrase
    lower = "".join(texts[start:end]).strip().lower()
    if others and start <= 1 and len(model.tokens_of(f" {lower}")) == 1:
        return [(start, end), (others[0][0], others[-1][1])]
    return [(start, phrase[-1][1])]


def candidates_for(reader: Reader, embeddings: Embeddings, span: tuple[int, int], logits: Tensor) -> list[Candidate]:
    """Return at most `PER_WORD` exchanges of a word, those with the highest scores. logits: (T, V) of the prompt."""
    ids, (start, end) = reader.ids, span
    if "".join(reader.model.pieces(ids[start:end])).strip().isdecimal():
        return list(islice(_numbers(reader.model, embeddings, ids, span), PER_WORD))
    every = sorted(similar_words(reader, embeddings, span, logits), key=lambda candidate: -candidate.score)[:BEST]
    near = embeddings.are_mutual([candidate.tokens for candidate in every], ids[start:end])
    marked = [replace(candidate, is_near=near[candidate.tokens]) for candidate in every]
    return sorted(marked, key=lambda candidate: not candidate.is_near)[:PER_WORD]


def similar_words(reader: Reader, embeddings: Embeddings, span: tuple[int, int], logits: Tensor) -> Iterator[Candidate]:
    """Yield similar and expected words, of the same form and as many tokens. logits: (T, V) of the prompt."""
    model, ids, (start, end) = reader.model, reader.ids, span
    word, text = ids[start:end], "".join(reader.model.pieces(ids[start:end]))
    logs = logits[start - 1].log_softmax(-1) if start else torch.full_like(logits[0], UNLIKELY)
    expected = _first_tokens(model, logs, text) if start else []
    similar = _first_tokens(model, embeddings.similarities(word), text)
    begun = [[token] for token in dict.fromkeys([*similar, *expected])]
    for _ in word[1:]:
        begun = _continued(reader, ids[:start], begun, "".join(text.split()) != text.strip())
    old = {*text.lower().split()}
    for tokens in begun:
        similarity = embeddings.similarity(tokens, word)
        other = "".join(model.pieces(tokens))
        if similarity >= SIMILAR and old.isdisjoint(other.lower().split()) and is_content(other.replace(" ", "")):
            yield Candidate(start, end, tuple(tokens), similarity, logs[tokens[0]].item())


def fitting_words(reader: Reader, embeddings: Embeddings, span: tuple[int, int], word: str) -> Iterator[Candidate]:
    """Yield the word that a person typed, if it has as many tokens; else the nearest words that have."""
    model, ids, (start, end) = reader.model, reader.ids, span
    text = "".join(model.pieces(ids[start:end]))
    typed = model.tokens_of(text[: len(text) - len(text.lstrip())] + word.strip())
    begun = [[token] for token in _first_tokens(model, embeddings.similarities(typed), text)]
    for _ in range(start + 1, end):
        begun = _continued(reader, ids[:start], begun, "".join(text.split()) != text.strip())
    for tokens in [typed] if len(typed) == end - start else begun:
        yield Candidate(start, end, tuple(tokens), embeddings.similarity(tokens, ids[start:end]), 0.0)


def _first_tokens(model: Model, scores: Tensor, text: str) -> list[int]:
    """Return the tokens that may begin a word of the form of a text, those with the largest scores (V,) first."""
    best = scores.topk(min(SEARCHED, len(scores))).indices.tolist()
    texts = ((token, model.answer_text(token)) for token in best)
    return list(islice((token for token, word in texts if _alike(word, text)), CANDIDATES_PER_WORD))


def _alike(word: str, text: str) -> bool:
    """Return whether a text that a token begins has the space before it, and the case, of another one."""
    is_one = word[:1].isspace() == text[:1].isspace() and is_content(word)
    return is_one and is_word(word.strip()) and word.strip()[0].isupper() == text.strip()[0].isupper()


def _continued(reader: Reader, before: Sequence[int], begun: list[list[int]], is_phrase: bool) -> list[list[int]]:
    """Extend each beginning by the most probable token that continues the word, or adds a name to a phrase."""
    logits = reader.next_logits([[*before, *tokens] for tokens in begun])
    extended = []
    for tokens, values in zip(begun, logits, strict=True):
        best = (
            (token, reader.model.answer_text(token)) for token in values.topk(min(20, len(values))).indices.tolist()
        )
        fitting = (
            token for token, text in best if _goes_on(text) or (is_phrase and text[:1] == " " and _is_name(text))
        )
        extended += [[*tokens, token] for token in islice(fitting, 1)]
    return extended


def _goes_on(text: str) -> bool:
    """Return whether a token continues a word: letters, none of them upper case."""
    return is_word(text) and text == text.lower()


def _numbers(model: Model, embeddings: Embeddings, ids: Sequence[int], span: tuple[int, int]) -> Iterator[Candidate]:
    """Yield other numbers of as many tokens, near ones first."""
    start, end = span
    text = "".join(model.pieces(ids[start:end]))
    number, digits = int(text), len(text.strip())
    space = text[: len(text) - len(text.lstrip())]
    others = (number + 1, number - 1, number + 10, number - 10, 2 * number, number // 2, number + 2, number + 5)
    for other in dict.fromkeys(others):
        tokens = model.tokens_of(f"{space}{other:0{digits}d}") if other >= 0 and other != number else []
        if len(tokens) == end - start:
            yield Candidate(start, end, tuple(tokens), embeddings.similarity(tokens, ids[start:end]), 0.0)

"""Which words of an answer a region of the image raised: the relevance maps of all words, by region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

from torch import Tensor

from icebear.concepts.answers.content_words import words_of
from icebear.concepts.attribution.attribute import attribute
from icebear.models.model import Model
from icebear.models.text.answer import Answer
from icebear.steps import OnProgress, unwatched

MOST_REGIONS = 8
"""The largest number of rows, and of columns, of regions."""


class Region(NamedTuple):
    """Neighboring patches of a relevance map: rows [top, bottom) and columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def name(self) -> str:
        return f"{self.top},{self.left}"

    @property
    def label(self) -> str:
        rows, columns = (
            f"{what} {start}" if stop - start == 1 else f"{what}s {start} to {stop - 1}"
            for what, start, stop in (("row", self.top, self.bottom), ("column", self.left, self.right))
        )
        return f"{rows}, {columns}"

    def total(self, patches: Tensor) -> float:
        """Return the relevance of the region. patches: (rows, columns)"""
        return patches[self.top : self.bottom, self.left : self.right].sum().item()


def regions(patches: Tensor) -> list[Region]:
    """Return the regions of a map (rows, columns), of equally many patches in both directions, row by row."""
    rows, columns = patches.shape
    side = ceil(max(rows, columns) / MOST_REGIONS)
    return [
        Region(top, min(top + side, rows), left, min(left + side, columns))
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]


class WordMap(NamedTuple):
    word: str
    """With its number, if the answer has it several times."""
    patches: Tensor
    """(rows, columns) relevance of the patches, in logits."""


def word_maps(
    model: Model, answer: Answer, on_progress: OnProgress = unwatched, counterfactual_image: Any = None
) -> list[WordMap]:
    """Return the map of each word of an answer; of each token, if it has no words.

    counterfactual_image: as in `attribute`; the maps are then of the difference to it.
    """
    tokens, maps = answer.token_strings, []
    spans = list(words_of(tokens)) or [(position, position + 1) for position in range(len(tokens))]
    texts = numbered(["".join(tokens[slice(*span)]).strip() for span in spans])
    for number, (text, span) in enumerate(zip(texts, spans, strict=True)):
        on_progress(number, len(spans))
        relevance = attribute(model, answer, span=span, sites=(), counterfactual_image=counterfactual_image)
        assert relevance.image is not None
        maps.append(WordMap(text, relevance.image.patches))
    return maps


def numbered(words: Sequence[str]) -> list[str]:
    """Return words, those that occur several times with their number."""
    counts, before = Counter(words), Counter[str]()
    names = []
    for word in words:
        before[word] += 1
        names.append(f"{word} ({before[word]} of {counts[word]})" if counts[word] > 1 else word)
    return names


class RaisedWord(NamedTuple):
    word: str
    relevance: float
    """Of the region, in logits."""
    control: float
    """The mean of the other regions for the same word."""


def raised_words(maps: Sequence[WordMap], region: Region) -> list[RaisedWord]:
    """Return the words for which a region has positive relevance, the largest first.

    maps: of pictures of the same shape."""
    rows = []
    for word, patches in maps:
        total, others = region.total(patches), max(len(regions(patches)) - 1, 1)
        rows.append(RaisedWord(word, total, (patches.sum().item() - total) / others))
    return sorted((row for row in rows if row.relevance > 0), key=lambda row: -row.relevance)

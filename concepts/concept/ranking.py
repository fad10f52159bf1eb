"""In which order neurons are looked at when a concept is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.concept.choosing import separation
from icebear.concepts.concept.reading import LONGEST, Read, columns_of
from icebear.concepts.methods.lrp import ATTNLRP
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import Batch
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neurons import AllNeurons
from icebear.concepts.passes.run import forward_backward
from icebear.concepts.vocabulary import BLOCK, unembedding, vocabulary, written
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.db.store import Store

CNA = 0.001
"""The share of neurons that CNA takes."""
EXPLAINED = 32
"""Examples that are explained for a ranking by relevance, and"""
TOGETHER = 4
"""how many in one pass."""
HITS = 200


@dataclass(frozen=True, eq=False)
class Material:
    """What a ranking may look at."""

    model: Model
    texts: Sequence[str]
    positive: np.ndarray
    """(S,) which have the concept."""
    rank: np.ndarray
    """The rows to rank by; all others are not to be looked at."""
    seen: Read
    x: np.ndarray
    """(S, N) means over texts, standardised by the texts without."""
    left_out: np.ndarray
    """(N,) bool: universal neurons, and those that never move."""
    words: tuple[str, ...]
    store: Store | None

    @property
    def apart(self) -> np.ndarray:
        """(N,) differences of the means over sentences, in standard deviations of the texts without."""
        return separation(self.x[self.rank], self.positive[self.rank])

    def ordered(self, scores: np.ndarray) -> np.ndarray:
        """Columns, the largest score first, without those left out."""
        order = np.argsort(-scores, kind="stable")
        return order[~self.left_out[order]]


Ranking = tuple[np.ndarray, np.ndarray]
"""Columns, the first first; and the weights (N,) of all standardised activations."""


def means(given: Material) -> Ranking:
    """By the difference of the means over sentences, in standard deviations of the texts without."""
    return given.ordered(np.abs(given.apart)), given.apart


def cna(given: Material) -> Ranking:
    """The 0.1 % of neurons with the largest difference of mean activations at the last token (CNA, arXiv 2605.12290,
    which sees FFN neurons only; here the sites that were asked for)."""
    last = given.seen.last[given.rank]
    scores = np.abs(separation(last, given.positive[given.rank]))
    return given.ordered(scores)[: max(1, round(CNA * len(scores)))], given.apart


def relevance(given: Material) -> Ranking:
    """By AttnLRP's relevance for the concept's words as the next token of examples: the sum of their centred logits,
    each neuron compared with its mean over the tokens of texts without."""
    ids = word_ids(given.model, given.words)
    reference = given.seen.means[given.rank[~given.positive[given.rank]]].mean(0)
    places = columns_of(given.seen.neurons)
    texts = [given.texts[row] for row in given.rank if given.positive[row]][:EXPLAINED]
    scores = np.zeros(len(reference))
    for start in range(0, len(texts), TOGETHER):
        for site, found in _relevances(given.model, texts[start : start + TOGETHER], ids, places, reference):
            for layer in range(len(found)):
                if (site, layer) in places:
                    scores[places[site, layer]] += found[layer]
    return given.ordered(scores), given.apart


@torch.no_grad()
def w2(given: Material) -> Ranking:
    """By what their W2 rows add to the logits of the concept's words, less the mean logit; to the side that adds."""
    model, ids = given.model, word_ids(given.model, given.words)
    read = unembedding(model, torch.tensor(ids)).sum(0) - len(ids) * mean_row(model)
    scores = np.zeros(len(given.seen.neurons))
    for (site, layer), columns in columns_of(given.seen.neurons).items():
        rows = written(model, site, layer)
        if rows is not None:
            scores[columns] = (rows @ read)[[given.seen.neurons[c].index for c in columns]].cpu().numpy()
    return given.ordered(np.abs(scores * given.seen.means[given.rank].std(0))), scores


def mean_row(model: Model) -> Tensor:
    """(D,) of the unembedding."""
    size = vocabulary(model).out_features
    parts = [unembedding(model, slice(start, start + BLOCK)).sum(0) for start in range(0, size, BLOCK)]
    return torch.stack(parts).sum(0) / size


def search(given: Material) -> Ranking:
    """The neurons that the store's search finds for the words."""
    if given.store is None or not given.words:
        raise InputError("To find a concept by search, give a store and the concept's words.")
    column = {neuron: place for place, neuron in enumerate(given.seen.neurons)}
    hits = [hit.neuron for hit in given.store.search(" ".join(given.words), HITS)]
    found = [column[neuron] for neuron in dict.fromkeys(hits) if neuron in column]
    found = [place for place in found if not given.left_out[place]]
    if not found:
        raise InputError(f"{given.store.path} finds no neuron for {' '.join(given.words)!r}; give other words.")
    return np.array(found), given.apart


RANKINGS: dict[str, Callable[[Material], Ranking]] = {
    "means": means,
    "cna": cna,
    "relevance": relevance,
    "w2": w2,
    "search": search,
}


# --- relevance for words --------------------------------------------------------------------------------


def word_ids(model: Model, words: Sequence[str]) -> list[int]:
    """The first token of each word, with a space before it. Raises `InputError` without words."""
    if not words:
        raise InputError("To find a concept by relevance or w2, give the concept's words.")
    return list(dict.fromkeys(model.tokens_of(f" {word.strip()}")[0] for word in words))


class CenteredLogits:
    """Explains the sum of the centred logits of some tokens behind each text."""

    def __init__(self, batch: Batch, ids: Sequence[int]) -> None:
        self.batch, self.ids = batch, list(ids)

    def reading(self, model: Model) -> nullcontext[None]:
        return nullcontext()

    def numbers(self, model: Model) -> Tensor:
        ends = [length - 1 for length in self.batch.lengths]
        logits = model.logits(self.batch, ends)[range(len(ends)), range(len(ends))]  # (B, V)
        return (logits[:, self.ids] - logits.mean(-1, keepdim=True)).sum(-1)


def _relevances(
    model: Model,
    texts: Sequence[str],
    ids: Sequence[int],
    places: dict[tuple[str, int], list[int]],
    reference: np.ndarray,
) -> Iterator[tuple[str, np.ndarray]]:
    """site -> (L, N) sums over texts and tokens."""
    batch = model.read([model.token_ids(text, min(LONGEST, model.context_length)) for text in texts])

    def compared(site: str, layer: int, activation: Tensor) -> Tensor:
        return activation - torch.as_tensor(reference[places[site, layer]]).to(activation)

    sites = dict.fromkeys(site for site, _ in places)
    neurons = AllNeurons(model, batch, sites, compared=compared)
    forward_backward(model, CenteredLogits(batch, ids), [Inputs(), neurons], ATTNLRP)
    for row, length in enumerate(batch.lengths):
        for site, relevance in neurons.row(row)[0].items():
            yield site, relevance[:, 1:length].sum(1).double().numpy()

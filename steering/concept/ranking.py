"""The order in which neurons are tried when a concept is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.methods.lrp import ATTNLRP
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neurons import AllNeurons
from icebear.concepts.passes.run import Target, forward_backward
from icebear.concepts.passes.sites import by_site_layer
from icebear.concepts.vocabulary.vocabulary import BLOCK, direct_rows, unembedding, vocabulary
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.steering.concept.choosing import separation
from icebear.steering.concept.reading import LONGEST, Read

if TYPE_CHECKING:
    from icebear.db.store import Store

EXPLAINED, TOGETHER = 32, 4
"""A ranking by relevance explains this many examples, and this many in one pass."""

Ranking = tuple[np.ndarray, np.ndarray]
"""Columns, the best first; and the weights (N,) of all standardized activations."""


@dataclass(frozen=True, eq=False)
class Material:
    """The data that a ranking may use."""

    model: Model
    texts: Sequence[str]
    positive: np.ndarray
    """(S,) which texts have the concept."""
    rank: np.ndarray
    """The rows to rank by; a ranking uses no others."""
    seen: Read
    x: np.ndarray
    """(S, N) means over texts, standardized by the texts without the concept."""
    excluded: np.ndarray
    """(N,) bool: universal neurons, and neurons that never change."""
    words: tuple[str, ...]
    store: Store | None

    @property
    def mean_differences(self) -> np.ndarray:
        """(N,) differences of the means over sentences, in standard deviations of the texts without the concept."""
        return separation(self.x[self.rank], self.positive[self.rank])

    def ordered(self, scores: np.ndarray) -> np.ndarray:
        """Return the columns by score, the largest first, without the excluded ones."""
        order = np.argsort(-scores, kind="stable")
        return order[~self.excluded[order]]


def word_ids(model: Model, words: Sequence[str]) -> list[int]:
    """Return the first token of each word, with a space before it. Raises `InputError` without words."""
    if not words:
        raise InputError("Finding a concept by relevance or w_out needs its words; give some (--words or words=).")
    return list(dict.fromkeys(model.tokens_of(f" {word.strip()}")[0] for word in words))


def means(data: Material) -> Ranking:
    """Rank by the difference of the means over sentences, in standard deviations of the texts without the concept."""
    return data.ordered(np.abs(data.mean_differences)), data.mean_differences


def cna(data: Material) -> Ranking:
    """Take the 0.1 % of neurons with the largest difference of mean activations at the last token (CNA, arXiv
    2605.12290; CNA uses FFN neurons only, this function the sites of the data)."""
    last = data.seen.last[data.rank]
    scores = np.abs(separation(last, data.positive[data.rank]))
    return data.ordered(scores)[: max(1, round(0.001 * len(scores)))], data.mean_differences


def relevance(data: Material) -> Ranking:
    """Rank by AttnLRP's relevance for the concept's words as the next token of examples: for the sum of their centered
    logits, with each neuron compared with its mean over the tokens of texts without the concept."""
    model, ids, places = data.model, word_ids(data.model, data.words), by_site_layer(data.seen.neurons)
    reference = data.seen.means[data.rank[~data.positive[data.rank]]].mean(0)
    texts = [data.texts[row] for row in data.rank if data.positive[row]][:EXPLAINED]
    rows = [model.token_ids(text, min(LONGEST, model.context_length)) for text in texts]
    scores = np.zeros(len(reference))

    def compared(site: str, layer: int, activation: Tensor) -> Tensor:
        return activation - torch.as_tensor(reference[places[site, layer]]).to(activation)

    for part in model.batches(list(map(len, rows)), TOGETHER):
        batch = model.read([rows[number] for number in part])
        neurons = AllNeurons(model, batch, dict.fromkeys(site for site, _ in places), compared=compared)
        forward_backward(model, CenteredLogits(batch, ids), [Inputs(), neurons], ATTNLRP)
        for row, length in enumerate(batch.lengths):
            by_site = neurons.row(row)[0]
            for (site, layer), columns in places.items():
                scores[columns] += by_site[site][layer, 1:length].sum(0).double().numpy()
    return data.ordered(scores), data.mean_differences


class CenteredLogits(Target):
    """The objective is the sum of the centered logits of some tokens after each text."""

    def __init__(self, batch: Batch, ids: Sequence[int]) -> None:
        self.batch, self.ids = batch, list(ids)

    def numbers(self, model: Model) -> Tensor:
        ends = [length - 1 for length in self.batch.lengths]
        logits = model.logits(self.batch, ends)[range(len(ends)), range(len(ends))]  # (B, V)
        return (logits[:, self.ids] - logits.mean(-1, keepdim=True)).sum(-1)


@torch.no_grad()
def w_out(data: Material) -> Ranking:
    """Rank by what W_out rows add to the logits of the concept's words, less the mean logit; the sign that adds."""
    model, ids = data.model, word_ids(data.model, data.words)
    size = vocabulary(model).shape[0]
    parts = [unembedding(model, slice(start, start + BLOCK)).sum(0) for start in range(0, size, BLOCK)]
    mean = torch.stack(parts).sum(0) / size
    read = unembedding(model, torch.tensor(ids)).sum(0) - len(ids) * mean
    scores = np.zeros(len(data.seen.neurons))
    for (site, layer), columns in by_site_layer(data.seen.neurons).items():
        rows = direct_rows(model, site, layer)
        if rows is not None:
            scores[columns] = (rows @ read)[[data.seen.neurons[c].index for c in columns]].cpu().numpy()
    return data.ordered(np.abs(scores * data.seen.means[data.rank].std(0))), scores


def search(data: Material) -> Ranking:
    """Take the neurons that the store's search finds for the words."""
    if data.store is None or not data.words:
        raise InputError("Finding a concept by search needs an index and the concept's words; give both.")
    column = {neuron: place for place, neuron in enumerate(data.seen.neurons) if not data.excluded[place]}
    hits = dict.fromkeys(hit.neuron for hit in data.store.search(" ".join(data.words), 200))
    columns = [column[neuron] for neuron in hits if neuron in column]
    if not columns:
        raise InputError(
            f"The search in {data.store.path} finds no neuron for the concept's words {' '.join(data.words)!r}; give "
            "other words for the concept."
        )
    return np.array(columns), data.mean_differences


RANKINGS: dict[str, Callable[[Material], Ranking]] = {by.__name__: by for by in (means, cna, relevance, w_out, search)}

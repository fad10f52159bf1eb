"""`find_concept`: find the few neurons that separate texts with a concept from texts without it.

Neurons are ranked, and as few of the first as are enough are chosen on other texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.methods.attnlrp import ATTNLRP
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.neuron_recorders import AllNeurons
from icebear.concepts.passes.run import Target, forward_backward
from icebear.concepts.passes.sites import by_site_layer
from icebear.concepts.statistics import auroc, auroc_error
from icebear.concepts.vocabulary.vocabulary import BLOCK, direct_rows, unembedding, vocabulary
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.steering.concept.concept import Concept, ConceptNeuron
from icebear.steering.concept.reading import LONGEST, Read, neurons_of, read
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, one_of, seed_of, several, text_of, typed

SIZES = (1, 2, 3, 5, 7, 10, 14, 20, 30, 50, 70, 100)
CANDIDATES = 300
"""The logistic model chooses from this many neurons, the first of the ranking."""
PENALTIES = tuple(10 ** (step / 4) for step in range(-8, 5))
"""`C` of scikit-learn: the smaller, the fewer neurons."""
TOLERANCE = 0.01
"""The AUROC may fall by this much for fewer neurons."""
UNIVERSAL_NEURONS = 0.001
"""A universal neuron is among this share of the largest activations, in `UNIVERSAL_TEXTS` of all texts (CNA)."""
UNIVERSAL_TEXTS = 0.8
EXPLAINED_TEXTS = 32
"""Examples that a ranking by relevance explains."""
PASS_TEXTS = 4
"""Examples in one of its passes, which keep the activations of all layers."""
Ranking = tuple[np.ndarray, np.ndarray]
"""Columns, the best first; and the weights (N,) of all standardized activations."""
FEWEST = 16
"""The minimum number of texts of each kind; with fewer, too few are left to test on."""
PARTS = (0.5, 0.75)
"""Half of the texts of each kind rank and weigh neurons, a quarter chooses among sets, a quarter tests the chosen."""
MAX_NEURONS = 20


@dataclass(frozen=True, eq=False)
class Choice:
    """Columns and weights (of standardized activations) that detect a concept; their AUROC on the validation texts."""

    detector: str
    columns: np.ndarray
    weights: np.ndarray
    auroc: float

    def values(self, standardized: np.ndarray) -> np.ndarray:
        return standardized[:, self.columns] @ self.weights


def separation(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """(N,) differences of means, in standard deviations of the others; x (S, N) is standardized by those."""
    return x[positive].mean(0) - x[~positive].mean(0)


def universal(values: np.ndarray) -> np.ndarray:
    """(N,) bool: the universal neurons, by activations (S, N) on texts without the concept (CNA, arXiv 2605.12290)."""
    size = np.abs(values)
    count = max(1, round(UNIVERSAL_NEURONS * values.shape[1]))
    bars = np.partition(size, -count, axis=1)[:, -count]
    return (size >= bars[:, None]).mean(0) >= UNIVERSAL_TEXTS


def choose(
    ranked: np.ndarray,
    weights: np.ndarray,
    learn: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    max_neurons: int,
    seed: int,
) -> tuple[Choice, list[Choice]]:
    """Return the smallest choice within `TOLERANCE` of the best AUROC on the validation texts, and all choices tried:
    the first neurons of the ranking with their weights, and L1-penalized logistic models over the first `CANDIDATES`.

    ranked: columns, the best first. learn, test: standardized activations (S, N), and which texts have the concept.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    tried = []
    for size in sorted({*SIZES, max_neurons}):
        if size <= min(max_neurons, len(ranked)):
            tried.append(("means", ranked[:size], weights[ranked[:size]]))
    candidates = ranked[:CANDIDATES]
    for penalty in PENALTIES:
        model = LogisticRegression(
            l1_ratio=1.0, C=penalty, solver="liblinear", class_weight="balanced", random_state=seed, max_iter=1000
        )
        with warnings.catch_warnings():  # one that has not converged is judged on the validation texts like the others
            warnings.simplefilter("ignore", ConvergenceWarning)
            coefficients = model.fit(learn[0][:, candidates], learn[1]).coef_[0]
        chosen = np.flatnonzero(coefficients)
        if 0 < len(chosen) <= max_neurons:
            tried.append(("logistic", candidates[chosen], coefficients[chosen]))
    choices = [Choice(detector, columns, w, auroc(test[0][:, columns] @ w, test[1])) for detector, columns, w in tried]
    bar = max(choice.auroc for choice in choices) - TOLERANCE
    near = [choice for choice in choices if choice.auroc >= bar]
    return min(near, key=lambda choice: (len(choice.columns), -choice.auroc)), choices


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
    model, ids, columns_of = data.model, word_ids(data.model, data.words), by_site_layer(data.seen.neurons)
    reference = data.seen.means[data.rank[~data.positive[data.rank]]].mean(0)
    texts = [data.texts[row] for row in data.rank if data.positive[row]][:EXPLAINED_TEXTS]
    rows = [model.token_ids(text, min(LONGEST, model.context_length)) for text in texts]
    scores = np.zeros(len(reference))

    def compared(site: str, layer: int, activation: Tensor) -> Tensor:
        return activation - torch.as_tensor(reference[columns_of[site, layer]]).to(activation)

    for part in model.batches(list(map(len, rows)), PASS_TEXTS):
        batch = model.read([rows[number] for number in part])
        neurons = AllNeurons(model, batch, dict.fromkeys(site for site, _ in columns_of), compared=compared)
        forward_backward(model, CenteredLogits(batch, ids), [Inputs(), neurons], ATTNLRP)
        for row, length in enumerate(batch.lengths):
            by_site = neurons.row(row)[0]
            for (site, layer), columns in columns_of.items():
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
    column = {neuron: column for column, neuron in enumerate(data.seen.neurons) if not data.excluded[column]}
    hits = dict.fromkeys(hit.neuron for hit in data.store.search(" ".join(data.words), 200))
    columns = [column[neuron] for neuron in hits if neuron in column]
    if not columns:
        raise InputError(
            f"The search in {data.store.path} finds no neuron for the concept's words {' '.join(data.words)!r}; give "
            "other words for the concept."
        )
    return np.array(columns), data.mean_differences


RANKINGS: dict[str, Callable[[Material], Ranking]] = {by.__name__: by for by in (means, cna, relevance, w_out, search)}


@typed
def find_concept(
    model: Model,
    examples: Sequence[str],
    others: Sequence[str],
    name: str = "concept",
    method: str = "means",
    max_neurons: int = MAX_NEURONS,
    sites: Sequence[str] = ("ffn", "attn"),
    words: Sequence[str] = (),
    store: Store | None = None,
    seed: int = 0,
    on_progress: OnProgress = unwatched,
) -> Concept:
    """Find the fewest neurons that separate `examples` from `others` nearly as well as the best set that is tried.

    Half of the texts of each kind rank neurons, a quarter chooses how many and their weights, a quarter tests the
    result.

    Parameters
    ----------
    model
        The model whose neurons are used.
    examples, others
        Texts with and without the concept, at least 16 of each.
    method
        The ranking, a name in `icebear.steering.concept.finding.RANKINGS`: ``means`` (difference of mean activations
        over a sentence), ``cna`` (at the last token), ``relevance`` (for `words` as the next token), ``w_out`` (what
        W_out rows add to the logits of `words`) or ``search`` (the neurons that `store` finds for `words`).
    max_neurons
        The maximum number of neurons.
    sites
        The sites whose neurons are ranked.
    words
        The words of the concept, for the last three methods.
    seed
        The seed of the split into training, validation and test texts.
    on_progress
        Called with (done, total) texts.

    Returns
    -------
    Concept
        Its `provenance` has the AUROC on the test texts with its standard error, and all sets that were tried.

    Raises
    ------
    InputError
        For too few texts, a text of both kinds, an unknown method, or a method without its words.

    References
    ----------
    CNA: arXiv 2605.12290. Standard error of the AUROC: Hanley & McNeil 1982.
    """
    one_of(method, "method to find a concept", RANKINGS)
    max_neurons, seed, sites = check_int(max_neurons, "The number of neurons"), seed_of(seed), several(sites)
    if not sites:
        raise InputError(f"A concept needs at least one site; choose from {', '.join(model.sites)}.")
    words = tuple(map(text_of, several(words)))
    texts, positive, part = prepared(examples, others, seed)
    seen = read(model, texts, neurons_of(model, sites), on_progress)
    rank, *tests = (np.flatnonzero(part == number) for number in range(3))
    without = rank[~positive[rank]]
    centre, spread = seen.means[without].mean(0), seen.means[without].std(0)
    spread = np.where(spread > 0, spread, seen.means[rank].std(0))  # of a neuron that is active with the concept only
    x = (seen.means - centre) / np.where(spread > 0, spread, 1)
    everywhere = universal(seen.means[without])
    material = Material(model, texts, positive, rank, seen, x, everywhere | (spread == 0), words, store)
    ranked, weights = RANKINGS[method](material)
    learn, choosing, last = ((x[rows], positive[rows]) for rows in (rank, *tests))
    chosen, tried = choose(ranked, weights, learn, choosing, max_neurons, seed)
    scale = float(chosen.values(x[without]).std()) or 1.0
    parts = parts_of(seen, chosen.columns, chosen.weights / scale, centre, spread)
    score = auroc(chosen.values(last[0]), last[1])
    tested_on = [int(last[1].sum()), int((~last[1]).sum())]
    provenance = {
        "found_by": method,
        "detector": chosen.detector,
        "auroc": score,
        "error": auroc_error(score, *tested_on),
        "tested_on": tested_on,
        "path": [{"detector": c.detector, "neurons": len(c.columns), "auroc": c.auroc} for c in tried],
        "universal": [str(seen.neurons[column]) for column in np.flatnonzero(everywhere)],
        "examples": int(positive.sum()),
        "others": int((~positive).sum()),
        "words": list(words),
        "sites": list(sites),
        "seed": seed,
        "made_with": model.made_with,
    }
    return Concept(name, parts, model.name, model.fingerprint, provenance)


def parts_of(
    seen: Read, columns: np.ndarray, weights: np.ndarray, centre: np.ndarray, spread: np.ndarray
) -> tuple[ConceptNeuron, ...]:
    """Return the neurons of these columns with their weights, the largest first; centre and spread (N,)."""
    parts = []
    for column, weight in zip(columns.tolist(), weights.tolist(), strict=True):
        polarity, end = ("+", seen.high) if weight > 0 else ("-", seen.low)
        numbers = (abs(weight), float(centre[column]), float(spread[column]), float(end[column]))
        parts.append(ConceptNeuron(seen.neurons[column], polarity, *numbers))
    return tuple(sorted(parts, key=lambda part: -part.weight))


def prepared(examples: Sequence[str], others: Sequence[str], seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the different texts of both kinds, which of them have the concept, and the random part of each: 0 to rank,
    1 to choose, 2 to test on. Raises `InputError`."""
    checked = [[text_of(text).strip() for text in several(texts)] for texts in (examples, others)]
    kinds = [list(dict.fromkeys(filter(None, texts))) for texts in checked]
    both = set(kinds[0]) & set(kinds[1])
    if both:
        raise InputError(
            f"{len(both)} texts are in both lists (with the concept, and without it), such as {min(both)[:40]!r}; "
            "remove them from one list."
        )
    if min(map(len, kinds)) < FEWEST:
        raise InputError(
            f"A concept needs at least {FEWEST} different texts with it and as many without; there are {len(kinds[0])} "
            f"and {len(kinds[1])}, so add more."
        )
    generator = np.random.default_rng(seed)
    parts = [np.digitize(generator.permutation(len(texts)) / len(texts), PARTS) for texts in kinds]
    positive = np.repeat([True, False], [len(kinds[0]), len(kinds[1])])
    return [*kinds[0], *kinds[1]], positive, np.concatenate(parts)

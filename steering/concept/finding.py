"""`find_concept`: find the few neurons that separate texts with a concept from texts without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from icebear.concepts.statistics import auroc, auroc_error
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.steering.concept.concept import Concept, ConceptNeuron
from icebear.steering.concept.ranking import RANKINGS, Material, choose, universal
from icebear.steering.concept.reading import Read, neurons_of, read
from icebear.values import one_of, seed_of, several, text_of, typed, whole

FEWEST = 16
"""The minimum number of texts of each kind; with fewer, too few are left to test on."""
PARTS = (0.5, 0.75)
"""Half of the texts of each kind rank and weigh neurons, a quarter chooses among sets, a quarter tests the chosen."""
MAX_NEURONS = 20


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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
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
        The ranking, a name in `icebear.steering.concept.ranking.RANKINGS`: ``means`` (difference of mean activations
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
    max_neurons, seed, sites = whole(max_neurons, "The number of neurons"), seed_of(seed), several(sites)
    if not sites:
        raise InputError(f"A concept needs at least one site; choose from {', '.join(model.sites)}.")
    words = tuple(map(text_of, several(words)))
    texts, positive, part = prepared(examples, others, seed)
    seen = read(model, texts, neurons_of(model, sites), on_progress)
    rank, *tests = (np.flatnonzero(part == number) for number in range(3))
    without = rank[~positive[rank]]
    centre, spread = seen.means[without].mean(0), spread_of(seen.means[rank], seen.means[without])
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
        "path": [{"detector": one.detector, "neurons": len(one.columns), "auroc": one.auroc} for one in tried],
        "universal": [str(seen.neurons[column]) for column in np.flatnonzero(everywhere)],
        "examples": int(positive.sum()),
        "others": int((~positive).sum()),
        "words": list(words),
        "sites": list(sites),
        "seed": seed,
        "made_with": model.made_with,
    }
    return Concept(name, parts, model.name, model.fingerprint, provenance)


def spread_of(means: np.ndarray, without: np.ndarray) -> np.ndarray:
    """(N,) standard deviations over the texts without the concept; of a neuron that is constant there, as one that is
    active with the concept only, over all texts."""
    own = without.std(0)
    return np.where(own > 0, own, means.std(0))


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

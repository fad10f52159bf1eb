"""`find_concept`: the few neurons that tell texts with a concept from texts without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from icebear.concepts.concept.choosing import choose, universal
from icebear.concepts.concept.ranking import RANKINGS, Material
from icebear.concepts.concept.reading import Read, neurons_of, read
from icebear.concepts.models.model import Model
from icebear.concepts.statistics import auroc, auroc_error
from icebear.errors import InputError
from icebear.steering.concept.concept import Concept, ConceptNeuron
from icebear.values import one_of, seed_of, several, text_of, whole

if TYPE_CHECKING:
    from icebear.db.store import Store

FEWEST = 16
"""Texts of each kind. Of fewer there is nothing left to test on."""
PARTS = (0.5, 0.75)
"""Of the texts of each kind half rank and weigh neurons, a quarter chooses among sets, a quarter tests the chosen."""
MOST = 20
SITES = ("ffn", "attn")


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts with and without a concept, and which part each is of."""

    texts: tuple[str, ...]
    positive: np.ndarray
    """(S,) bool"""
    part: np.ndarray
    """(S,) 0, 1, 2: to rank, to choose, to test on."""

    def rows(self, part: int) -> np.ndarray:
        return np.flatnonzero(self.part == part)


def find_concept(
    model: Model,
    examples: Sequence[str],
    others: Sequence[str],
    name: str = "concept",
    method: str = "means",
    most: int = MOST,
    sites: Sequence[str] = SITES,
    words: Sequence[str] = (),
    store: Store | None = None,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Concept:
    """The fewest neurons, at most `most`, that tell `examples` from `others` nearly as well as any tried number does.

    method: by what neurons are ranked, a name of `icebear.concepts.concept.ranking.RANKINGS`: ``means`` (difference of
        their means over a sentence), ``cna`` (at the last token), ``relevance`` (for `words`), ``w2`` (what they write
        to the logits of `words`), ``search`` (`store`'s neurons of `words`). How many, and their weights, are then
        chosen on texts that they were not ranked on; `provenance` has the path, and the AUROC on texts that nothing was
        chosen on.
    words: the concept's, for the three methods that need them.
    on_progress: of (done, total) texts read.
    Raises `InputError` for too few texts, texts of both kinds, and an unknown method.
    """
    one_of(method, "way to find a concept", RANKINGS)
    most, seed, sites = whole(most, "The number of neurons"), seed_of(seed), several(sites)
    if not sites:
        raise InputError(f"A concept is made of neurons of some sites; name some of {', '.join(model.sites)}.")
    words = tuple(map(text_of, several(words)))
    given = prepared(examples, others, seed)
    seen = read(model, given.texts, neurons_of(model, sites), on_progress)
    rank = given.rows(0)
    without = rank[~given.positive[rank]]
    centre, spread = seen.means[without].mean(0), seen.means[without].std(0)
    x = (seen.means - centre) / np.where(spread > 0, spread, 1)
    left_out = universal(seen.means[without]) | (spread == 0)
    material = Material(model, given.texts, given.positive, rank, seen, x, left_out, words, store)
    ranked, weights = RANKINGS[method](material)
    learn, test, last = ((x[rows], given.positive[rows]) for rows in map(given.rows, range(3)))
    chosen, path = choose(ranked, weights, learn, test, most, seed)
    scale = float(chosen.values(x[without]).std()) or 1.0
    parts = parts_of(seen, chosen.columns, chosen.weights / scale, centre, spread)
    score = auroc(chosen.values(last[0]), last[1])
    positive = int(last[1].sum())
    everywhere = np.flatnonzero(universal(seen.means[without]))
    told = {
        "found_by": method,
        "way": chosen.way,
        "auroc": score,
        "error": auroc_error(score, positive, len(last[1]) - positive),
        "tested on": [positive, len(last[1]) - positive],
        "path": [step.to_dict() for step in path],
        "universal": [str(seen.neurons[column]) for column in everywhere],
        "examples": int(given.positive.sum()),
        "others": int((~given.positive).sum()),
        "words": list(words),
        "sites": list(sites),
        "seed": seed,
        "made_with": model.made_with,
    }
    return Concept(name, parts, model.name, model.fingerprint, told)


def parts_of(
    seen: Read, columns: np.ndarray, weights: np.ndarray, centre: np.ndarray, spread: np.ndarray
) -> tuple[ConceptNeuron, ...]:
    """Neurons of `seen` with a weight each, the largest first; their means and deviations are of all of `seen`."""
    found = []
    for column, weight in zip(columns.tolist(), weights.tolist(), strict=True):
        furthest = float((seen.high if weight > 0 else seen.low)[column])
        own = float(centre[column]), float(spread[column]), furthest
        found.append(ConceptNeuron(seen.neurons[column], "+" if weight > 0 else "-", abs(weight), *own))
    return tuple(sorted(found, key=lambda part: -part.weight))


def prepared(examples: Sequence[str], others: Sequence[str], seed: int) -> Texts:
    """Both kinds, each text once, in three parts by chance. Raises `InputError`."""
    given = [[text_of(text).strip() for text in several(texts)] for texts in (examples, others)]
    kinds = [list(dict.fromkeys(filter(None, texts))) for texts in given]
    both = set(kinds[0]) & set(kinds[1])
    if both:
        raise InputError(
            f"{len(both)} of the texts are given as with and as without the concept, such as {min(both)[:40]!r}; take "
            "them out of one."
        )
    if min(map(len, kinds)) < FEWEST:
        raise InputError(
            f"A concept needs at least {FEWEST} different texts with it and as many without; there are {len(kinds[0])} "
            f"and {len(kinds[1])}."
        )
    generator, parts = np.random.default_rng(seed), []
    for texts in kinds:
        order = generator.permutation(len(texts)) / len(texts)
        parts.append(np.digitize(order, PARTS))
    positive = np.repeat([True, False], [len(kinds[0]), len(kinds[1])])
    return Texts((*kinds[0], *kinds[1]), positive, np.concatenate(parts))

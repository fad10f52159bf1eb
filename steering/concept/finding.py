"""`find_concept`: the few neurons that tell texts with a concept from texts without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""The least number of texts of each kind; with fewer there are none left to test on."""
PARTS = (0.5, 0.75)
"""Half of the texts of each kind rank and weigh neurons, a quarter chooses among sets, a quarter tests the chosen."""
MOST = 20
SITES = ("ffn", "attn")


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
    texts, positive, part = prepared(examples, others, seed)
    seen = read(model, texts, neurons_of(model, sites), on_progress)
    rank, *tests = (np.flatnonzero(part == number) for number in range(3))
    without = rank[~positive[rank]]
    centre, spread = seen.means[without].mean(0), seen.means[without].std(0)
    x = (seen.means - centre) / np.where(spread > 0, spread, 1)
    everywhere = universal(seen.means[without])
    material = Material(model, texts, positive, rank, seen, x, everywhere | (spread == 0), words, store)
    ranked, weights = RANKINGS[method](material)
    learn, choosing, last = ((x[rows], positive[rows]) for rows in (rank, *tests))
    chosen, tried = choose(ranked, weights, learn, choosing, most, seed)
    scale = float(chosen.values(x[without]).std()) or 1.0
    parts = parts_of(seen, chosen.columns, chosen.weights / scale, centre, spread)
    score = auroc(chosen.values(last[0]), last[1])
    tested_on = [int(last[1].sum()), int((~last[1]).sum())]
    provenance = {
        "found_by": method,
        "way": chosen.way,
        "auroc": score,
        "error": auroc_error(score, *tested_on),
        "tested on": tested_on,
        "path": [{"way": one.way, "neurons": len(one.columns), "auroc": one.auroc} for one in tried],
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
    """Return the neurons of these columns with a weight each, the largest first; means and deviations are of all of
    `seen`."""
    parts = []
    for column, weight in zip(columns.tolist(), weights.tolist(), strict=True):
        polarity, end = ("+", seen.high) if weight > 0 else ("-", seen.low)
        numbers = (abs(weight), float(centre[column]), float(spread[column]), float(end[column]))
        parts.append(ConceptNeuron(seen.neurons[column], polarity, *numbers))
    return tuple(sorted(parts, key=lambda part: -part.weight))


def prepared(examples: Sequence[str], others: Sequence[str], seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the texts of both kinds, each once, which have the concept, and the part of each, drawn at random: 0 to
    rank, 1 to choose, 2 to test on. Raises `InputError`."""
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
    generator = np.random.default_rng(seed)
    parts = [np.digitize(generator.permutation(len(texts)) / len(texts), PARTS) for texts in kinds]
    positive = np.repeat([True, False], [len(kinds[0]), len(kinds[1])])
    return [*kinds[0], *kinds[1]], positive, np.concatenate(parts)

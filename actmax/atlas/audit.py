"""`audit`: which clusters of an atlas do the work on prompts, and which differ between two groups of prompts.

The mean of a group is the same in every order of its prompts, so the null of one group draws the members of the
clusters anew; that of two groups draws the groups anew. Both are tested by the largest score of all clusters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icebear.actmax.atlas.atlas import Atlas
from icebear.actmax.atlas.clusters import Cluster
from icebear.actmax.atlas.side_data import side_columns
from icebear.concepts.attribution.attribute import BATCH_SIZE, attribute
from icebear.concepts.attribution.cases import Case, case_of, read_cases, rows_of_file
from icebear.concepts.results.ranking import Ranking
from icebear.db.store import Store
from icebear.errors import InputError, StoreError
from icebear.models.model import Model
from icebear.records import POLARITIES, Example, Neuron
from icebear.values import typed

PERMUTATIONS = 999
LEVEL = 0.05
"""The family-wise error rate: how often any cluster is claimed where there is no difference."""
FEWEST_PROMPTS = 4
"""The prompts of each of two groups: with fewer, more than 5 % of permutations are as extreme as any result."""
EXAMPLES = 3
MOST_SIDES = 20
"""The sides of a cluster whose sentences are counted: those that do the most work."""


@dataclass(frozen=True)
class ClusterWork:
    """How much of the work on prompts a cluster does."""

    number: int
    """In `Atlas.clusters`."""
    cluster: Cluster
    share: float
    """Its part of the positive relevance of all FFN neurons, the mean over the prompts."""
    compared: float
    """The same for the other prompts or, without others, for as many random sides of the same layers."""
    score: float
    """The difference of both, as square roots, in standard deviations: within the groups or, without others, of sums of
    random sides. A few prompts, or sides, with most of the relevance weigh less so."""
    p: float
    """The share of permutations in which any cluster has as large a score (of either sign with others)."""
    examples: tuple[tuple[str, Example], ...]
    """If it is claimed: sentences of the sides with the largest difference, each with its side."""


@dataclass(frozen=True)
class Audit:
    """Which clusters do the work on prompts."""

    prompts: int
    others: int
    """The number of prompts that they are compared with; 0 for none."""
    threshold: float
    """The largest score of all clusters is above it in 5 % of permutations."""
    clusters: tuple[ClusterWork, ...]
    """Those that have FFN neurons, the smallest p first, then the largest score."""

    @property
    def claimed(self) -> tuple[ClusterWork, ...]:
        return tuple(row for row in self.clusters if row.p <= LEVEL)


@typed
def audit(model: Model, store: Store, atlas: Atlas, prompts: Sequence[Case], others: Sequence[Case] = ()) -> Audit:
    """Compute which clusters of an atlas do the work on prompts, or differ between two groups of prompts.

    Parameters
    ----------
    model, store, atlas
        The atlas, and the model and the index that it was made from.
    prompts, others : sequence of Case
        The prompts, and those that they are compared with, see `read_groups`.

    Returns
    -------
    Audit

    Raises
    ------
    InputError
        If a group has too few prompts, or a prompt has a counterfactual.
    StoreError
        If the index is of another model, or no cluster has FFN neurons.
    """
    check_groups(prompts, others)
    store.check(model.index_fingerprint, model.name)
    generator, cluster = np.random.default_rng(atlas.made_with["seed"]), clusters_of(model, store, atlas)
    group = np.arange(len(prompts) + len(others)) < len(prompts)
    weights = np.where(group, 1 / len(prompts), -1 / max(len(others), 1))
    shares, sides = shares_of(model, cluster, [*prompts, *others], weights)
    if others:
        permuted = [generator.permutation(group) for _ in range(PERMUTATIONS)]
        scores = differences(np.sqrt(shares), np.array([group, *permuted]))
        compared, sizes = shares[~group].mean(0), np.abs(scores)
    else:
        compared = random_shares(sides, cluster, generator)[1:].mean(0)
        drawn = random_shares(np.sqrt(sides), cluster, generator)
        scores = sizes = (drawn - drawn[1:].mean(0)) / drawn[1:].std(0).clip(1e-30)
    largest, numbers = sizes.max(1), np.unique(cluster[cluster >= 0])
    p = (largest[:, None] >= sizes[0] - 1e-9).mean(0)
    rows = []
    for number in numbers[np.argsort(-sizes[0, numbers], kind="stable")].tolist():
        work = np.where(cluster == number, sides * np.sign(scores[0, number]), -np.inf)
        examples = sentences_of(store, work) if p[number] <= LEVEL else ()
        share, other, score, chance = (float(x[number]) for x in (shares[group].mean(0), compared, scores[0], p))
        rows.append(ClusterWork(number, atlas.clusters[number], share, other, score, chance, examples))
    return Audit(len(prompts), len(others), float(np.quantile(largest, 1 - LEVEL)), tuple(rows))


def check_groups(prompts: Sequence[Case], others: Sequence[Case]) -> None:
    """Raise `InputError` for prompts that cannot be audited."""
    counts = len(prompts), len(others)
    if not prompts or 0 < min(counts) < FEWEST_PROMPTS or any(case.counterfactual for case in (*prompts, *others)):
        raise InputError(
            f"An audit takes prompts without counterfactuals, at least {FEWEST_PROMPTS} in each of two groups, not "
            f"{counts[0]} and {counts[1]}; change the prompts."
        )


def clusters_of(model: Model, store: Store, atlas: Atlas) -> np.ndarray:
    """Return the cluster (2, L, N) of each FFN neuron at + and -; -1 for none, -2 for sides that are not on the map."""
    layer, site, index = side_columns(store, atlas.sides)
    cluster = np.full((2, model.layers, model.width("ffn")), -2)
    inside = site == "ffn"
    cluster[atlas.sides[inside] % 2, layer[inside], index[inside]] = atlas.cluster[inside]
    if cluster.max() < 0:
        raise StoreError(f"No cluster of {store.path} has FFN neurons; index more sentences, with --site ffn.")
    return cluster


def shares_of(
    model: Model, cluster: np.ndarray, cases: Sequence[Case], weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares (n, C) of clusters in the positive relevance of each prompt, and the weighted sum of the shares
    of sides (2, L, N). A neuron is at + or - by its activation at each token; sinks and chat templates do not count."""
    sides, inside = np.zeros(cluster.shape), cluster >= 0
    shares: list[np.ndarray] = []
    for start in range(0, len(cases), BATCH_SIZE):  # relevance of all neurons at all tokens is large
        part = cases[start : start + BATCH_SIZE]
        arguments = ([getattr(case, name) for case in part] for name in ("prompt", "target", "contrast"))
        for relevance in attribute(model, *arguments, sites=("ffn",)):
            tokens = Ranking(position="all").positions(relevance.prompt)
            values, minus = relevance.ffn[:, tokens].clamp(min=0), relevance.neurons.activation["ffn"][:, tokens] < 0
            share = np.stack([(values * signs).sum(1).double().numpy() for signs in (~minus, minus)])
            share /= share.sum().clip(1e-30)
            sides += weights[len(shares)] * share
            shares.append(np.bincount(cluster[inside], share[inside]))
    return np.array(shares), sides


def differences(shares: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return the differences of means (P, C) of the groups True and False (P, n) of shares (n, C), in standard
    deviations within the groups; 0 where all shares are equal."""
    x = shares - shares.mean(0)
    x /= np.where(x.std(0) > 1e-12, x.std(0), np.inf)  # so that the sum of squares is n
    count, size = len(x), group.sum(1)[:, None]
    mean = group @ x / size
    within = count - mean**2 * size * count / (count - size)
    return mean * count / (count - size) / np.sqrt(within.clip(1e-9) / (count - 2))


def random_shares(sides: np.ndarray, cluster: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the sums (1 + P, C) of values of sides (2, L, N) in the clusters, and in as many random sides of the same
    layers."""
    labels, values = ([x[:, at][cluster[:, at] > -2] for at in range(cluster.shape[1])] for x in (cluster, sides))
    draws = [labels, *([generator.permutation(row) for row in labels] for _ in range(PERMUTATIONS))]
    weights = np.concatenate(values)
    return np.array([np.bincount(np.concatenate(draw) + 1, weights)[1:] for draw in draws])


def sentences_of(store: Store, work: np.ndarray) -> tuple[tuple[str, Example], ...]:
    """Return the sentences that most of the sides (2, L, N) that do the most work have as examples, each with one
    of them."""
    rows: dict[int, tuple[str, Example]] = {}
    counts: Counter[int] = Counter()
    for side in np.argsort(-work, axis=None)[: min(MOST_SIDES, np.isfinite(work).sum())].tolist():
        polarity, layer, index = map(int, np.unravel_index(side, work.shape))
        for example in store.examples(Neuron(layer, "ffn", index), POLARITIES[polarity]):
            rows[example.sentence.id] = f"L{layer}.ffn.{index} {POLARITIES[polarity]}", example
            counts[example.sentence.id] += 1
    return tuple(rows[identity] for identity, _ in counts.most_common(EXAMPLES))


def read_groups(path: str | Path, against: str | Path | None = None) -> tuple[list[Case], list[Case]]:
    """Read the prompts that are audited, and those that they are compared with, if there are any: those of `against`
    or, with a field `right` in each row, those with true. See `rows_of_file`. Raises `InputError`."""
    rows = list(rows_of_file(path))
    right = [row.pop("right", None) if isinstance(row, dict) else None for row, _ in rows]
    cases, values = [case_of(row, where) for row, where in rows], {*map(repr, right)}
    others = [case for case, is_right in zip(cases, right, strict=True) if is_right]
    if values == {"None"}:
        others = read_cases(against) if against else []
    elif values == {"True", "False"} and not against:
        cases = [case for case, is_right in zip(cases, right, strict=True) if not is_right]
    else:
        raise InputError(f"{path} has the field right: write true or false in each row, and leave out --against.")
    check_groups(cases, others)
    return cases, others

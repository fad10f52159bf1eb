"""`atlas`: a map of all neurons of an index, by what their sentences are about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from icebear.actmax.atlas.clusters import Cluster, grouped, named
from icebear.actmax.atlas.layer_meanings import LayerMeanings, clarity, layer_meanings
from icebear.actmax.atlas.neighbor_map import neighbors, plane, principal
from icebear.actmax.atlas.side_data import read_sides
from icebear.db.store import Store
from icebear.errors import need
from icebear.steps import OnProgress, unwatched
from icebear.values import seed_of, typed


@dataclass(frozen=True, eq=False)
class Atlas:
    """A map of the neurons of an index. A side is a neuron at one polarity, N are those with sentences."""

    sides: np.ndarray
    """(N,) 2 * neuron id + (polarity is -), ascending."""
    points: np.ndarray
    """(N, 2), within -1 to 1."""
    cluster: np.ndarray
    """(N,) the number in `clusters`; -1 for none."""
    clarity: np.ndarray
    """(N,) the mean cosine of the side's sentences with one another."""
    clusters: tuple[Cluster, ...]
    """The largest first."""
    layers: tuple[LayerMeanings, ...]
    made_with: dict[str, Any]
    """See `Store.made_with`."""


@typed
def atlas(store: Store, seed: int = 0, on_progress: OnProgress = unwatched) -> Atlas:
    """Make a map of all neurons of an index, heads left out, by what their maximally activating sentences are about.

    Parameters
    ----------
    store : Store
        A finished index.
    seed : int
        The same seed gives the same map, bit for bit on one machine.
    on_progress : callable
        Called with (percent, 100), roughly by time.

    Returns
    -------
    Atlas

    Raises
    ------
    InputError
        If a package is missing.
    StoreError
        If the scan is not finished, or the index has no vectors of sentences or too few neurons.
    """
    need("index")
    need("atlas")
    seed, data = seed_of(seed), read_sides(store)
    on_progress(6, 100)
    vectors, in_half = data.half()
    components = principal(vectors)
    near = neighbors(components)
    points = plane(components, near, seed, lambda done, total: on_progress(20 + 33 * done // total, 100))
    cluster = np.where(in_half, grouped(points), -1)
    on_progress(56, 100)
    clusters = named(cluster, data, seed)
    on_progress(77, 100)
    return Atlas(
        data.sides,
        points,
        cluster,
        clarity(data.examples, data.sentence_vectors),
        clusters,
        layer_meanings(data, seed),
        {**store.made_with(), "seed": seed},
    )

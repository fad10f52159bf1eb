"""The atlas of an index: how many neighbors the map keeps, how many clusters have a name, each beside its null.

    python benchmarks/atlas.py wiki.db [--umap]

--umap: UMAP as well, which needs umap-learn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from icebear import open_store
from icebear.actmax.atlas.clusters import grouped, named
from icebear.actmax.atlas.neighbor_map import neighbors, plane, principal
from icebear.actmax.atlas.side_data import SideData, read_sides
from icebear.db.vectors import unit

KEPT = 15
DRAWN = 2000
"""The sides whose nearest neighbors are looked up among all."""


def neighbors_kept(vectors: np.ndarray, points: np.ndarray) -> float:
    """Return the share of the nearest sides by cosine that are among the nearest points; the mean over drawn sides."""
    rows, drawn = unit(vectors), np.random.default_rng(0).choice(len(points), DRAWN, replace=False)
    shares = []
    for side in drawn.tolist():
        cosines, distances = rows @ rows[side], ((points - points[side]) ** 2).sum(1)
        cosines[side], distances[side] = -9, np.inf
        near = np.argpartition(-cosines, KEPT)[:KEPT], np.argpartition(distances, KEPT)[:KEPT]
        shares.append(len(np.intersect1d(*near)) / KEPT)
    return float(np.mean(shares))


def umap(vectors: np.ndarray) -> np.ndarray:
    from umap import UMAP

    return UMAP(metric="cosine", random_state=0, n_jobs=1).fit_transform(vectors)


def planes(vectors: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    """Return how each map is made."""
    components = principal(vectors)
    made: dict[str, Callable[[], np.ndarray]] = {
        "t-SNE (openTSNE)": lambda: plane(components, neighbors(components), 0),
        "two principal components": lambda: components[:, :2],
        "random points": lambda: np.random.default_rng(0).normal(size=(len(vectors), 2)),
    }
    return made | ({"UMAP": lambda: umap(vectors)} if "--umap" in sys.argv else {})


def names(points: np.ndarray, data: SideData) -> str:
    """Return how many clusters have a name: those of the map, and after their sides were shuffled."""
    cluster = grouped(points)
    shuffled = np.random.default_rng(1).permutation(cluster)
    counts = [sum(bool(row.words) for row in named(labels, data, 0)) for labels in (cluster, shuffled)]
    inside = (cluster >= 0).mean()
    return (
        f"{counts[0]} of {cluster.max() + 1} clusters named, {counts[1]} shuffled; {inside:.0%} of sides in a cluster"
    )


if __name__ == "__main__":
    with open_store(sys.argv[1]) as store:
        data = read_sides(store)
    print(f"{len(data.sides):,} sides, {len(data.sentences):,} sentences")
    for title, vectors in (("half of the documents", data.half()[0]), ("all documents", data.vectors)):
        for name, make in planes(vectors).items():
            begun = time.process_time()
            points = make()
            taken = time.process_time() - begun
            print(
                f"{title}; {name}: {neighbors_kept(vectors, points):.3f} of neighbors kept, {taken:.0f} CPU s",
                flush=True,
            )
            if "random" not in name:
                print("   ", names(points, data), flush=True)

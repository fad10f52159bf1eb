"""The plane of the atlas: t-SNE, which keeps more of the nearest neighbors than UMAP (docs/atlas.md)."""

from __future__ import annotations

from typing import Any

import numpy as np

from icebear.db.vectors import unit
from icebear.steps import OnProgress, counting, unwatched

COMPONENTS = 50
"""Nearest neighbors are searched in this many principal components."""
NEIGHBORS = 30
"""As many neighbors as t-SNE reads; its perplexity is a third of it."""
EARLY = 50
"""Iterations in which clusters form, with attraction 12 times as strong."""
LATE = 200
CALLBACK = 5
"""The iterations between two reports of progress."""
EXACT = 20_000
"""Up to this many rows the search for neighbors is exact; above, it looks at the nearest 1 of 16 parts."""

PAGE_STEPS = 65535
"""The page has each coordinate in this many steps."""

Neighbors = tuple[np.ndarray, np.ndarray]
"""The ids (N, K) of the nearest rows of each row, and their distances."""


def plane(components: np.ndarray, near: Neighbors, seed: int, on_progress: OnProgress = unwatched) -> np.ndarray:
    """Return points (N, 2), within -1 to 1, of which the nearest ones are the rows' nearest neighbors.

    components: the rows (N, C) in principal components, where the map starts. near: see `neighbors`. on_progress: is
    called with iterations.
    """
    from openTSNE import TSNEEmbedding
    from openTSNE.affinity import PerplexityBasedNN
    from openTSNE.nearest_neighbors import PrecomputedNeighbors

    perplexity = near[0].shape[1] / 3
    affinities = PerplexityBasedNN(perplexity=perplexity, knn_index=PrecomputedNeighbors(*near), n_jobs=1)
    start = components[:, :2].astype(np.float64) / components[:, 0].std().clip(1e-12) * 1e-4
    repulsion = "bh" if len(start) <= EXACT else "fft"  # of few points, a tree is quicker than the grid
    embedding = TSNEEmbedding(start, affinities, negative_gradient_method=repulsion, n_jobs=1, random_state=seed)
    advance = counting(on_progress, EARLY + LATE)
    watched = {"callbacks": lambda *_: advance(CALLBACK), "callbacks_every_iters": CALLBACK}
    embedding = embedding.optimize(n_iter=EARLY, exaggeration=12, momentum=0.5, **watched)
    points = np.asarray(embedding.optimize(n_iter=LATE, momentum=0.8, **watched))
    points -= (points.max(0) + points.min(0)) / 2
    return apart((points / np.abs(points).max()).astype(np.float32))


def on_page(points: np.ndarray) -> np.ndarray:
    """Return points (N, 2), within -1 to 1, in steps of the page, from 0 to `PAGE_STEPS`."""
    return np.round((points.astype(np.float64) + 1) / 2 * PAGE_STEPS).astype(np.int64)


def apart(points: np.ndarray) -> np.ndarray:
    """Return points (N, 2), within -1 to 1, of which no two are in one step of the page: nobody could tell them apart.

    Where several are, the first one stays, and each other one goes to the nearest free step.
    """
    steps = on_page(points)
    _, staying = np.unique(steps, axis=0, return_index=True)
    taken, points = set(map(tuple, steps[staying].tolist())), points.copy()
    rings: dict[tuple[int, int], int] = {}  # of steps around which all nearer ones are taken
    for row in np.setdiff1d(np.arange(len(points)), staying).tolist():
        middle = (int(steps[row, 0]), int(steps[row, 1]))
        while not (free := _ring(middle, rings.setdefault(middle, 1), taken)):
            rings[middle] += 1
        taken.add(free)
        points[row] = np.array(free) / PAGE_STEPS * 2 - 1
    return points


def _ring(middle: tuple[int, int], distance: int, taken: set[tuple[int, int]]) -> tuple[int, int] | None:
    """Return a free step of the page on the square around `middle`; None if all are taken."""
    x, y = middle
    across = range(-distance, distance + 1)
    square = [
        step
        for d in across
        for step in ((x + d, y - distance), (x + d, y + distance), (x - distance, y + d), (x + distance, y + d))
    ]
    inside = (step for step in square if min(step) >= 0 and max(step) <= PAGE_STEPS)
    return next((step for step in inside if step not in taken), None)


def principal(rows: np.ndarray) -> np.ndarray:
    """Return rows (N, D) in their first principal components (N, C), each with a fixed sign."""
    rows = rows - rows.mean(0)
    directions = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :COMPONENTS]
    directions = directions * np.sign(directions[np.abs(directions).argmax(0), np.arange(directions.shape[1])])
    return rows @ directions


def neighbors(rows: np.ndarray) -> Neighbors:
    """Return the rows with the directions nearest to that of each row (N, C), without itself."""
    import faiss

    rows, count = np.ascontiguousarray(unit(rows), dtype=np.float32), min(NEIGHBORS, len(rows) - 1)
    index: Any = faiss.index_factory(rows.shape[1], "Flat" if len(rows) <= EXACT else "IVF256,Flat", faiss.METRIC_L2)
    index.train(rows)
    index.add(rows)
    if len(rows) > EXACT:
        index.nprobe = 16
    squares, ids = index.search(rows, count + 1)
    others = ids != np.arange(len(rows))[:, None]
    others[others.all(1), -1] = False  # of many equal rows, the row itself may be missing
    shape = len(rows), count
    return ids[others].reshape(shape), np.sqrt(squares[others].clip(0)).reshape(shape)

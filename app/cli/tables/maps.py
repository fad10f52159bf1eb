"""The layers and clusters of an atlas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from icebear.app.cli.tables.grid import grid

if TYPE_CHECKING:
    from icebear.actmax.atlas.atlas import Atlas
    from icebear.actmax.atlas.compare import Comparison
    from icebear.db.store import Store
    from icebear.records import Neuron

NAMED = 20
"""The number of clusters, and of neurons that moved, that are listed."""


@dataclass(frozen=True)
class MovedSide:
    """A neuron at one polarity whose sentences have another meaning in the other model."""

    neuron: str
    polarity: str
    moved: float
    exchanged: float
    """The share of its sentences that it does not have in the other model."""
    lost: str
    """The strongest of these sentences."""
    new: str
    """The strongest sentence that it has in the other model only."""


def atlas_report(atlas: Atlas, sample: str) -> Iterator[Table | Text]:
    """The layers of a map, next to the same numbers by chance, and its largest clusters with a name."""
    rows = [
        (
            f"L{row.layer}.{row.site}",
            f"{row.sides:,}",
            *(f"{value:z.3f}" for value in (row.clarity, row.clarity_by_chance)),
            *(f"{value:.1%}" for value in (row.redundant, row.redundant_by_chance)),
            *(f"{value:.1%}" for value in (row.without_meaning, row.without_meaning_by_chance)),
        )
        for row in atlas.layers
    ]
    columns = (">sides", ">clarity", ">by chance", ">redundant", ">by chance", ">no meaning", ">by chance")
    yield grid("layer", *columns, rows=rows)
    named = [cluster for cluster in atlas.clusters if cluster.words]
    clusters = [(f"{cluster.size:,}", cluster.name) for cluster in named[:NAMED]]
    title = f"{len(named):,} of {len(atlas.clusters):,} clusters have a name; the largest of them"
    yield grid(">sides", "cluster", rows=clusters, title=title)
    yield Text(f"The map has {len(atlas.sides):,} sides: neurons at one polarity. The index holds {sample}.", "dim")


def moved_sides(comparison: Comparison, store: Store, other: Store) -> list[MovedSide]:
    """The sides that moved farther than by chance, the farthest first."""
    top = comparison.top()
    neurons = store.neurons.of((comparison.sides[top] // 2).tolist())
    return [_moved_side(comparison, number, neurons, store, other) for number in top.tolist()]


def _moved_side(
    comparison: Comparison, number: int, neurons: dict[int, Neuron], store: Store, other: Store
) -> MovedSide:
    side = int(comparison.sides[number])
    neuron, polarity = neurons[side // 2], "+-"[side % 2]
    texts = [[e.sentence.text for e in opened.examples(neuron, polarity)] for opened in (store, other)]
    lost, new = (next((t for t in texts[i] if t not in texts[1 - i]), "") for i in (0, 1))
    moved, exchanged = float(comparison.moved[number]), float(comparison.exchanged[number])
    return MovedSide(str(neuron), polarity, moved, exchanged, lost, new)


def comparison_report(comparison: Comparison, sides: list[MovedSide]) -> Iterator[Table | Text]:
    """How many neurons moved, beside chance, and the sentences of those that moved farthest."""
    one, two = (made_with["model"]["name"] for made_with in comparison.made_with)
    yield Text(
        f"From {one} to {two}, {len(sides):,} of {len(comparison.sides):,} sides (neurons at one polarity) moved "
        f"[by chance: {comparison.top_by_chance:,.0f}]."
    )
    rows = [
        (f"{side.neuron} {side.polarity}", f"{side.moved:.2f}", f"{side.exchanged:.0%}", side.lost, side.new)
        for side in sides[:NAMED]
    ]
    if rows:
        yield grid("side", ">moved", ">exchanged", f"only in {one}", f"only in {two}", rows=rows)

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

NAMED = 20
"""The number of clusters, and of neurons with other sentences, that are printed."""
LISTED = 100
"""The number of neurons with other sentences in the JSON document."""


@dataclass(frozen=True)
class ExchangedSide:
    """A neuron at one polarity that has other sentences in the other model."""

    neuron: str
    polarity: str
    exchanged: float
    """The share of its sentences that it does not have in the other model."""
    moved: float
    """See `Comparison.moved`."""
    lost: str
    """The strongest of the exchanged sentences."""
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


def exchanged_sides(comparison: Comparison, store: Store, other: Store) -> list[ExchangedSide]:
    """The sides with most exchanged sentences."""
    order = comparison.order[:LISTED]
    order = order[comparison.exchanged[order] > 0]
    neurons, sides = store.neurons.of((comparison.sides[order] // 2).tolist()), []
    for number, side in zip(order.tolist(), comparison.sides[order].tolist(), strict=True):
        neuron, polarity = neurons[side // 2], "+-"[side % 2]
        texts = [[e.sentence.text for e in opened.examples(neuron, polarity)] for opened in (store, other)]
        lost, new = (next((text for text in texts[i] if text not in texts[1 - i]), "") for i in (0, 1))
        numbers = float(comparison.exchanged[number]), float(comparison.moved[number])
        sides.append(ExchangedSide(str(neuron), polarity, *numbers, lost, new))
    return sides


def comparison_report(comparison: Comparison, sides: list[ExchangedSide]) -> Iterator[Table | Text]:
    """How many sentences are exchanged, in how many sides the meaning moved, and the sides that changed most."""
    before, after = (made_with["model"]["name"] for made_with in comparison.made_with)
    moved, by_chance = ((values > comparison.least).sum() for values in (comparison.moved, comparison.by_chance))
    yield Text(
        f"From {before} to {after}, {comparison.exchanged.mean():.1%} of the sentences are exchanged. In {moved:,} of "
        f"{len(comparison.sides):,} sides (neurons at one polarity) the meaning moved by more than "
        f"{comparison.least:.3f} [by chance: {by_chance:,}]."
    )
    rows = [
        (f"{side.neuron} {side.polarity}", f"{side.exchanged:.0%}", f"{side.moved:z.3f}", side.lost, side.new)
        for side in sides[:NAMED]
    ]
    if rows:
        yield grid("side", ">exchanged", ">moved", f"only in {before}", f"only in {after}", rows=rows)

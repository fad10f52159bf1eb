"""The layers and clusters of an atlas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from icebear.app.cli.tables.grid import grid

if TYPE_CHECKING:
    from icebear.actmax.atlas.atlas import Atlas

NAMED = 20
"""The number of clusters that are listed."""


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

"""The layers and clusters of an atlas, and the clusters that do the work on prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from icebear.app.cli.tables.cards import highlighted
from icebear.app.cli.tables.grid import grid

if TYPE_CHECKING:
    from icebear.actmax.atlas.atlas import Atlas
    from icebear.actmax.atlas.audit import Audit
    from icebear.actmax.atlas.compare import ExchangedSide, IndexComparison

NAMED = 20
"""The number of clusters, and of neurons with other sentences, that are printed."""


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


def audit_report(audit: Audit) -> Iterator[Table | Text]:
    """The claimed clusters, with their names or tested words, with sentences, and the largest score by chance."""
    count, rows = len(audit.clusters), []
    what = f"differ between {audit.prompts} prompts and {audit.others} others"
    if not audit.others:
        what = f"do more of the work on {audit.prompts} prompts than as many random neurons of the same layers"
    for row in audit.claimed[:NAMED]:
        lines = [Text(row.cluster.name or f"({', '.join(row.cluster.tested_words)})", "bold")]
        lines += [Text.assemble((f"{side}  ", "dim"), highlighted(example)) for side, example in row.examples]
        numbers = (f"{row.share:.2%}", f"{row.compared:.2%}", f"{row.score:+.1f}", f"{row.p:.3f}")
        rows.append((Text("\n").join(lines), *numbers))
    title = f"{len(audit.claimed)} of {count} clusters {what}" + f"; the first {NAMED}" * (len(audit.claimed) > NAMED)
    columns = (">share", ">others" if audit.others else ">random", ">score", ">p")
    yield grid("cluster", *columns, rows=rows, title=title) if rows else Text(f"No cluster is shown to {what}.")
    yield Text(f"Largest score {audit.clusters[0].score:+.1f}; by chance above {audit.threshold:.1f} in 5 %.", "dim")


def comparison_report(comparison: IndexComparison, sides: list[ExchangedSide]) -> Iterator[Table | Text]:
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

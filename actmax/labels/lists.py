"""Lists of labels: of many, which hold."""

from __future__ import annotations

from collections.abc import Iterable

from icebear.actmax.labels.scores import accepted, margin
from icebear.records import Meaning


def clearest(found: Iterable[Meaning]) -> list[Meaning]:
    """Those that are clear, the clearest first, and hold among all that were tried (Benjamini-Hochberg at 5 %)."""
    tried = list(found)
    holding = [m for m, holds in zip(tried, accepted([m.p for m in tried]), strict=True) if holds and m.clear]
    return sorted(holding, key=lambda m: (-margin(m.by, m.score), m.neuron, m.polarity))

"""What a neuron means: the sentences of a corpus that drive it furthest, in one SQLite file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from icebear.actmax.card import Card as Card
    from icebear.actmax.card import describe as describe
    from icebear.actmax.explanation import Explanation as Explanation
    from icebear.actmax.explanation import explain as explain
    from icebear.actmax.index.annotation import annotate as annotate
    from icebear.actmax.index.build import build_index as build_index
    from icebear.actmax.index.engines import on_ray as on_ray
    from icebear.concepts.corpus import read_corpus as read_corpus

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "icebear.actmax.index.annotation": "annotate",
        "icebear.actmax.card": "Card describe",
        "icebear.actmax.explanation": "Explanation explain",
        "icebear.concepts.corpus": "read_corpus",
        "icebear.actmax.index.engines": "on_ray",
        "icebear.actmax.index.build": "build_index",
    },
)

"""What a neuron means: the sentences of a corpus that drive it furthest, in one SQLite file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from actmax.annotation import annotate as annotate
    from actmax.card import Card as Card
    from actmax.card import describe as describe
    from actmax.corpus import read_corpus as read_corpus
    from actmax.engines import on_ray as on_ray
    from actmax.index import build_index as build_index

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "actmax.annotation": "annotate",
        "actmax.card": "Card describe",
        "actmax.corpus": "read_corpus",
        "actmax.engines": "on_ray",
        "actmax.index": "build_index",
    },
)

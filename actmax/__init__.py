"""What a neuron means: the sentences of a corpus that drive it furthest, in one SQLite file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actmax.annotation import annotate
    from actmax.card import describe
    from actmax.corpus import read_corpus
    from actmax.engines import on_ray
    from actmax.index import build_index

_LAZY = {
    "annotate": "actmax.annotation",
    "build_index": "actmax.index",
    "describe": "actmax.card",
    "on_ray": "actmax.engines",
    "read_corpus": "actmax.corpus",
}
__all__ = ["annotate", "build_index", "describe", "on_ray", "read_corpus"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'actmax' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)

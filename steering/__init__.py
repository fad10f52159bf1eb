"""Turning neurons while a model runs: edits, recipes, `steer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from steering.edits import Edit
from steering.recipe import Recipe

if TYPE_CHECKING:
    from steering.apply import steer
    from steering.flipping import flip
    from steering.permanent import apply_patch

__all__ = ["Edit", "Recipe", "apply_patch", "flip", "steer"]

_LAZY = {"steer": "steering.apply", "flip": "steering.flipping", "apply_patch": "steering.permanent"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'steering' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)

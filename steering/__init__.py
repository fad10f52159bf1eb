"""Turning neurons while a model runs: edits, recipes, `steer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steering.edits import Edit
from steering.recipe import Recipe

if TYPE_CHECKING:
    from steering.apply import steer

__all__ = ["Edit", "Recipe", "steer"]


def __getattr__(name: str) -> Any:
    if name != "steer":
        raise AttributeError(f"module 'steering' has no attribute {name!r}")
    from steering.apply import steer

    return steer

"""Turning neurons while a model runs: edits, recipes, `steer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from icebear.edits import Edit as Edit
    from icebear.recipe import Recipe as Recipe
    from icebear.steering.apply import steer as steer
    from icebear.steering.comparison import Comparison as Comparison
    from icebear.steering.comparison import compare as compare
    from icebear.steering.concept.concept import Concept as Concept
    from icebear.steering.concept.finding import find_concept as find_concept
    from icebear.steering.flipping.search import flip as flip
    from icebear.steering.random_edits import random_edit_control as random_edit_control
    from icebear.steering.weight_patch import apply_patch as apply_patch

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "icebear.steering.apply": "steer",
        "icebear.steering.random_edits": "random_edit_control",
        "icebear.steering.comparison": "Comparison compare",
        "icebear.edits": "Edit",
        "icebear.steering.flipping.search": "flip",
        "icebear.steering.concept.concept": "Concept",
        "icebear.steering.concept.finding": "find_concept",
        "icebear.steering.weight_patch": "apply_patch",
        "icebear.recipe": "Recipe",
    },
)

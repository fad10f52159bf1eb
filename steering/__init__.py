"""Turning neurons while a model runs: edits, recipes, `steer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from icebear.edits import Edit as Edit
    from icebear.recipe import Recipe as Recipe
    from steering.apply import steer as steer
    from steering.controls import beside_chance as beside_chance
    from steering.flipping import flip as flip
    from steering.latent.concept import Concept as Concept
    from steering.latent.finding import find_concept as find_concept
    from steering.permanent import apply_patch as apply_patch

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "steering.apply": "steer",
        "steering.controls": "beside_chance",
        "icebear.edits": "Edit",
        "steering.flipping": "flip",
        "steering.latent.concept": "Concept",
        "steering.latent.finding": "find_concept",
        "steering.permanent": "apply_patch",
        "icebear.recipe": "Recipe",
    },
)

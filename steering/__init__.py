"""Turning neurons while a model runs: edits, recipes, `steer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from icebear.edits import Edit as Edit
    from icebear.recipe import Recipe as Recipe
    from icebear.steering.apply import steer as steer
    from icebear.steering.controls import beside_chance as beside_chance
    from icebear.steering.flipping import flip as flip
    from icebear.steering.latent.concept import Concept as Concept
    from icebear.steering.latent.finding import find_concept as find_concept
    from icebear.steering.permanent import apply_patch as apply_patch

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "icebear.steering.apply": "steer",
        "icebear.steering.controls": "beside_chance",
        "icebear.edits": "Edit",
        "icebear.steering.flipping": "flip",
        "icebear.steering.latent.concept": "Concept",
        "icebear.steering.latent.finding": "find_concept",
        "icebear.steering.permanent": "apply_patch",
        "icebear.recipe": "Recipe",
    },
)

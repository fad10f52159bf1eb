"""Find the neurons a language model used, see what they mean, and turn them.

Every public name, imported when it is first used: ``from icebear import load_model, attribute``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icebear.rooms import intruders

if TYPE_CHECKING:
    from actmax import annotate, build_index, describe, read_corpus
    from concepts import (
        ATTNLRP,
        CP_LRP,
        PA_LRP,
        VIT,
        AlphaBeta,
        AttnLRP,
        Epsilon,
        Gamma,
        Model,
        Neuron,
        Relevance,
        ZPlus,
        attribute,
        load_model,
        project,
    )
    from db import IcebearError, Ranked, Store, open_store
    from steering import Edit, Recipe, apply_patch, flip, steer

__all__ = [
    "ATTNLRP",
    "CP_LRP",
    "PA_LRP",
    "VIT",
    "AlphaBeta",
    "AttnLRP",
    "Edit",
    "Epsilon",
    "Gamma",
    "IcebearError",
    "Model",
    "Neuron",
    "Ranked",
    "Recipe",
    "Relevance",
    "Store",
    "ZPlus",
    "annotate",
    "apply_patch",
    "attribute",
    "build_index",
    "describe",
    "flip",
    "load_model",
    "open_store",
    "project",
    "read_corpus",
    "steer",
]

_trouble = intruders()
if _trouble and Path(sys.argv[0]).stem == "icebear":  # as the command: a sentence, no traceback
    sys.exit(f"icebear: {_trouble}")
if _trouble:
    raise ImportError(_trouble)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for room in map(import_module, ("concepts", "steering", "actmax", "db")):
            if name in room.__all__:
                return getattr(room, name)
    raise AttributeError(f"module 'icebear' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Find the neurons a language model used, see what they mean, and turn them.

Every public name, imported when it is first used: ``from icebear import load_model, attribute``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from icebear.public import public
from icebear.rooms import intruders

if TYPE_CHECKING:
    from actmax import Card as Card
    from actmax import annotate as annotate
    from actmax import build_index as build_index
    from actmax import describe as describe
    from actmax import read_corpus as read_corpus
    from concepts import ATTNLRP as ATTNLRP
    from concepts import CP_LRP as CP_LRP
    from concepts import DIFFERENCE as DIFFERENCE
    from concepts import PA_LRP as PA_LRP
    from concepts import VIT as VIT
    from concepts import AlphaBeta as AlphaBeta
    from concepts import Answer as Answer
    from concepts import AttnLRP as AttnLRP
    from concepts import Chat as Chat
    from concepts import Difference as Difference
    from concepts import Epsilon as Epsilon
    from concepts import Gamma as Gamma
    from concepts import Graph as Graph
    from concepts import Model as Model
    from concepts import Neuron as Neuron
    from concepts import Relevance as Relevance
    from concepts import ZPlus as ZPlus
    from concepts import ablation as ablation
    from concepts import attribute as attribute
    from concepts import circuit as circuit
    from concepts import load_model as load_model
    from concepts import matrix as matrix
    from concepts import origins as origins
    from concepts import project as project
    from concepts import units as units
    from db import IcebearError as IcebearError
    from db import Ranked as Ranked
    from db import Store as Store
    from db import open_store as open_store
    from steering import Concept as Concept
    from steering import Edit as Edit
    from steering import Recipe as Recipe
    from steering import apply_patch as apply_patch
    from steering import beside_chance as beside_chance
    from steering import find_concept as find_concept
    from steering import flip as flip
    from steering import steer as steer

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "actmax": "Card annotate build_index describe read_corpus",
        "concepts": "ATTNLRP CP_LRP DIFFERENCE PA_LRP VIT AlphaBeta Answer AttnLRP Chat Difference Epsilon Gamma Graph "
        "Model Neuron Relevance ZPlus ablation attribute circuit load_model matrix origins project units",
        "db": "IcebearError Ranked Store open_store",
        "steering": "Concept Edit Recipe apply_patch beside_chance find_concept flip steer",
    },
)

_trouble = intruders()
if _trouble and Path(sys.argv[0]).stem == "icebear":  # as the command: a sentence, no traceback
    sys.exit(f"icebear: {_trouble}")
if _trouble:
    raise ImportError(_trouble)

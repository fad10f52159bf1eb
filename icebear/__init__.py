"""Find the neurons a language model used, see what they mean, and turn them.

Every public name, imported when it is first used: ``from icebear import load_model, attribute``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from icebear.actmax import Card as Card
    from icebear.actmax import Explanation as Explanation
    from icebear.actmax import annotate as annotate
    from icebear.actmax import build_index as build_index
    from icebear.actmax import describe as describe
    from icebear.actmax import explain as explain
    from icebear.actmax import read_corpus as read_corpus
    from icebear.concepts import ATTNLRP as ATTNLRP
    from icebear.concepts import CP_LRP as CP_LRP
    from icebear.concepts import DIFFERENCE as DIFFERENCE
    from icebear.concepts import PA_LRP as PA_LRP
    from icebear.concepts import VIT as VIT
    from icebear.concepts import AlphaBeta as AlphaBeta
    from icebear.concepts import Answer as Answer
    from icebear.concepts import AttnLRP as AttnLRP
    from icebear.concepts import Chat as Chat
    from icebear.concepts import Difference as Difference
    from icebear.concepts import Epsilon as Epsilon
    from icebear.concepts import Gamma as Gamma
    from icebear.concepts import Graph as Graph
    from icebear.concepts import Model as Model
    from icebear.concepts import Neuron as Neuron
    from icebear.concepts import Relevance as Relevance
    from icebear.concepts import ZPlus as ZPlus
    from icebear.concepts import ablation as ablation
    from icebear.concepts import attribute as attribute
    from icebear.concepts import circuit as circuit
    from icebear.concepts import load_model as load_model
    from icebear.concepts import matrix as matrix
    from icebear.concepts import origins as origins
    from icebear.concepts import project as project
    from icebear.concepts import suggest_counterfactuals as suggest_counterfactuals
    from icebear.concepts import units as units
    from icebear.db import IcebearError as IcebearError
    from icebear.db import Ranked as Ranked
    from icebear.db import Store as Store
    from icebear.db import open_store as open_store
    from icebear.steering import Concept as Concept
    from icebear.steering import Edit as Edit
    from icebear.steering import Recipe as Recipe
    from icebear.steering import apply_patch as apply_patch
    from icebear.steering import find_concept as find_concept
    from icebear.steering import flip as flip
    from icebear.steering import random_edit_control as random_edit_control
    from icebear.steering import steer as steer

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "icebear.actmax": "Card Explanation annotate build_index describe explain read_corpus",
        "icebear.concepts": "ATTNLRP CP_LRP DIFFERENCE PA_LRP VIT AlphaBeta Answer AttnLRP Chat Difference Epsilon "
        "Gamma Graph Model Neuron Relevance ZPlus ablation attribute circuit load_model matrix origins project "
        "suggest_counterfactuals units",
        "icebear.db": "IcebearError Ranked Store open_store",
        "icebear.steering": "Concept Edit Recipe apply_patch random_edit_control find_concept flip steer",
    },
)

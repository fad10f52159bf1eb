"""Find the neurons a language model used, see what they mean, and turn them.

Every public name, imported when it is first used: ``from icebear import load_model, attribute``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from icebear.actmax.card import Card as Card
    from icebear.actmax.card import describe as describe
    from icebear.actmax.explanation import Explanation as Explanation
    from icebear.actmax.explanation import explain as explain
    from icebear.actmax.index.annotation import annotate as annotate
    from icebear.actmax.index.build import build_index as build_index
    from icebear.concepts.attribution.attribute import attribute as attribute
    from icebear.concepts.attribution.controls import ablation as ablation
    from icebear.concepts.attribution.counterfactuals import suggest_counterfactuals as suggest_counterfactuals
    from icebear.concepts.attribution.matrix import matrix as matrix
    from icebear.concepts.attribution.result import Relevance as Relevance
    from icebear.concepts.attribution.sources import origins as origins
    from icebear.concepts.attribution.units import units as units
    from icebear.concepts.circuits.circuit import circuit as circuit
    from icebear.concepts.circuits.graph import Graph as Graph
    from icebear.concepts.corpus import read_corpus as read_corpus
    from icebear.concepts.lrp.linear_rules import AlphaBeta as AlphaBeta
    from icebear.concepts.lrp.linear_rules import Epsilon as Epsilon
    from icebear.concepts.lrp.linear_rules import Gamma as Gamma
    from icebear.concepts.lrp.linear_rules import ZPlus as ZPlus
    from icebear.concepts.methods.lrp import ATTNLRP as ATTNLRP
    from icebear.concepts.methods.lrp import CP_LRP as CP_LRP
    from icebear.concepts.methods.lrp import DIFFERENCE as DIFFERENCE
    from icebear.concepts.methods.lrp import PA_LRP as PA_LRP
    from icebear.concepts.methods.lrp import VIT as VIT
    from icebear.concepts.methods.lrp import AttnLRP as AttnLRP
    from icebear.concepts.methods.lrp import Difference as Difference
    from icebear.concepts.models.answer import Answer as Answer
    from icebear.concepts.models.chat import Chat as Chat
    from icebear.concepts.models.loading import load_model as load_model
    from icebear.concepts.models.model import Model as Model
    from icebear.concepts.vocabulary import project as project
    from icebear.db.store import Store as Store
    from icebear.db.store import open_store as open_store
    from icebear.edits import Edit as Edit
    from icebear.errors import IcebearError as IcebearError
    from icebear.recipe import Recipe as Recipe
    from icebear.records import Neuron as Neuron
    from icebear.records import Ranked as Ranked
    from icebear.steering.apply import steer as steer
    from icebear.steering.concept.concept import Concept as Concept
    from icebear.steering.concept.finding import find_concept as find_concept
    from icebear.steering.flipping.search import flip as flip
    from icebear.steering.random_edits import random_edit_control as random_edit_control
    from icebear.steering.weight_patch import apply_patch as apply_patch

HOMES = {
    "icebear.actmax.card": "Card describe",
    "icebear.actmax.explanation": "Explanation explain",
    "icebear.actmax.index.annotation": "annotate",
    "icebear.actmax.index.build": "build_index",
    "icebear.concepts.attribution.attribute": "attribute",
    "icebear.concepts.attribution.controls": "ablation",
    "icebear.concepts.attribution.counterfactuals": "suggest_counterfactuals",
    "icebear.concepts.attribution.matrix": "matrix",
    "icebear.concepts.attribution.result": "Relevance",
    "icebear.concepts.attribution.sources": "origins",
    "icebear.concepts.attribution.units": "units",
    "icebear.concepts.circuits.circuit": "circuit",
    "icebear.concepts.circuits.graph": "Graph",
    "icebear.concepts.corpus": "read_corpus",
    "icebear.concepts.lrp.linear_rules": "AlphaBeta Epsilon Gamma ZPlus",
    "icebear.concepts.methods.lrp": "ATTNLRP AttnLRP CP_LRP DIFFERENCE Difference PA_LRP VIT",
    "icebear.concepts.models.answer": "Answer",
    "icebear.concepts.models.chat": "Chat",
    "icebear.concepts.models.loading": "load_model",
    "icebear.concepts.models.model": "Model",
    "icebear.concepts.vocabulary": "project",
    "icebear.db.store": "Store open_store",
    "icebear.edits": "Edit",
    "icebear.errors": "IcebearError",
    "icebear.recipe": "Recipe",
    "icebear.records": "Neuron Ranked",
    "icebear.steering.apply": "steer",
    "icebear.steering.concept.concept": "Concept",
    "icebear.steering.concept.finding": "find_concept",
    "icebear.steering.flipping.search": "flip",
    "icebear.steering.random_edits": "random_edit_control",
    "icebear.steering.weight_patch": "apply_patch",
}
"""Module -> the names that come from it, once more than above: a type checker cannot read this, nor Python that."""
NAMES = {name: module for module, names in HOMES.items() for name in names.split()}
__all__ = sorted(NAMES)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'icebear' has no attribute {name!r}")
    return getattr(import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__

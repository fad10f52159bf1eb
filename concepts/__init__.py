"""The science: models, relevance rules, relevance, vocabulary.

Names are loaded when first used, so that ``import concepts`` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from concepts.lrp.method import ATTNLRP, CP_LRP, PA_LRP, VIT, AlphaBeta, AttnLRP, Epsilon, Gamma, ZPlus
from icebear.records import Neuron

if TYPE_CHECKING:
    from concepts.attribution import attribute
    from concepts.models.loading import load_model
    from concepts.models.model import Model
    from concepts.relevance import Relevance
    from concepts.vocabulary import project

__all__ = [
    "ATTNLRP",
    "CP_LRP",
    "PA_LRP",
    "VIT",
    "AlphaBeta",
    "AttnLRP",
    "Epsilon",
    "Gamma",
    "Model",
    "Neuron",
    "Relevance",
    "ZPlus",
    "attribute",
    "load_model",
    "project",
]

_LAZY = {
    "Model": "concepts.models.model",
    "load_model": "concepts.models.loading",
    "Relevance": "concepts.relevance",
    "attribute": "concepts.attribution",
    "project": "concepts.vocabulary",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'concepts' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)

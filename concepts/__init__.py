"""The science: models, relevance rules, relevance, vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from concepts.answers.matrix import matrix as matrix
    from concepts.answers.origins import origins as origins
    from concepts.answers.units import units as units
    from concepts.attribution import attribute as attribute
    from concepts.circuits.circuit import circuit as circuit
    from concepts.circuits.graph import Graph as Graph
    from concepts.lrp.method import ATTNLRP as ATTNLRP
    from concepts.lrp.method import CP_LRP as CP_LRP
    from concepts.lrp.method import DIFFERENCE as DIFFERENCE
    from concepts.lrp.method import PA_LRP as PA_LRP
    from concepts.lrp.method import VIT as VIT
    from concepts.lrp.method import AlphaBeta as AlphaBeta
    from concepts.lrp.method import AttnLRP as AttnLRP
    from concepts.lrp.method import Difference as Difference
    from concepts.lrp.method import Epsilon as Epsilon
    from concepts.lrp.method import Gamma as Gamma
    from concepts.lrp.method import ZPlus as ZPlus
    from concepts.models.answer import Answer as Answer
    from concepts.models.chat import Chat as Chat
    from concepts.models.loading import load_model as load_model
    from concepts.models.model import Model as Model
    from concepts.relevance import Relevance as Relevance
    from concepts.versus.ablation import ablation as ablation
    from concepts.vocabulary import project as project
    from icebear.records import Neuron as Neuron

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "concepts.answers.matrix": "matrix",
        "concepts.answers.origins": "origins",
        "concepts.answers.units": "units",
        "concepts.attribution": "attribute",
        "concepts.circuits.circuit": "circuit",
        "concepts.circuits.graph": "Graph",
        "concepts.lrp.method": "ATTNLRP CP_LRP DIFFERENCE PA_LRP VIT AlphaBeta AttnLRP Difference Epsilon Gamma ZPlus",
        "concepts.models.answer": "Answer",
        "concepts.models.chat": "Chat",
        "concepts.models.loading": "load_model",
        "concepts.models.model": "Model",
        "concepts.relevance": "Relevance",
        "concepts.versus.ablation": "ablation",
        "concepts.vocabulary": "project",
        "icebear.records": "Neuron",
    },
)

"""The science: models, relevance rules, relevance, vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from icebear.public import public

if TYPE_CHECKING:
    from icebear.concepts.attribution.attribute import attribute as attribute
    from icebear.concepts.attribution.controls import ablation as ablation
    from icebear.concepts.attribution.counterfactuals import suggest_counterfactuals as suggest_counterfactuals
    from icebear.concepts.attribution.matrix import matrix as matrix
    from icebear.concepts.attribution.result import Relevance as Relevance
    from icebear.concepts.attribution.sources import origins as origins
    from icebear.concepts.attribution.units import units as units
    from icebear.concepts.circuits.circuit import circuit as circuit
    from icebear.concepts.circuits.graph import Graph as Graph
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
    from icebear.records import Neuron as Neuron

__all__, __getattr__, __dir__ = public(
    __name__,
    {
        "icebear.concepts.attribution.counterfactuals": "suggest_counterfactuals",
        "icebear.concepts.attribution.matrix": "matrix",
        "icebear.concepts.attribution.sources": "origins",
        "icebear.concepts.attribution.units": "units",
        "icebear.concepts.attribution.attribute": "attribute",
        "icebear.concepts.circuits.circuit": "circuit",
        "icebear.concepts.circuits.graph": "Graph",
        "icebear.concepts.lrp.linear_rules": "AlphaBeta Epsilon Gamma ZPlus",
        "icebear.concepts.methods.lrp": "ATTNLRP CP_LRP DIFFERENCE PA_LRP VIT AttnLRP Difference",
        "icebear.concepts.models.answer": "Answer",
        "icebear.concepts.models.chat": "Chat",
        "icebear.concepts.models.loading": "load_model",
        "icebear.concepts.models.model": "Model",
        "icebear.concepts.attribution.result": "Relevance",
        "icebear.concepts.attribution.controls": "ablation",
        "icebear.concepts.vocabulary": "project",
        "icebear.records": "Neuron",
    },
)

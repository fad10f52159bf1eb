"""A method's scores as an evaluation ranks by."""

from __future__ import annotations

from torch import Tensor

from icebear.concepts.attribution.attribute import relevance_of
from icebear.concepts.baselines import scores
from icebear.concepts.baselines.methods import Baseline
from icebear.concepts.lrp.method import AttnLRP
from icebear.concepts.models.model import Model
from icebear.concepts.models.plan import Plan
from icebear.errors import IcebearError


def token_scores(model: Model, plan: Plan, method: AttnLRP | Baseline) -> list[Tensor]:
    """(T,) for each prompt: tokens, with their positions where the method has them (`Relevance.combined`)."""
    if not isinstance(method, AttnLRP):
        return [found.float() for found in scores.token_scores(model, plan.resolved(model), method)]
    found = relevance_of(model, plan, method)
    return [one.tokens if one.positions is None else one.combined() for one in found]


def why_not(model: Model, plan: Plan, method: AttnLRP | Baseline) -> str | None:
    """Why a method cannot run on a model, tried on one prompt; None if it can."""
    try:
        token_scores(model, plan, method)
    except IcebearError as error:
        return str(error)
    return None

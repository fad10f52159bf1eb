"""A method's scores as an evaluation ranks by."""

from __future__ import annotations

from torch import Tensor

from concepts.attribution import relevance_of
from concepts.baselines import scores
from concepts.baselines.methods import Baseline
from concepts.lrp.method import AttnLRP
from concepts.models.model import Model
from concepts.models.plan import Plan
from icebear.errors import IcebearError


def token_scores(model: Model, plan: Plan, method: AttnLRP | Baseline) -> Tensor:
    """(T,) of a plan of one prompt: tokens, with their positions where the method has them (`Relevance.combined`)."""
    if not isinstance(method, AttnLRP):
        return scores.token_scores(model, plan.resolved(model), method)[0].float()
    found = relevance_of(model, plan, method)[0]
    return found.tokens if found.positions is None else found.combined()


def why_not(model: Model, plan: Plan, method: AttnLRP | Baseline) -> str | None:
    """Why a method cannot run on a model, tried on one prompt; None if it can."""
    try:
        token_scores(model, plan, method)
    except IcebearError as error:
        return str(error)
    return None

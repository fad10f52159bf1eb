"""All methods by name, and their scores as an evaluation ranks by."""

from __future__ import annotations

from torch import Tensor

from concepts.attribution import baseline_tokens, relevance_of
from concepts.baselines.common import resolved
from concepts.baselines.methods import BASELINES, Baseline, named
from concepts.lrp.method import METHODS, AttnLRP
from concepts.models import Model
from concepts.tasks import Plan
from db.errors import IcebearError

ALL: dict[str, AttnLRP | Baseline] = {**BASELINES, **{name: METHODS[name] for name in ("cp-lrp", "attnlrp", "pa-lrp")}}
"""In the order of the tables: baselines first."""


def chosen(names: str) -> dict[str, AttnLRP | Baseline]:
    """Of a comma-separated list of names (or methods of LRP written out); ``all`` is all."""
    if names == "all":
        return ALL
    return {name: named(name, ALL) for name in names.replace(" ", "").split(",")}


def token_scores(model: Model, plan: Plan, method: AttnLRP | Baseline) -> Tensor:
    """(T,) of a plan of one prompt: tokens, with their positions where the method has them (PA-LRP Eq. 11)."""
    if not isinstance(method, AttnLRP):
        return baseline_tokens(model, resolved(model, plan), method)[0].float()
    found = relevance_of(model, plan, method)[0]
    return found.tokens if found.positions is None else found.combined()


def why_not(model: Model, plan: Plan, method: AttnLRP | Baseline) -> str | None:
    """Why a method cannot run on a model, tried on one prompt; None if it can."""
    try:
        token_scores(model, plan, method)
    except IcebearError as error:
        return str(error)
    return None

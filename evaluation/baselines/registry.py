"""All methods that evaluations compare, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from icebear.concepts.methods.method import Method
from icebear.concepts.methods.registry import METHODS, method_of
from icebear.errors import IcebearError
from icebear.evaluation.baselines.attention import Alti, AltiLogit, AttentionRollout, GradCAM, GradientRollout
from icebear.evaluation.baselines.inputs import AtMan, Gradient, Occlusion, Positions, Random, SmoothGrad
from icebear.models.model import Model
from icebear.models.objective import objective_of

BASELINES: dict[str, Method] = {
    "random": Random(),
    "grad-l1": Gradient(1),
    "grad-l2": Gradient(2),
    "smoothgrad": SmoothGrad(),
    "gradcam": GradCAM(),
    "rollout": AttentionRollout(),
    "grad-rollout": GradientRollout(),
    "atman": AtMan(),
    "occlusion": Occlusion(),
    "alti-logit": AltiLogit(),
    "alti": Alti(),
    "pa-positions": Positions(),
    "pa-lrp-signed": Positions("signed", tokens=True),
}


def methods_of(names: str, usual: Sequence[str] = (), controls: Collection[str] = ()) -> dict[str, Any]:
    """Return the methods of a comma-separated list by their names; the value of a control of the caller is its name.

    usual: the names that ``all`` stands for, by default every method that explains a prompt alone.
    """
    known = BASELINES | METHODS
    if names == "all":
        wanted = list(usual) or [name for name, method in known.items() if not method.needs_counterfactual]
    else:
        wanted = _split(names)
    return {name: name if name in controls else method_of(name, known) for name in wanted}


def _split(names: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth = [""], 0
    for sign in names:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def able_and_unable(
    model: Model, prompt: Any, methods: Mapping[str, Method]
) -> tuple[dict[str, Method], dict[str, str]]:
    """Return the methods that can score the tokens of a prompt, and why the others cannot."""
    able, unable = {}, {}
    for name, method in methods.items():
        try:
            method.scores(model, objective_of(model, [prompt]).resolved(model))
            able[name] = method
        except IcebearError as error:
            unable[name] = str(error)
    return able, unable

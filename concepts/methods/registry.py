"""All attribution methods by name, and the parser of their names."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from icebear.concepts.methods.attention import Alti, AltiLogit, AttentionRollout, GradCAM, GradientRollout
from icebear.concepts.methods.gradients import (
    Gradient,
    GradientTimesInput,
    IntegratedGradients,
    Positions,
    Random,
    SmoothGrad,
)
from icebear.concepts.methods.lrp import ATTNLRP, CP_LRP, DIFFERENCE, PA_LRP, VIT, Difference
from icebear.concepts.methods.method import Method, Multiplying
from icebear.concepts.methods.perturbation import AtMan, Occlusion
from icebear.errors import IcebearError, InputError, UnknownName
from icebear.lrp.linear_rules import AlphaBeta, Epsilon, Gamma, ZPlus
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.values import shown

METHODS: dict[str, Method] = {
    "random": Random(),
    "grad-l1": Gradient(1),
    "grad-l2": Gradient(2),
    "gxi": GradientTimesInput(),
    "ig": IntegratedGradients(),
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
    "attnlrp": ATTNLRP,
    "cp-lrp": CP_LRP,
    "pa-lrp": PA_LRP,
    "vit": VIT,
    "difference": DIFFERENCE,
    "difference-constant": Difference("constant"),
}
"""In the order of the tables of evaluations."""


def method_of(text: str) -> Method:
    """Return a method by its name, with the point of its multipliers after an @ (``cp-lrp@midpoint``), or written out,
    ``AttnLRP(linear=Gamma(0.1))``. Raises `UnknownName` or `InputError`."""
    text = text if isinstance(text, str) else shown(text)
    if "(" in text:
        return _written(text)
    name, at, point = text.partition("@")
    if name not in METHODS:
        ways = f"The methods are {', '.join(METHODS)}, or one written out, as AttnLRP(linear=Gamma(0.1))."
        raise UnknownName("method", name, METHODS, ways)
    method = METHODS[name]
    if not at:
        return method
    if not isinstance(method, Multiplying):
        raise InputError(
            f"The method {name} cannot be evaluated at a point between two prompts; leave out {at + point!r}."
        )
    return replace(method, at=point)  # type: ignore[arg-type]  # it checks


def name_of(method: Method) -> str:
    """Return the short name of a method, or how it is written out; `method_of` reads both."""
    point = f"@{method.at}" if method.at else ""
    alone = replace(method, at=None) if isinstance(method, Multiplying) else method
    return next((name + point for name, known in METHODS.items() if known == alone), repr(method))


def methods_of(names: str, usual: Sequence[str] = (), controls: Collection[str] = ()) -> dict[str, Any]:
    """Return the methods of a comma-separated list by their names; the value of a control of the caller is its name.

    usual: the names that ``all`` stands for, by default every method that explains a prompt alone.
    """
    if names == "all":
        wanted = list(usual) or [name for name, method in METHODS.items() if not method.needs_counterfactual]
    else:
        wanted = _split(names)
    return {name: name if name in controls else method_of(name) for name in wanted}


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


def _written(text: str) -> Method:
    try:
        method = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, KeyError, AttributeError):
        method = None
    if not isinstance(method, Method):
        raise InputError(f"{text!r} is not a method; write one like AttnLRP(softmax='zplus', linear=Gamma(0.1)).")
    return method


def _value(node: Any) -> Any:
    """Return the value of a constant, or of a call of a method or a linear rule."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    kinds = {*map(type, METHODS.values()), Epsilon, Gamma, ZPlus, AlphaBeta}
    called = {kind.__name__: kind for kind in kinds}[node.func.id]  # type: ignore[attr-defined]
    return called(*map(_value, node.args), **{str(word.arg): _value(word.value) for word in node.keywords})

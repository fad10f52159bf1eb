"""All attribution methods by name, and the parser of their names."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from icebear.concepts.methods.attnlrp import ATTNLRP, CP_LRP, PA_LRP, VIT
from icebear.concepts.methods.difference_rules import DIFFERENCE, Difference
from icebear.concepts.methods.gradients import GradientTimesInput, IntegratedGradients
from icebear.concepts.methods.method import Method, Multiplying
from icebear.errors import InputError, UnknownName
from icebear.lrp.linear_rules import AlphaBeta, Epsilon, Gamma, ZPlus
from icebear.values import shown

METHODS: dict[str, Method] = {
    "gxi": GradientTimesInput(),
    "ig": IntegratedGradients(),
    "attnlrp": ATTNLRP,
    "cp-lrp": CP_LRP,
    "pa-lrp": PA_LRP,
    "vit": VIT,
    "difference": DIFFERENCE,
    "difference-constant": Difference("constant"),
}


def method_of(text: str, methods: Mapping[str, Method] = METHODS) -> Method:
    """Return a method by its name, with the point of its multipliers after an @ (``cp-lrp@midpoint``), or written out,
    ``AttnLRP(linear=Gamma(0.1))``. Raises `UnknownName` or `InputError`."""
    text = text if isinstance(text, str) else shown(text)
    if "(" in text:
        return _written(text, methods)
    name, at, point = text.partition("@")
    if name not in methods:
        ways = f"The methods are {', '.join(methods)}, or one written out, as AttnLRP(linear=Gamma(0.1))."
        raise UnknownName("method", name, methods, ways)
    method = methods[name]
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


def _written(text: str, methods: Mapping[str, Method]) -> Method:
    try:
        kinds = {*map(type, methods.values()), Epsilon, Gamma, ZPlus, AlphaBeta}
        method = _value(ast.parse(text, mode="eval").body, kinds)
    except (SyntaxError, TypeError, ValueError, KeyError, AttributeError):
        method = None
    if not isinstance(method, Method):
        raise InputError(f"{text!r} is not a method; write one like AttnLRP(softmax='zplus', linear=Gamma(0.1)).")
    return method


def _value(node: Any, kinds: Collection[type]) -> Any:
    """Return the value of a constant, or of a call of a method or a linear rule."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    called = {kind.__name__: kind for kind in kinds}[node.func.id]  # type: ignore[attr-defined]
    values = [_value(value, kinds) for value in node.args]
    return called(*values, **{str(word.arg): _value(word.value, kinds) for word in node.keywords})

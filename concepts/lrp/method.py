"""Attribution methods as values: they can be compared, printed, written down and read back."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any, Literal

from icebear.errors import InputError, UnknownName
from icebear.values import one_of, real, shown


@dataclass(frozen=True)
class Epsilon:
    """Epsilon rule (AttnLRP Eq. 8): each contribution z_ij gets its share of z_j + eps sign(z_j); 0 is the gradient."""

    eps: float = 0.0

    def __post_init__(self) -> None:
        real(self.eps, "eps", 0)


@dataclass(frozen=True)
class Gamma:
    """Gamma rule (AttnLRP Eq. 24): contributions of the output's own sign count 1 + gamma times.

    Eq. 24 favours positive ones; for a negative output it is mirrored (Andeol et al. 2021), because its divisor would
    pass through zero there. gamma 0 is `Epsilon()`, gamma to infinity `ZPlus()`.
    """

    gamma: float = 0.25

    def __post_init__(self) -> None:
        real(self.gamma, "gamma", 0)


@dataclass(frozen=True)
class ZPlus:
    """Only contributions of the output's own sign count (z+ for a positive output): the limit of `Gamma`."""


@dataclass(frozen=True)
class AlphaBeta:
    """Alpha-beta rule (Bach et al. 2015): positive contributions share alpha, negative ones 1 - alpha.

    Where all have one sign, they share everything.
    """

    alpha: float = 2.0

    def __post_init__(self) -> None:
        real(self.alpha, "alpha", 1)  # beta is alpha - 1


LinearRule = Epsilon | Gamma | ZPlus | AlphaBeta


class Written:
    """Methods whose `repr` is how they are written: what is not the default."""

    def __repr__(self) -> str:
        default = type(self)()
        said = [f"{key}={value!r}" for key, value in vars(self).items() if value != getattr(default, key)]
        return f"{type(self).__name__}({', '.join(said)})"

    @property
    def name(self) -> str:
        """Its short name, or how it is written."""
        return next((name for name, known in {**METHODS, **PAIRED}.items() if known == self), repr(self))


@dataclass(frozen=True, repr=False)
class AttnLRP(Written):
    """AttnLRP (Achtibat et al. 2024) and its variants.

    softmax: ``taylor`` is the paper's rule (Eq. 13); ``zplus`` shares each weight's relevance among what raises it in
        that expansion, leaving its bias nothing; ``constant`` takes the attention weights as constants, which is
        CP-LRP (Ali et al. 2022), and conserves relevance exactly.
    linear: the rule of linear maps.
    conv: the rule of convolutions; None for that of linear maps.
    positions: attribute to positions as well (PA-LRP, Bakish et al. 2025): `Relevance.positions`.
    """

    softmax: Literal["taylor", "zplus", "constant"] = "taylor"
    linear: LinearRule = Epsilon()
    conv: LinearRule | None = None
    positions: bool = False

    def __post_init__(self) -> None:
        one_of(self.softmax, "softmax rule", ("taylor", "zplus", "constant"))
        for rule in (self.linear, self.conv or self.linear):
            if not isinstance(rule, LinearRule):
                raise InputError(f"{shown(rule)} is not a rule of linear maps; use Epsilon, Gamma, ZPlus or AlphaBeta.")
        if not isinstance(self.positions, bool):
            raise InputError(f"positions is True or False, not {shown(self.positions)}.")

    @classmethod
    def parse(cls, text: str) -> AttnLRP:
        """A short name of `METHODS`, or a method as it is written. Raises `UnknownName` or `InputError`."""
        text = text if isinstance(text, str) else shown(text)
        if text in METHODS:
            return METHODS[text]
        if not text.startswith("AttnLRP("):
            ways = f"The methods are {', '.join(METHODS)}, or one written out, as AttnLRP(linear=Gamma(0.1))."
            raise UnknownName("method", text, METHODS, ways)
        found = read(text)
        assert isinstance(found, AttnLRP)
        return found


@dataclass(frozen=True, repr=False)
class Difference(Written):
    """Relevance compared with another prompt, exact in the difference (`icebear.concepts.lrp.differences`).

    softmax: ``exact`` follows the attention weights from one prompt to the other; ``constant`` holds them, at the mean
        of both.
    """

    softmax: Literal["exact", "constant"] = "exact"

    def __post_init__(self) -> None:
        one_of(self.softmax, "softmax rule of a difference", ("exact", "constant"))


def read(text: str) -> AttnLRP | Difference:
    """A method as it is written. Raises `InputError`."""
    try:
        found: AttnLRP | Difference = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, KeyError, AttributeError):
        raise InputError(
            f"{text!r} is not a method; write it as AttnLRP(softmax='zplus', linear=Gamma(0.1))."
        ) from None
    return found


def _value(node: Any) -> Any:
    """Of a constant, or a call of one of this file's classes."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    made = {cls.__name__: cls for cls in (AttnLRP, Difference, Epsilon, Gamma, ZPlus, AlphaBeta)}[node.func.id]  # type: ignore[attr-defined]
    return made(*map(_value, node.args), **{str(word.arg): _value(word.value) for word in node.keywords})


ATTNLRP = AttnLRP()
CP_LRP = AttnLRP(softmax="constant")
PA_LRP = AttnLRP(positions=True)
DIFFERENCE = Difference()
VIT = AttnLRP(softmax="zplus", linear=Gamma(0.05), conv=Gamma(0.25))
"""For vision transformers, whose gradients are noisy: AttnLRP's composite (its appendix B.4)."""

METHODS: dict[str, AttnLRP] = {"attnlrp": ATTNLRP, "cp-lrp": CP_LRP, "pa-lrp": PA_LRP, "vit": VIT}
PAIRED: dict[str, Difference] = {"difference": DIFFERENCE, "difference-constant": Difference("constant")}
"""They want another prompt."""

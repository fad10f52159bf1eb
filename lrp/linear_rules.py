"""Rules as values, which can be compared, printed and read back: those of linear maps, and all that a pass applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from icebear.values import real


@dataclass(frozen=True)
class Epsilon:
    """Epsilon rule: each contribution z_ij gets its share of z_j + eps sign(z_j); with eps = 0 it is the gradient.

    References: AttnLRP Eq. 8 (Achtibat et al. 2024).
    """

    eps: float = 0.0

    def __post_init__(self) -> None:
        real(self.eps, "eps", 0)


@dataclass(frozen=True)
class Gamma:
    """Gamma rule: contributions with the sign of the output count 1 + gamma times.

    Eq. 24 favors positive contributions; for a negative output it is mirrored, because its divisor would pass through
    zero. gamma = 0 is `Epsilon()`, gamma to infinity is `ZPlus()`.

    References: AttnLRP Eq. 24 (Achtibat et al. 2024); Andeol et al. 2021 (negative outputs).
    """

    gamma: float = 0.25

    def __post_init__(self) -> None:
        real(self.gamma, "gamma", 0)


@dataclass(frozen=True)
class ZPlus:
    """z+ rule: only contributions with the sign of the output count; the limit of `Gamma`."""


@dataclass(frozen=True)
class AlphaBeta:
    """Alpha-beta rule: positive contributions share alpha of the relevance, negative ones 1 - alpha.

    If all have one sign, they share all of it. References: Bach et al. 2015.
    """

    alpha: float = 2.0

    def __post_init__(self) -> None:
        real(self.alpha, "alpha", 1)  # beta is alpha - 1


LinearRule = Epsilon | Gamma | ZPlus | AlphaBeta


class Rules(Protocol):
    """The rules of a backward pass. Methods have these fields; nothing here imports a method."""

    @property
    def softmax(self) -> str: ...
    @property
    def linear(self) -> LinearRule: ...
    @property
    def conv(self) -> LinearRule | None: ...
    @property
    def attention_in(self) -> LinearRule | None: ...
    @property
    def attention_out(self) -> LinearRule | None: ...
    @property
    def paired(self) -> bool:
        """Whether the second half of the rows are counterfactuals of the first."""

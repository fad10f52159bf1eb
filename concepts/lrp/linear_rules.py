"""The rules of linear maps, as values: they can be compared, printed and read back."""

from __future__ import annotations

from dataclasses import dataclass

from icebear.values import real


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

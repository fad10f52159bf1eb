"""Baselines as values, each with its source, and all methods by name; `icebear.concepts.baselines.scores` has what they
do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from icebear.concepts.lrp.method import METHODS, PAIRED, AttnLRP, Difference, read
from icebear.errors import UnknownName
from icebear.values import shown


@dataclass(frozen=True)
class Random:
    """Uniform numbers that depend on nothing but the seed and the tokens."""

    seed: int = 0


@dataclass(frozen=True)
class Gradient:
    """The norm of the gradient at each token's embedding (Simonyan et al. 2014)."""

    norm: Literal[1, 2] = 2


@dataclass(frozen=True)
class GradientTimesInput:
    """Gradient x embedding (Denil et al. 2014)."""


@dataclass(frozen=True)
class IntegratedGradients:
    """Gradient x embedding, averaged on the way from zero (Sundararajan et al. 2017), at midpoints."""

    steps: int = 10


@dataclass(frozen=True)
class SmoothGrad:
    """Gradient x embedding, averaged over noisy embeddings (Smilkov et al. 2017); noise in standard deviations."""

    noise: float = 0.1
    samples: int = 10
    seed: int = 0


@dataclass(frozen=True)
class GradCAM:
    """The last layer's attention, its heads weighed by their mean gradient, above zero (Chefer et al. 2021)."""


@dataclass(frozen=True)
class AttentionRollout:
    """The product over layers of attention (mean of heads) and the residual stream (Abnar & Zuidema 2020)."""


@dataclass(frozen=True)
class GradientRollout:
    """R + mean(gradient x attention)+ R from layer to layer, from R = 1 (Chefer et al. 2021b, "G x AttnRollout")."""


@dataclass(frozen=True)
class AtMan:
    """What the explained log-probability loses when attention to a token is scaled down (Deiseroth et al. 2023).

    A key times 1 - p is its column of scores times 1 - p.
    """

    p: float = 0.9


@dataclass(frozen=True)
class Occlusion:
    """What the explained logit loses when a token's embedding is zero (Zeiler & Fergus 2014; leave one out)."""


@dataclass(frozen=True)
class AltiLogit:
    """ALTI-Logit (Ferrando et al. 2023): what each layer's attention adds to the logit, by token, traced to the input
    by ALTI. Causal models with the norm in front of attention."""


@dataclass(frozen=True)
class Alti:
    """ALTI (Ferrando et al. 2022): contributions of tokens to each layer's vectors by distance, layer after layer.
    Encoders with the norm behind attention (BERT)."""


@dataclass(frozen=True)
class Positions:
    """PA-LRP's positions without the tokens: what is positive in each layer, summed over layers."""


@dataclass(frozen=True)
class TokensAndPositions:
    """PA-LRP's tokens and the signed sum of their positions over the layers, which is conserved; ``pa-lrp`` adds what
    is positive in each layer instead (Eq. 11)."""


Baseline = (
    Random
    | Gradient
    | GradientTimesInput
    | IntegratedGradients
    | SmoothGrad
    | GradCAM
    | AttentionRollout
    | GradientRollout
    | AtMan
    | Occlusion
    | AltiLogit
    | Alti
    | Positions
    | TokensAndPositions
)

BASELINES: dict[str, Baseline] = {
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
    "pa-lrp-signed": TokensAndPositions(),
}

ALL: dict[str, AttnLRP | Baseline] = {**BASELINES, **METHODS}
"""In the order of the tables: baselines first."""
EVERY: dict[str, AttnLRP | Difference | Baseline] = {**ALL, **PAIRED}
"""Those as well that want another prompt."""

SEARCH: dict[str, list[Baseline]] = {
    "ig": [IntegratedGradients(steps) for steps in (5, 10, 20, 50)],
    "smoothgrad": [SmoothGrad(noise) for noise in (0.01, 0.05, 0.1, 0.25, 0.5)],
    "atman": [AtMan(p) for p in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)],
}
"""What `--tune` tries of methods that have a parameter."""


def listed(names: str, known: Mapping[str, Any] = ALL) -> dict[str, Any]:
    """Methods of a comma-separated list, as `named` takes them; ``all`` is all that are known."""
    if names == "all":
        return dict(known)
    return {name: named(name, known) for name in _split(names)}


def _split(names: str) -> list[str]:
    """At the commas that stand in no brackets."""
    parts, depth = [""], 0
    for sign in names:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def named(name: str, known: Mapping[str, Any] = ALL) -> Any:
    """A method by its short name, or one of LRP written out. Raises `UnknownName` or `InputError`."""
    name = name if isinstance(name, str) else shown(name)
    if name in known:
        return known[name]
    if not name.startswith(("AttnLRP(", "Difference(")):
        ways = f"The methods are {', '.join(known)}, or one written out, as AttnLRP(linear=Gamma(0.1))."
        raise UnknownName("method", name, known, ways)
    return read(name)

"""AttnLRP and its variants."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from icebear.concepts.methods.method import Multiplying, OnePass
from icebear.errors import InputError
from icebear.lrp.linear_rules import Epsilon, Gamma, LinearRule
from icebear.values import one_of, shown


@dataclass(frozen=True, repr=False)
class AttnLRP(OnePass):
    """Attention-aware layer-wise relevance propagation (AttnLRP) and its variants.

    Parameters
    ----------
    softmax
        The rule of the softmax. ``taylor`` is Eq. 13 of the paper. ``zplus`` distributes the relevance of each
        attention weight over the positive terms of that expansion, and none to its bias. ``constant`` treats attention
        weights as constants (CP-LRP), which conserves relevance exactly.
    linear
        The rule of linear maps: `Epsilon`, `Gamma`, `ZPlus` or `AlphaBeta`.
    conv
        The rule of convolutions; None for the rule of linear maps.
    positions
        Whether positions have relevance too (PA-LRP), see `Relevance.positions`.
    attention_in, attention_out
        The rules of the projections to queries, keys and values, and of the output projection of attention; None for
        the rule of linear maps.
    at
        The point between a counterfactual and the prompt where multipliers are computed, ``midpoint`` or ``prompt``.

    Raises
    ------
    InputError
        If an argument is not one of these values.

    References
    ----------
    Achtibat et al. 2024 (AttnLRP, Eq. 8 to 19); Ali et al. 2022 (CP-LRP); Bakish et al. 2025 (PA-LRP).
    """

    softmax: Literal["taylor", "zplus", "constant"] = "taylor"
    linear: LinearRule = field(default_factory=Epsilon)
    conv: LinearRule | None = None
    positions: bool = False
    attention_in: LinearRule | None = None
    attention_out: LinearRule | None = None
    paired: ClassVar[bool] = False
    """Whether a rule sees a prompt and its counterfactual together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.softmax, "softmax rule", ("taylor", "zplus", "constant"))
        for rule in (self.linear, self.conv, self.attention_in, self.attention_out):
            if not isinstance(rule, LinearRule) and (rule is not None or self.linear is None):
                raise InputError(f"{shown(rule)} is not a rule of linear maps; use Epsilon, Gamma, ZPlus or AlphaBeta.")
        if not isinstance(self.positions, bool):
            raise InputError(f"positions must be True or False, not {shown(self.positions)}.")

    @property
    def rules(self) -> AttnLRP:
        return self

    def for_comparison(self) -> Multiplying:
        if self.positions:
            raise InputError("pa-lrp cannot compare with a counterfactual; use attnlrp or cp-lrp.")
        return super().for_comparison()


ATTNLRP = AttnLRP()
CP_LRP = AttnLRP(softmax="constant")
PA_LRP = AttnLRP(positions=True)
VIT = AttnLRP(softmax="zplus", linear=Gamma(0.05), conv=Gamma(0.25), attention_in=Epsilon(), attention_out=Epsilon())
"""For vision transformers, whose gradients are noisy: the composite of AttnLRP, appendix B.4, figures 12 to 16."""

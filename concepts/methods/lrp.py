"""Layer-wise relevance propagation as methods: AttnLRP with its variants, and difference rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from icebear.concepts.lrp.linear_rules import Epsilon, Gamma, LinearRule
from icebear.concepts.methods.method import Method, Multiplying, OnePass
from icebear.errors import InputError
from icebear.values import one_of, shown

if TYPE_CHECKING:
    from torch import Tensor

    from icebear.concepts.models.model import Model
    from icebear.concepts.models.objective import Objective


@dataclass(frozen=True, repr=False)
class AttnLRP(OnePass):
    """AttnLRP (Achtibat et al. 2024) and its variants.

    softmax: ``taylor`` is the paper's rule (Eq. 13); ``zplus`` shares each weight's relevance among what raises it in
        that expansion, leaving its bias nothing; ``constant`` takes the attention weights as constants, which is
        CP-LRP (Ali et al. 2022), and conserves relevance exactly.
    linear: the rule of linear maps.
    conv: the rule of convolutions; None for that of linear maps.
    positions: attribute to positions as well (PA-LRP, Bakish et al. 2025): `Relevance.positions`.
    at: where multipliers are taken between a counterfactual and the prompt, ``midpoint`` or ``prompt``.
    """

    softmax: Literal["taylor", "zplus", "constant"] = "taylor"
    linear: LinearRule = field(default_factory=Epsilon)
    conv: LinearRule | None = None
    positions: bool = False
    paired: ClassVar[bool] = False
    """Whether the rules see a prompt and its counterfactual at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.softmax, "softmax rule", ("taylor", "zplus", "constant"))
        for rule in (self.linear, self.conv or self.linear):
            if not isinstance(rule, LinearRule):
                raise InputError(f"{shown(rule)} is not a rule of linear maps; use Epsilon, Gamma, ZPlus or AlphaBeta.")
        if not isinstance(self.positions, bool):
            raise InputError(f"positions is True or False, not {shown(self.positions)}.")

    @property
    def rules(self) -> AttnLRP:
        return self

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        """With `positions`, add the positive relevance of positions in each layer (PA-LRP, Eq. 11)."""
        from icebear.concepts.methods import common

        return common.token_relevance(model, objective, self, "relu" if self.positions else None)

    def compared(self) -> Multiplying:
        if self.positions:
            raise InputError("Relevance of positions is not compared; take attnlrp or cp-lrp.")
        return super().compared()


@dataclass(frozen=True, repr=False)
class Difference(Method):
    """Relevance compared with a counterfactual, exact in the difference (`icebear.concepts.lrp.differences`).

    softmax: ``exact`` follows the attention weights from one prompt to the other; ``constant`` holds them, at the mean
        of both.
    """

    softmax: Literal["exact", "constant"] = "exact"
    scores_neurons = True
    needs_counterfactual = True
    paired: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of(self.softmax, "softmax rule of a difference", ("exact", "constant"))

    def compared(self) -> Difference:
        return self


ATTNLRP = AttnLRP()
CP_LRP = AttnLRP(softmax="constant")
PA_LRP = AttnLRP(positions=True)
DIFFERENCE = Difference()
VIT = AttnLRP(softmax="zplus", linear=Gamma(0.05), conv=Gamma(0.25))
"""For vision transformers, whose gradients are noisy: AttnLRP's composite (its appendix B.4)."""

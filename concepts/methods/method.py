"""What an attribution method is, whatever it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from icebear.errors import InputError
from icebear.values import one_of

if TYPE_CHECKING:
    from torch import Tensor

    from icebear.concepts.methods.lrp import AttnLRP
    from icebear.concepts.models.model import Model
    from icebear.concepts.models.objective import Objective

Place = Literal["prompt", "midpoint", "path"]


class Method:
    """An attribution method as a value: it can be compared, printed as it is written, and read back.

    A new method is one subclass, a frozen dataclass (``repr=False``) with `scores`, and one entry of
    `icebear.concepts.methods.registry.METHODS`.
    """

    at: Place | None = None
    """Where multipliers are taken between the counterfactual and the prompt; None for a prompt alone."""

    @property
    def scores_neurons(self) -> bool:
        """Whether it scores neurons too, not tokens only."""
        return False

    @property
    def needs_counterfactual(self) -> bool:
        return self.at is not None

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        """(T,) the scores of each prompt's tokens; the objective's targets are known. Raises `InputError`."""
        raise InputError(f"{self!r} does not score tokens of a prompt alone; choose another method.")

    def neuron_scores(self, model: Model, objective: Objective, site: str) -> Tensor:
        """(L, T, N) the scores of a site's neurons, for an objective of one prompt. Raises `InputError`."""
        raise InputError(f"{self!r} does not score neurons of a prompt alone; choose attnlrp, cp-lrp or gxi.")

    per_token = False
    """Whether it takes a pass a token, or memory for each pair of tokens."""

    def cost(self, tokens: int) -> float:
        """Roughly the time, or the memory where that is more, for a prompt of so many tokens; gradient x input is 1."""
        return float(tokens) if self.per_token else 1.0

    def variants(self) -> Sequence[Method]:
        """What an evaluation tries that tunes the method's parameter; empty without one."""
        return ()

    def compared(self) -> Method:
        """The method for a prompt with a counterfactual, its place set. Raises `InputError` without multipliers."""
        raise InputError(
            f"{self!r} has no multipliers for a counterfactual; take attnlrp, cp-lrp, difference, gxi or ig."
        )

    def __repr__(self) -> str:
        default = type(self)()
        fields = [f"{key}={value!r}" for key, value in vars(self).items() if value != getattr(default, key)]
        return f"{type(self).__name__}({', '.join(fields)})"


@dataclass(frozen=True, repr=False)
class Multiplying(Method):
    """A method whose gradient, by whatever rules, can multiply the difference of two prompts' activations."""

    at: Place | None = field(default=None, kw_only=True)
    places: ClassVar[tuple[Place, ...]] = ("midpoint", "prompt")
    """What `at` may be; the first is the default of a comparison."""

    def __post_init__(self) -> None:
        if self.at is not None:
            one_of(self.at, "place of multipliers", self.places)

    def compared(self) -> Multiplying:
        return self if self.at else replace(self, at=self.places[0])

    def shares(self) -> list[float]:
        """The points where multipliers are taken, as shares of the way from the counterfactual to the prompt."""
        return [1.0 if self.at == "prompt" else 0.5]


class OnePass(Multiplying):
    """A method whose one backward pass gives relevance of tokens and neurons, as activation x gradient."""

    scores_neurons = True
    positions: bool = False
    """Whether positions get relevance too."""

    @property
    def rules(self) -> AttnLRP | None:
        """The relevance rules of the pass; None for the plain gradient."""
        return None

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        from icebear.concepts.methods import common

        return common.token_relevance(model, objective, self.rules)

    def neuron_scores(self, model: Model, objective: Objective, site: str) -> Tensor:
        from icebear.concepts.methods import common

        return common.neuron_relevance(model, objective, site, self.rules)

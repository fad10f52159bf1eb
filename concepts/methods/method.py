"""The base classes of attribution methods."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from icebear.errors import InputError
from icebear.values import one_of

if TYPE_CHECKING:
    from torch import Tensor

    from icebear.concepts.methods.pair import Pair, PairResult
    from icebear.lrp.linear_rules import Rules
    from icebear.models.model import Model
    from icebear.models.objective import Objective

Point = Literal["prompt", "midpoint", "path"]


class Method:
    """An attribution method as a value: it can be compared, printed as code, and read back.

    A new method is a subclass, a frozen dataclass (``repr=False``) with `scores` or `compare`, and an entry of
    `icebear.concepts.methods.registry.METHODS`.
    """

    at: Point | None = None
    """The point between the counterfactual and the prompt where multipliers are computed; None for a prompt alone."""

    @property
    def scores_neurons(self) -> bool:
        """Whether it also scores neurons."""
        return False

    @property
    def needs_counterfactual(self) -> bool:
        return self.at is not None

    needs_equal_length = False
    """Whether a comparison needs prompts of equal length."""
    far_note: ClassVar[str] = ""
    """Why the sum of the tokens may be far from the explained number, where it is."""
    keeps_largest = False
    """Whether a comparison records `Pair.k` neurons in its pass, with no need of all of them."""

    def compare(self, pair: Pair) -> PairResult:
        """Explain the difference of a prompt to its counterfactual; `for_comparison` says which methods can."""
        raise NotImplementedError

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        """Return the scores (T,) of the tokens of each prompt, for an objective with targets. Raises `InputError`."""
        raise InputError(
            f"The method {self!r} scores tokens only with a counterfactual; give one, or choose another method."
        )

    def neuron_scores(self, model: Model, objective: Objective, site: str) -> Tensor:
        """Return the scores (L, T, N) of the neurons of a site, for an objective of one prompt. Raises `InputError`."""
        raise InputError(
            f"The method {self!r} does not score the neurons of a single prompt; choose attnlrp, cp-lrp or gxi."
        )

    def for_comparison(self) -> Method:
        """Return the method for a prompt with a counterfactual. Raises `InputError` if it has no multipliers."""
        if self.needs_counterfactual:
            return self
        raise InputError(
            f"The method {self!r} cannot compare with a counterfactual; choose attnlrp, cp-lrp, difference, gxi or ig."
        )

    def __repr__(self) -> str:
        default = type(self)()
        fields = [f"{key}={value!r}" for key, value in vars(self).items() if value != getattr(default, key)]
        return f"{type(self).__name__}({', '.join(fields)})"


@dataclass(frozen=True, repr=False)
class Multiplying(Method):
    """A method whose gradient (by its rules) can be the multiplier of the difference of two prompts."""

    at: Point | None = field(default=None, kw_only=True)
    known_points: ClassVar[tuple[Point, ...]] = ("midpoint", "prompt")
    """The values of `at`; the first is the default of a comparison."""

    def __post_init__(self) -> None:
        if self.at is not None:
            one_of(self.at, "point of multipliers", self.known_points)

    def for_comparison(self) -> Multiplying:
        return self if self.at else replace(self, at=self.known_points[0])

    def points(self) -> list[float]:
        """Return the points where multipliers are computed, from 0 (the counterfactual) to 1 (the prompt)."""
        return [1.0 if self.at == "prompt" else 0.5]

    @property
    def rules(self) -> Rules | None:
        """The relevance rules of the backward pass; None for the plain gradient."""
        return None

    def compare(self, pair: Pair) -> PairResult:
        from icebear.concepts.methods.multipliers import by_multipliers

        return by_multipliers(self.points(), self.rules, pair)


class OnePass(Multiplying):
    """A method with one backward pass, whose relevance of tokens and neurons is activation x gradient."""

    scores_neurons = True
    positions: bool = False
    """Whether positions have relevance too."""

    def scores(self, model: Model, objective: Objective) -> list[Tensor]:
        """With `positions`, add the positive relevance of positions in each layer (PA-LRP, Eq. 11)."""
        from icebear.concepts.methods import common

        return common.token_relevance(model, objective, self.rules, "relu" if self.positions else None)

    def neuron_scores(self, model: Model, objective: Objective, site: str) -> Tensor:
        from icebear.concepts.methods import common

        return common.neuron_relevance(model, objective, site, self.rules)

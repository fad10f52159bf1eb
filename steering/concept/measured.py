"""Results of measuring a concept: in a text, token by token, and in a prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from icebear.concepts.render import page, render


@dataclass(frozen=True)
class Measured:
    """A concept in a text, in standard deviations over the sentences that it was compared with when it was found."""

    concept: str
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    """One a token; 0 for those that do not count (the first, and special ones)."""
    value: float
    """Of the text: the mean over the tokens that count."""
    apart: tuple[int, ...]
    """The positions of the tokens that do not count."""

    def to_dict(self) -> dict[str, Any]:
        return {"concept": self.concept, "value": self.value, "tokens": list(self.tokens), "values": list(self.values)}

    def to_html(self) -> str:
        """A self-contained page."""
        return page(f"icebear concept {self.concept}", self._repr_html_())

    def _repr_html_(self) -> Markup:
        return render("icebear.steering/measured.html", measured=self)


@dataclass(frozen=True)
class Through:
    """How much of the logit of the most probable next token passes through a concept."""

    target: str
    logit: float
    relevance: float
    """The share of the logit that passes through the concept's neurons by CP-LRP: the tokens' relevance less that with
    these neurons blocked. Neurons in series do not count twice."""
    drop: float
    """The share of the logit that is lost when the neurons take their means over the corpus, at all tokens but the
    first."""

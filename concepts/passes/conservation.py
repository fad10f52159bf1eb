"""Where the relevance of a target went."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Conservation:
    """Where the relevance of the target went; the parts add up to `target`.

    `softmax` is what the bias term of the Taylor rule keeps (AttnLRP Eq. 13; 0 in CP-LRP), `rest` what no
    rule accounts for: rounding, and functions with f(0) != 0.
    """

    target: float
    tokens: float
    positions: float = 0.0
    biases: float = 0.0
    softmax: float = 0.0

    @property
    def rest(self) -> float:
        return self.target - self.tokens - self.positions - self.biases - self.softmax

    def less(self, other: Conservation) -> Conservation:
        return Conservation(*(getattr(self, part.name) - getattr(other, part.name) for part in fields(self)))

    def to_dict(self) -> dict[str, float]:
        return {**vars(self), "rest": self.rest}

    def __str__(self) -> str:
        others = {
            "positions": self.positions,
            "biases": self.biases,
            "softmax bias (not attributable to a token)": self.softmax,
        }
        parts = [f"{name} {value:z.3f}" for name, value in others.items() if abs(value) >= 5e-4]
        return f"{self.target:z.3f}: {', '.join([f'tokens {self.tokens:z.3f}', *parts, f'rest {self.rest:.1e}'])}"

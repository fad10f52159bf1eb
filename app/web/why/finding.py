"""What the first view shows of a prediction: measured now, or read from a file of an example."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Answers(NamedTuple):
    """Probable answers, and the ones that are explained if none is chosen."""

    predicted: tuple[tuple[str, str], ...]
    """The most probable tokens, each with its probability as text."""
    predicted_there: tuple[tuple[str, str], ...]
    """The same after the counterfactual."""
    target: str
    contrast: str | None


@dataclass(frozen=True)
class Request:
    """What is to be explained."""

    prompt: str
    counterfactual: str | None
    target: str | None
    """The answer as it was typed; None for the most probable one."""
    contrast: str | None
    method: str | None

    @property
    def is_default(self) -> bool:
        return not (self.target or self.contrast or self.method)


@dataclass(frozen=True)
class Strong:
    """A neuron or head of a group, at a token."""

    neuron: str
    polarity: str
    """The sign of the activation here, less the one that it is compared with; empty for a head."""
    token: str
    raises: tuple[str, ...]
    lowers: tuple[str, ...]
    label: str | None = None
    here: float | None = None
    there: float | None = None
    """In the counterfactual; without one, the average."""
    low: float = 0.0
    high: float = 0.0
    """The activation range on the calibration texts, with both values."""


@dataclass(frozen=True)
class Group:
    """Nodes that raise and lower the same words."""

    raises: tuple[str, ...]
    lowers: tuple[str, ...]
    about: str
    edits: tuple[str, ...]
    """They set each node to its value in the counterfactual; without one, to its average. Empty for heads."""
    strongest: tuple[Strong, ...]


@dataclass(frozen=True)
class Finding:
    """An explained prediction."""

    prompt: str
    counterfactual: str | None
    target: str
    contrast: str | None
    predicted: tuple[tuple[str, str], ...]
    """The most probable tokens, each with its probability as text."""
    predicted_there: tuple[tuple[str, str], ...]
    tokens: tuple[str, ...]
    values: tuple[float, ...]
    """The relevance of each token."""
    sinks: tuple[int, ...]
    template: tuple[int, ...]
    about_tokens: str
    margins: str
    check: str
    """The conservation accounting."""
    together: str = ""
    reach: str = ""
    groups: tuple[Group, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Finding:
        """Return the finding of a file that comes with icebear."""
        groups = tuple(
            Group(**group | {"strongest": tuple(Strong(**node) for node in group["strongest"])})
            for group in record["groups"]
        )
        return cls(**record | {"groups": groups})

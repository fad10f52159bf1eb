"""What the first view explains, and the answers that it offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from icebear.records import TokenScore


class Answers(NamedTuple):
    """Probable answers, and the ones that are explained if none is chosen."""

    predictions: Sequence[TokenScore]
    counterfactual_predictions: Sequence[TokenScore]
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

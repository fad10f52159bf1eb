"""`Counterfactual`: what a relevance is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from icebear.models.objective import Objective
from icebear.records import TokenScore


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """What a relevance is compared with: counterfactual prompts, or a base model."""

    prompts: tuple[tuple[str, ...], ...]
    """The tokens of each counterfactual."""
    pairs: tuple[Objective, ...]
    """For each counterfactual the objective of two rows: the prompt, then the counterfactual."""
    alignments: tuple[Tensor, ...]
    """(T, T') for each counterfactual, see `icebear.concepts.methods.multipliers.alignment`."""
    contrasts: tuple[str, ...]
    """The contrast with each counterfactual; empty if a whole continuation is explained."""
    own_answers: bool
    """Whether the contrasts are the model's answers to the counterfactuals."""
    at: str
    """Where multipliers are taken: at ``both`` prompts (difference rules), ``prompt``, ``midpoint``, ``path``, or at
    each ``model``."""
    numbers: tuple[float, ...]
    """The value of the objective in each counterfactual."""
    overlap: float | None
    """With several counterfactuals: the mean share of the 100 largest nodes that two of them have in common."""
    note: str = ""
    """Why the method is not the default."""
    model: str | None = None
    """The name of the base model; the prompt is then the same."""
    predictions: tuple[TokenScore, ...] = ()
    """The most probable next tokens in the (first) counterfactual."""

    def to_dict(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name not in ("pairs", "alignments")}
        return {**fields, "predictions": [vars(token) for token in self.predictions]}

    def __str__(self) -> str:
        if self.model:
            return f"the model {self.model} on the same prompt: relevance minus relevance in that model"
        others = " and ".join(repr("".join(tokens)) for tokens in self.prompts[:3])
        more = f" and {len(self.prompts) - 3} more" if len(self.prompts) > 3 else ""
        contrasts = " / ".join(map(repr, dict.fromkeys(self.contrasts)))
        contrast = f", contrast: the counterfactual's top token {contrasts}" if self.own_answers else ""
        where = "" if self.at == "both" else f", multipliers of the {self.at}"
        note = f" ({self.note})" if self.note else ""
        overlap = f"; overlap of their first 100 nodes {self.overlap:.0%}" if self.overlap is not None else ""
        return f"{others}{more}{contrast}{where}{note}{overlap}"

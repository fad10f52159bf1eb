"""How alike two concepts are: their neurons, what they write, and what they measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from icebear.concepts.models.model import Model
from icebear.concepts.vocabulary import w2_row
from icebear.steering.concept.concept import Concept


@dataclass(frozen=True)
class Likeness:
    neurons: float | None
    """The share of (neuron, polarity) of both that are the same; None of two models'."""
    directions: float | None
    """The cosine of what they write to the residual stream when each neuron goes as far as it weighs."""
    measures: float
    """The correlation of what they measure on the same texts."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def likeness(one: tuple[Model, Concept], other: tuple[Model, Concept], texts: Sequence[str]) -> Likeness:
    """Of two concepts, each with its model, on some texts."""
    values = [[found.value for found in concept.measures(model, texts)] for model, concept in (one, other)]
    measures = float(np.asarray(np.corrcoef(values))[0, 1])
    if one[1].model_fingerprint != other[1].model_fingerprint:
        return Likeness(None, None, measures)
    directions = [direction(model, concept) for model, concept in (one, other)]
    return Likeness(
        overlap(one[1], other[1]), float(torch.cosine_similarity(directions[0], directions[1], dim=0)), measures
    )


def direction(model: Model, concept: Concept) -> torch.Tensor:
    """(D,) what it writes."""
    rows = [part.sign * part.weight * part.std * w2_row(model, part.neuron) for part in concept.parts]
    return torch.stack(rows).sum(0)


def overlap(one: Concept, other: Concept) -> float:
    mine, theirs = ({(part.neuron, part.polarity) for part in concept.parts} for concept in (one, other))
    return len(mine & theirs) / len(mine | theirs) if mine | theirs else 0.0


def nearest(concept: Concept, others: Sequence[Concept]) -> list[tuple[str, float]]:
    """Those of the same model that share neurons, most first."""
    found = [
        (other.name, overlap(concept, other))
        for other in others
        if other.model_fingerprint == concept.model_fingerprint
    ]
    return sorted(((name, share) for name, share in found if share), key=lambda row: -row[1])

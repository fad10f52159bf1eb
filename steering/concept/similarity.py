"""The similarity of two concepts: of their neurons, their output directions, and their values of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from icebear.concepts.models.model import Model
from icebear.concepts.vocabulary import direct_row
from icebear.steering.concept.concept import Concept


@dataclass(frozen=True)
class ConceptSimilarity:
    neurons: float | None
    """The share of (neuron, polarity) that both concepts have; None for concepts of two models."""
    directions: float | None
    """The cosine of the vectors that they write to the residual stream when each neuron moves by its weight."""
    measures: float
    """The correlation of their values of the same texts."""


def concept_similarity(
    one: tuple[Model, Concept], other: tuple[Model, Concept], texts: Sequence[str]
) -> ConceptSimilarity:
    """Compare two concepts, each with its model, on some texts."""
    values = [[row.value for row in concept.measures(model, texts)] for model, concept in (one, other)]
    measures = float(np.asarray(np.corrcoef(values))[0, 1])
    if one[1].model_fingerprint != other[1].model_fingerprint:
        return ConceptSimilarity(None, None, measures)
    directions = []  # (D,)
    for model, concept in (one, other):
        rows = [part.sign * part.weight * part.std * direct_row(model, part.neuron) for part in concept.parts]
        directions.append(torch.stack(rows).sum(0))
    return ConceptSimilarity(overlap(one[1], other[1]), torch.cosine_similarity(*directions, dim=0).item(), measures)


def overlap(one: Concept, other: Concept) -> float:
    mine, theirs = ({(part.neuron, part.polarity) for part in concept.parts} for concept in (one, other))
    return len(mine & theirs) / len(mine | theirs) if mine | theirs else 0.0


def nearest(concept: Concept, others: Sequence[Concept]) -> list[tuple[str, float]]:
    """Return the concepts of the same model that share neurons with `concept`, by this share, the largest first."""
    same = [other for other in others if other.model_fingerprint == concept.model_fingerprint]
    overlaps = [(other.name, overlap(concept, other)) for other in same]
    return sorted((row for row in overlaps if row[1]), key=lambda row: -row[1])

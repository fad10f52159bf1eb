"""How much of a concept is in a text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from icebear.concepts.concept.reading import BATCH, columns_of, counts
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import PromptLike
from icebear.concepts.passes.sites import hooks
from icebear.concepts.render import page, render
from icebear.errors import InputError

if TYPE_CHECKING:
    from icebear.steering.concept.concept import Concept


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
    """Which tokens do not."""

    def to_dict(self) -> dict[str, Any]:
        return {"concept": self.concept, "value": self.value, "tokens": list(self.tokens), "values": list(self.values)}

    def to_html(self) -> str:
        """A self-contained page."""
        return page(f"icebear concept {self.concept}", self._repr_html_())

    def _repr_html_(self) -> Markup:
        return render("icebear.steering/measured.html", measured=self)


def measured(model: Model, concept: Concept, texts: Sequence[PromptLike]) -> list[Measured]:
    """Of each text, in batches. Raises `InputError` for a text in which no token counts."""
    rows = [model.ids(text) for text in texts]
    counted = [counts(model, ids) for ids in rows]
    if any(not places for places in counted):
        raise InputError("A text has no token after its first one to be measured at; give a whole sentence.")
    values = _values(model, concept, rows)
    found = []
    for ids, places, own in zip(rows, counted, values, strict=True):
        kept = np.zeros(len(ids))
        kept[places] = own[places]
        apart = tuple(sorted(set(range(len(ids))) - set(places)))
        told = tuple(kept.tolist())
        found.append(Measured(concept.name, model.pieces(ids), told, float(own[places].mean()), apart))
    return found


@torch.no_grad()
def _values(model: Model, concept: Concept, rows: Sequence[list[int]]) -> list[np.ndarray]:
    """(T,) of each row."""
    weights, centre = concept.linear()
    columns = columns_of([part.neuron for part in concept.parts])
    found = [np.zeros(len(ids)) for ids in rows]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    batch: list[int] = []

    def visit(site: str, layer: int, x: Tensor) -> None:
        own = columns[site, layer]
        values = x.detach()[..., [concept.parts[c].neuron.index for c in own]].double().cpu().numpy()
        for row, number in enumerate(batch):
            found[number] += (values[row, : len(rows[number])] - centre[own]) @ weights[own]

    with model.lock, hooks(model, columns, visit):
        for start in range(0, len(order) if columns else 0, BATCH):
            batch[:] = order[start : start + BATCH]
            model.final_stream(model.read([rows[number] for number in batch]))
    return found

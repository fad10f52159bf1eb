"""`Recipe`: a named set of edits that can be saved and shared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from icebear.convert import Saved
from icebear.edits import AnyEdit, Edit, parse_edits
from icebear.errors import InputError, RecipeError
from icebear.values import check_int, of_type, real, shown

OF_THE_WHOLE = ("outcome", "after")
"""Provenance that is measured with all edits at full strength."""


@dataclass(frozen=True, repr=False)
class Recipe(Saved):
    """Edits of one model with their provenance.

    Parameters
    ----------
    name : str
    edits : tuple of Edit, VectorEdit or str
    model_name : str
    model_fingerprint : str
        The model must have this fingerprint.
    provenance : dict
        JSON-ready.

    Raises
    ------
    InputError
        If an edit cannot be used, or a field has another type.
    """

    name: str
    edits: tuple[AnyEdit, ...]
    model_name: str
    model_fingerprint: str
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "edits", tuple(parse_edits(self.edits)))
        if not isinstance(self.provenance, dict):
            raise InputError(f"The provenance of a recipe is a dict, not {shown(self.provenance)}.")

    def __iter__(self) -> Iterator[AnyEdit]:
        return iter(self.edits)

    def neuron_edits(self) -> list[Edit]:
        """Return the edits. Raises `RecipeError` if one of them adds a vector, which is no neuron."""
        edits = [edit for edit in self.edits if isinstance(edit, Edit)]
        if len(edits) < len(self.edits):
            raise RecipeError(
                f"The recipe {self.name!r} adds a vector to the residual stream, and this needs edits of neurons; use "
                "steer, or icebear steer --recipe."
            )
        return edits

    def __len__(self) -> int:
        return len(self.edits)

    @classmethod
    def for_model(cls, model: Any, name: str, edits: Iterable[AnyEdit | str], **provenance: Any) -> Recipe:
        of_type(model, "model", {"Model"})
        provenance = {**provenance, "made_with": model.made_with}
        return cls(name, tuple(parse_edits(edits, model.name)), model.name, model.fingerprint, provenance)

    def __mul__(self, share: float) -> Recipe:
        """Return the recipe at a share of its strength, from 0 (no change) to 1."""
        share = real(share, "The share of a recipe", 0, 1)
        edits = tuple(replace(edit, share=edit.share * share) for edit in self.edits)
        provenance = {key: value for key, value in self.provenance.items() if key not in OF_THE_WHOLE}
        return replace(self, name=f"{self.name} x {share:g}", edits=edits, provenance=provenance)

    __rmul__ = __mul__

    def __add__(self, other: Recipe) -> Recipe:
        """Return the edits of both recipes. Raises `RecipeError` if they share a neuron or are for different models."""
        if not isinstance(other, Recipe):
            raise RecipeError(f"{shown(other)} is not a recipe; a recipe is combined with another recipe.")
        if other.model_fingerprint != self.model_fingerprint:
            raise RecipeError(
                f"{self.name!r} and {other.name!r} are for different models; combine recipes of one model."
            )
        mine, theirs = ({edit.neuron for edit in each if isinstance(edit, Edit)} for each in (self, other))
        if mine & theirs:
            names = ", ".join(map(str, sorted(mine & theirs)))
            raise RecipeError(
                f"{self.name!r} and {other.name!r} both edit {names}, so their order would matter; combine recipes "
                "that edit different neurons."
            )
        edits = tuple(sorted(self.edits + other.edits, key=_order))
        name = " + ".join(sorted((self.name, other.name)))
        parts = sorted((self.provenance, other.provenance), key=lambda part: json.dumps(part, sort_keys=True))
        return Recipe(name, edits, self.model_name, self.model_fingerprint, {"parts": parts})

    def noting(self, **more: Any) -> Recipe:
        """Return the recipe with more provenance."""
        return replace(self, provenance={**self.provenance, **more})

    def check(self, model: Any) -> None:
        """Raise `RecipeError` if this recipe was made for another model."""
        if self.model_fingerprint != model.fingerprint:
            raise RecipeError(
                f"The recipe {self.name!r} was made for {self.model_name} ({self.model_fingerprint}), not for "
                f"{model.name} ({model.fingerprint}); load {self.model_name}."
            )
        for edit in self.edits:
            if isinstance(edit, Edit):
                model.check(edit.neuron)
            else:
                check_int(edit.layer, f"The layer of a vector in {model.name}", 0, model.layers - 1)


def _order(edit: AnyEdit) -> tuple[bool, Any]:
    """Neurons first; vectors in order of their numbers, so that sums of recipes are equal either way."""
    return (False, edit.neuron) if isinstance(edit, Edit) else (True, (edit.layer, edit.where, edit.vector))

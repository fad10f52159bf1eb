"""Restore changed weights to the base model's: how much of the difference that undoes, and the largest changes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch

from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.results.diff import Change, Diff, ranked_changes
from icebear.concepts.weights.changed_weights import ChangedWeights, ModelPair
from icebear.errors import InputError
from icebear.models.objective import Objective
from icebear.values import check_int

SIZES = (1, 10, 100)
"""The numbers of changes that are restored."""


@dataclass(frozen=True)
class Restoration:
    """The share of the difference that is undone when changes take the base model's weights. It may be below 0 or above
    1 (overshoot)."""

    changes: int
    undone: float
    """By the changes that caused most."""
    largest: float
    """The control: by as many changes with the largest norms."""


@dataclass(frozen=True)
class ExplainedChanges:
    """The changes that caused most, and how much of the difference restoring changes undoes."""

    total: float
    """The difference."""
    changes: tuple[Change, ...]
    restorations: tuple[Restoration, ...]

    @classmethod
    def of(cls, diff: Diff, k: int = 10) -> ExplainedChanges:
        """Rank the first k changes, and restore changes."""
        restoring = Restoring.of(diff)
        number, base = restoring.ends
        return cls(number - base, tuple(restoring.top(k)), tuple(restoring.restorations()))

    def to_dict(self) -> dict[str, Any]:
        rows = {"changes": [row.to_dict() for row in self.changes], "restorations": list(map(vars, self.restorations))}
        return {"total": self.total, **rows}


class Restoring:
    """Passes of a model over some prompts, with some of its weights restored."""

    def __init__(self, models: ModelPair, objectives: Sequence[Objective], changes: Sequence[ChangedWeights]) -> None:
        self.models, self.objectives, self.changes = models, objectives, changes

    @classmethod
    def of(cls, *diffs: Diff) -> Restoring:
        """Return the passes over the prompts of one or several results, with the mean of what weights caused.

        Raises `InputError` if there is none.
        """
        models = next((diff.run.models for diff in diffs), None)
        if models is None:
            raise InputError("There is no result to restore weights of; pass the results of attribute(base_model=...).")
        if any(diff.contrast_phrase for diff in diffs):
            raise InputError("Restoring cannot measure a phrase against a contrast phrase; leave out the contrast.")
        columns = zip(*(diff.changes for diff in diffs), strict=True)
        mean = [replace(each[0], caused=torch.stack([change.caused for change in each]).mean(0)) for each in columns]
        return cls(models, [diff.explained() for diff in diffs], mean)

    def number(self, changes: Sequence[Change]) -> float:
        """Return the explained number, its mean over the prompts, with some changes restored."""
        with self.restored(changes):
            return fmean(forward(self.models.model, Logits(objective), [])[0].item() for objective in self.objectives)

    def restored(self, changes: Sequence[Change]) -> AbstractContextManager[None]:
        """Give changes the base model's weights inside the context; measure outside of it."""
        units = [(change.kind, change.module, change.index) for change in changes]
        return self.models.restored(units) if units else nullcontext()

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The number in the model and in its base model. Raises `InputError` if they are equal."""
        number = self.number([])
        base = fmean(forward(self.models.base, Logits(objective), [])[0].item() for objective in self.objectives)
        if number == base:
            raise InputError(
                "The explained number is the same in both models, so there is no difference to undo; choose another "
                "prompt."
            )
        return number, base

    def undone(self, changes: Sequence[Change]) -> float:
        """Return the share of the difference that restoring changes undoes."""
        number, base = self.ends
        return (number - self.number(changes)) / (number - base)

    def top(self, k: int | None = None) -> list[Change]:
        """Return the k changes (None: all) that caused most of the difference, without those that work against it."""
        sign = -1 if sum(change.caused.sum().item() for change in self.changes) < 0 else 1
        return ranked_changes(self.changes, [sign * change.caused for change in self.changes], k)

    def restorations(self, sizes: Sequence[int] = SIZES) -> list[Restoration]:
        """Restore the first changes, and as many with the largest norms."""
        sizes, caused = [check_int(size, "The number of changes") for size in sizes], self.top()
        by_norm = ranked_changes(self.changes, [change.size for change in self.changes])
        return [
            Restoration(size, self.undone(caused[:size]), self.undone(by_norm[:size]))
            for size in sizes
            if size <= len(by_norm)
        ]

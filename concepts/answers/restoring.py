"""Restore changed weights to the base model's: how much of the difference that undoes, beside other weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.results.diff import Change, Diff, ranked_changes
from icebear.concepts.results.effect_words import effect_words
from icebear.concepts.results.effects import likely_ids
from icebear.concepts.weights.two_models import ChangedWeights, ModelPair
from icebear.errors import InputError
from icebear.models.objective import Objective
from icebear.values import seed_of, whole

DRAWS = 3
SIZES = (1, 10, 100)
"""The numbers of changes that are restored."""


@dataclass(frozen=True)
class Restoration:
    """The share of the difference that is undone when changes take the base model's weights. It may be below 0 or above
    1 (overshoot)."""

    changes: int
    undone: float
    """By the changes that caused most."""
    same_size: float
    """By as many random other changes of about the same norms, the mean of `DRAWS` draws."""
    random: float
    """By as many random changes, the mean of `DRAWS` draws."""
    largest: float
    """By the changes with the largest norms."""


@dataclass(frozen=True)
class ChangeEffect:
    """What restoring one change, or all changes of a layer, takes from the next token."""

    name: str
    caused: float
    undone: float
    raises: tuple[str, ...]
    """The likely next words that the change raises most."""
    lowers: tuple[str, ...]


@dataclass(frozen=True)
class ExplainedChanges:
    """The changes and the layers that caused most, and how much of the difference restoring changes undoes."""

    total: float
    """The mean difference over the prompts."""
    prompts: int
    changes: tuple[ChangeEffect, ...]
    layers: tuple[ChangeEffect, ...]
    restorations: tuple[Restoration, ...]

    @classmethod
    def of(cls, *diffs: Diff, k: int = 10, sizes: Sequence[int] = SIZES) -> ExplainedChanges:
        """Measure the effects of the first k changes and of layers, and restore changes. Effects are those of the first
        prompt."""
        restoring = Restoring.of(*diffs)
        own, base = restoring.ends
        changes, layers = restoring.effects(restoring.top(k)), restoring.layer_effects()
        return cls(own - base, len(diffs), tuple(changes), tuple(layers), tuple(restoring.restorations(sizes)))

    def to_dict(self) -> dict[str, Any]:
        lists = {name: [vars(row) for row in getattr(self, name)] for name in ("changes", "layers", "restorations")}
        return {"total": self.total, "prompts": self.prompts, **lists}


class Restoring:
    """Passes of a model over some prompts, with some of its weights restored."""

    def __init__(self, models: ModelPair, objectives: Sequence[Objective], changes: Sequence[ChangedWeights]) -> None:
        self.models, self.objectives, self.changes = models, objectives, changes

    @classmethod
    def of(cls, *diffs: Diff) -> Restoring:
        """Return the passes over the prompts of one or several results, with the mean of what weights caused.

        Raises `InputError` if there is none, or one was read from a file.
        """
        runs = [diff.run for diff in diffs]
        if not diffs or any(run is None or run.models is None for run in runs):
            raise InputError("This result was read from a file, without its models; call attribute again.")
        if any(diff.contrast_phrase for diff in diffs):
            raise InputError("Restoring cannot measure a phrase against a contrast phrase; leave out the contrast.")
        objectives = [diff.explained() for diff in diffs]
        return cls(runs[0].models, objectives, mean_changes(diffs))  # type: ignore[union-attr,arg-type]

    def number(self, changes: Sequence[Change]) -> float:
        """Return the explained number, its mean over the prompts, with some changes restored."""
        with self.restored(changes):
            return fmean(forward(self.models.model, Logits(one), [])[0].item() for one in self.objectives)

    def restored(self, changes: Sequence[Change]) -> AbstractContextManager[None]:
        """Give changes the base model's weights inside the context; measure outside of it."""
        return (
            self.models.restored([(one.kind, one.module, one.index) for one in changes]) if changes else nullcontext()
        )

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The number in the model and in its base model. Raises `InputError` if they are equal."""
        own = self.number([])
        base = fmean(forward(self.models.base, Logits(one), [])[0].item() for one in self.objectives)
        if own == base:
            raise InputError(
                "The explained number is the same in both models, so there is no difference to undo; choose another "
                "prompt."
            )
        return own, base

    def undone(self, changes: Sequence[Change]) -> float:
        """Return the share of the difference that restoring changes undoes."""
        own, base = self.ends
        return (own - self.number(changes)) / (own - base)

    def top(self, k: int | None = None) -> list[Change]:
        """Return the k changes (None: all) that caused most of the difference, without those that work against it."""
        sign = -1 if sum(one.caused.sum().item() for one in self.changes) < 0 else 1
        return ranked_changes(self.changes, [sign * one.caused for one in self.changes], k)

    def restorations(self, sizes: Sequence[int] = SIZES, seed: int = 0) -> list[Restoration]:
        """Restore the first changes, as many others of the same size, random ones, and the largest ones."""
        generator = torch.Generator().manual_seed(seed_of(seed))
        everything = ranked_changes(self.changes, [one.size for one in self.changes])
        rows = []
        for size in sizes:
            first = self.top(whole(size, "The number of changes"))
            if size > len(everything):
                break
            alike = [of_same_size(everything, first, generator) for _ in range(DRAWS)]
            chance = [[everything[i] for i in _shuffled(len(everything), generator)[:size]] for _ in range(DRAWS)]
            numbers = [self.undone(one) for one in (first, everything[:size], *alike, *chance)]
            same_size, random = fmean(numbers[2 : 2 + DRAWS]), fmean(numbers[2 + DRAWS :])
            rows.append(Restoration(size, numbers[0], same_size, random, numbers[1]))
        return rows

    def effects(self, changes: Sequence[Change]) -> list[ChangeEffect]:
        """Measure what each change does to the likely next tokens of the first prompt, by restoring it alone."""
        return [self._effect(str(change), change.caused, [change]) for change in changes]

    def layer_effects(self, k: int = 5) -> list[ChangeEffect]:
        """Measure the layers that caused most, by restoring all of a layer."""
        by_layer: dict[int, list[ChangedWeights]] = {}
        for one in self.changes:
            if one.layer is not None:
                by_layer.setdefault(one.layer, []).append(one)
        sums = {layer: sum(one.caused.sum().item() for one in each) for layer, each in by_layer.items()}
        order = sorted(sums, key=lambda layer: -abs(sums[layer]))[:k]
        everything = [(layer, ranked_changes(by_layer[layer], [x.size for x in by_layer[layer]])) for layer in order]
        return [self._effect(f"layer {layer}", sums[layer], rows) for layer, rows in everything]

    def _effect(self, name: str, caused: float, changes: Sequence[Change]) -> ChangeEffect:
        with self.restored(changes):
            logits = self._logits(self.models.model)
        effects = (self._own - logits)[self._likely]
        words = effect_words(self._tokens, effects - effects.mean())
        return ChangeEffect(name, caused, self.undone(changes), *map(tuple, words))

    def _logits(self, model: Any) -> Tensor:
        """Return the logits (V,) of the next token of the first prompt."""
        target = Logits(self.objectives[0])
        forward(model, target, [])
        return target.logits[0, 0].float().cpu()

    @cached_property
    def _own(self) -> Tensor:
        return self._logits(self.models.model)

    @cached_property
    def _likely(self) -> list[int]:
        return likely_ids(torch.stack([self._own, self._logits(self.models.base)]))

    @cached_property
    def _tokens(self) -> list[str]:
        return [self.models.model.answer_text(token) for token in self._likely]


def mean_changes(diffs: Sequence[Diff]) -> tuple[ChangedWeights, ...]:
    """Return the mean over results of what the weights caused."""
    columns = zip(*(diff.changes for diff in diffs), strict=True)
    return tuple(replace(each[0], caused=torch.stack([one.caused for one in each]).mean(0)) for each in columns)


def _shuffled(count: int, generator: torch.Generator) -> list[int]:
    return torch.randperm(count, generator=generator).tolist()


def of_same_size(everything: Sequence[Change], chosen: Sequence[Change], generator: torch.Generator) -> list[Change]:
    """Draw another change for each, one of those with the nearest norms. everything: all, the largest first."""
    places = {(one.kind, one.module, one.index): place for place, one in enumerate(everything)}
    taken = {places[one.kind, one.module, one.index] for one in chosen}
    drawn = []
    for one in chosen:
        place, reach = places[one.kind, one.module, one.index], 10
        while True:
            window = range(max(0, place - reach), min(len(everything), place + reach + 1))
            free = [at for at in window if at not in taken]
            if free or len(window) == len(everything):
                break
            reach *= 2
        if free:
            at = free[int(torch.randint(len(free), (), generator=generator))]
            taken.add(at)
            drawn.append(everything[at])
    return drawn

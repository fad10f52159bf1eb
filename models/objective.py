"""The objective of an explanation: the tokens of a batch of prompts that are explained, and their positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.tasks import PromptTarget
from icebear.models.text.prompts import Prompt, PromptLike
from icebear.values import scalar, several

Token = str | int
ObjectiveKind = Literal["logit", "log-odds", "centered-logit", "mean-centered-logit"]
"""The number that is explained, a sum over the tokens of an answer: ``logit``; ``log-odds``, the logit minus the mean
of all other logits weighted by probability (it has the gradient of the log-odds); ``centered-logit``, the logit minus
the mean over the vocabulary; ``mean-centered-logit``, the mean of that, to compare answers of different lengths."""


@dataclass(frozen=True)
class Objective:
    """The tokens that are explained, of a batch of prompts."""

    batch: Batch
    positions: tuple[tuple[int, ...], ...]
    """For each prompt, the positions whose prediction is explained (of the decoder's input, if there is a decoder)."""
    targets: tuple[tuple[int, ...] | None, ...]
    """The tokens explained there; None for the most probable ones."""
    contrasts: tuple[int | None, ...]
    kind: ObjectiveKind = "logit"

    @property
    def all_positions(self) -> list[int]:
        return sorted({place for row in self.positions for place in row})

    def target_positions(self, row: int) -> tuple[int, ...]:
        """Return the positions among all tokens of a prompt, the encoder's before the decoder's."""
        before = self.batch.lengths[row] if self.batch.decoder else 0
        return tuple(before + place for place in self.positions[row])

    def evaluate(self, scores: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
        """Return the tokens and the number (B,) that are explained, from the scores (B, positions, V).

        Raises `InputError` if the contrast is the target itself.
        """
        targets, values, positions = [], [], self.all_positions
        for row, places in enumerate(self.positions):
            here = scores[row, [positions.index(place) for place in places]]  # (P, V)
            chosen = self.targets[row] or tuple(here.argmax(-1).tolist())
            value = answer_scores(here, chosen, self.kind).sum()
            contrast = self.contrasts[row]
            if contrast in chosen:
                raise InputError(
                    "The contrast is the target itself, so there is nothing to explain; choose another contrast."
                )
            if contrast is not None:
                value = value - here[:, contrast].sum()
            targets.append(chosen)
            values.append(value / len(chosen) if self.kind == "mean-centered-logit" else value)
        return targets, torch.stack(values)

    def with_answers(self, target: tuple[int, ...] | None, contrast: int | None) -> Objective:
        """Return the objective with the same target and contrast in every prompt."""
        rows = len(self.positions)
        return replace(self, targets=(target,) * rows, contrasts=(contrast,) * rows)

    def resolved(self, model: Model) -> Objective:
        """Return the objective with the most probable tokens as targets, if there are none."""
        if all(target is not None for target in self.targets):
            return self
        with model.lock, torch.no_grad():
            targets, _ = self.evaluate(model.logits(self.batch, self.all_positions))
        return replace(self, targets=tuple(targets))

    def rows(self, order: Sequence[int]) -> Objective:
        """Return the objective of these prompts, in this order."""
        each = (self.positions, self.targets, self.contrasts)
        positions, targets, contrasts = (tuple(part[row] for row in order) for part in each)
        return Objective(self.batch.rows(order), positions, targets, contrasts, self.kind)  # type: ignore[arg-type]


def answer_scores(scores: Tensor, chosen: Sequence[int], kind: ObjectiveKind) -> Tensor:
    """Return the explained number (P,) of the token chosen at each position, from scores (P, V)."""
    places = range(len(chosen)), list(chosen)
    own = scores[places]
    if kind == "logit" or (kind == "log-odds" and scores.shape[-1] == 1):  # a single number has no alternatives
        return own
    if kind != "log-odds":
        return own - scores.mean(-1)
    others = scores.detach().clone()
    others[places] = -torch.inf
    return own - (others.softmax(-1) * scores).sum(-1)  # probabilities are constants


def objective_of(
    model: Model,
    prompts: Sequence[PromptLike],
    target: Any = None,
    contrast: Any = None,
    target_text: Any = None,
    prefix: Any = None,
    position: Any = None,
    kind: ObjectiveKind = "logit",
) -> Objective:
    """Build an objective. Arguments are as in `attribute`, one for all prompts or a list with one for each.

    Raises `InputError`.
    """
    task = model.task
    targets, contrasts, texts, prefixes, places = (
        per_prompt(value, len(prompts)) for value in (target, contrast, target_text, prefix, position)
    )
    task.refuse(model, target_text=texts, prefix=prefixes, position=places)
    if any(text is not None and token is not None for text, token in zip(texts, targets, strict=True)):
        raise InputError("target and target_text cannot be combined; give one of them.")
    read = [Prompt.of(prompt) for prompt in prompts]
    before = [task.before(prompt, prefix) for prompt, prefix in zip(read, prefixes, strict=True)]
    contrast_ids = tuple(
        None if token is None else model.answer_id(token, "contrast", after)
        for token, after in zip(contrasts, before, strict=True)
    )
    answers: list[tuple[int, ...] | None] = []
    for token, text, after in zip(targets, texts, before, strict=True):
        if text is not None:
            answers.append(phrase_ids(model, text, after))
        else:
            answers.append(None if token is None else (model.answer_id(token, after=after),))
    if () in answers:
        raise InputError("The target text is empty; give at least one token.")
    rows = [PromptTarget(*row) for row in zip(read, answers, before, places, strict=True)]
    batch, positions = task.encode_targets(model, rows)
    return Objective(batch, tuple(positions), tuple(answers), contrast_ids, kind)


def per_prompt(value: Any, count: int) -> list[Any]:
    """Return one value for each prompt, from a list or from one value for all."""
    value = scalar(value)
    if value is None or isinstance(value, str) or not isinstance(value, Iterable):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InputError(
            f"An argument (target, contrast, target_text, prefix or position) has {len(values)} values for {count} "
            "prompts; give one value for each prompt, or one for all."
        )
    return values


Phrase = str | tuple[int, ...]
"""A text, or its token ids."""


def phrase_ids(model: Model, phrase: Phrase, after: PromptLike | None) -> tuple[int, ...]:
    """Return the token ids of a phrase that continues a prompt."""
    if isinstance(phrase, str):
        ids = model.continuation(phrase, after) if phrase else []
        model.check_output(ids, phrase, "target text")
        return tuple(ids)
    return tuple(model.answer_id(token) for token in several(phrase))

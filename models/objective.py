"""The objective of an explanation: the tokens of a batch of prompts that are explained, and their positions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from icebear.errors import InputError
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.tasks import index_of
from icebear.models.text.prompt_images import with_image
from icebear.models.text.prompts import ObjectiveKind, Prompt, PromptLike, PromptRequest
from icebear.notes import say
from icebear.values import scalar, several

Token = str | int


@dataclass(frozen=True)
class Objective:
    """The tokens that are explained, of a batch of prompts."""

    batch: Batch
    positions: tuple[tuple[int, ...], ...]
    """For each prompt, the positions whose prediction is explained (of the decoder's input, if there is a decoder)."""
    targets: tuple[tuple[int, ...] | None, ...]
    """The tokens explained at these positions; None for the most probable ones."""
    contrasts: tuple[int | None, ...]
    kind: ObjectiveKind = "logit"

    @property
    def all_positions(self) -> list[int]:
        return sorted({position for row in self.positions for position in row})

    def target_positions(self, row: int) -> tuple[int, ...]:
        """Return the positions among all tokens of a prompt, the encoder's before the decoder's."""
        before = self.batch.lengths[row] if self.batch.decoder else 0
        return tuple(before + position for position in self.positions[row])

    def evaluate(self, scores: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
        """Return the tokens and the number (B,) that are explained, from the scores (B, positions, V).

        Raises `InputError` if the contrast is the target itself.
        """
        targets, values, positions = [], [], self.all_positions
        for row, row_positions in enumerate(self.positions):
            row_scores = scores[row, [positions.index(position) for position in row_positions]]  # (P, V)
            chosen = self.targets[row] or tuple(row_scores.argmax(-1).tolist())
            value = answer_scores(row_scores, chosen, self.kind).sum()
            contrast = self.contrasts[row]
            if contrast in chosen:
                raise InputError(
                    "The contrast is the target itself, so there is nothing to explain; choose another contrast."
                )
            if contrast is not None:
                value = value - row_scores[:, contrast].sum()
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
    entries = range(len(chosen)), list(chosen)
    values = scores[entries]
    if kind == "logit" or (kind == "log-odds" and scores.shape[-1] == 1):  # a single number has no alternatives
        return values
    if kind != "log-odds":
        return values - scores.mean(-1)
    others = scores.detach().clone()
    others[entries] = -torch.inf
    return values - (others.softmax(-1) * scores).sum(-1)  # probabilities are constants


def prompt_request(
    model: Model,
    prompt: Prompt,
    target: Token | None = None,
    contrast: Token | None = None,
    phrase: Phrase | None = None,
    prefix: str | None = None,
    position: int | None = None,
) -> PromptRequest:
    """Return what is explained of a prompt, in token ids. Raises `InputError`."""
    model.task.refuse(model, target_text=[phrase], prefix=[prefix], position=[position])
    if phrase is not None and target is not None:
        raise InputError("target and target_text cannot be combined; give one of them.")
    before = model.task.before(prompt, prefix)
    answer = None
    if phrase is not None:
        answer = phrase_ids(model, phrase, before)
        if not answer:
            raise InputError("The target text is empty; give at least one token.")
    elif target is not None:
        answer = (model.answer_id(target, after=before),)
    against = None if contrast is None else model.answer_id(contrast, "contrast", before)
    return PromptRequest(read_once(model, prompt), answer, against, phrase is not None, None, before, position)


def read_once(model: Model, prompt: Prompt) -> Prompt:
    """Return a prompt with its token ids, which are not read again."""
    if not model.task.reads_text:
        return prompt
    return with_image(model, prompt) if prompt.image is not None else replace(prompt, ids=tuple(model.ids(prompt)))


def objective_of(
    model: Model,
    prompts: Sequence[PromptLike],
    target: Any = None,
    contrast: Any = None,
    target_text: Any = None,
    position: Any = None,
    kind: ObjectiveKind = "logit",
) -> Objective:
    """Build an objective. Arguments are as in `attribute`, one for all prompts or a list with one for each.

    Raises `InputError`.
    """
    phrases = per_prompt(target_text, len(prompts), is_phrase=True)
    target, contrast, position = (per_prompt(value, len(prompts)) for value in (target, contrast, position))
    each = zip(target, contrast, phrases, position, strict=True)
    rows = [
        prompt_request(model, Prompt.of(prompt), token, against, phrase, position=at)
        for prompt, (token, against, phrase, at) in zip(prompts, each, strict=True)
    ]
    return joint_objective(model, [replace(row, kind=kind) for row in rows])


def joint_objective(model: Model, rows: Sequence[PromptRequest]) -> Objective:
    """Return the objective of prompts that explain the same kind of number."""
    batch, positions = model.task.encode_targets(model, rows)
    answers, contrasts = tuple(row.answer for row in rows), tuple(row.contrast for row in rows)
    return Objective(batch, tuple(positions), answers, contrasts, rows[0].kind)


def per_prompt(value: Any, count: int, is_phrase: bool = False) -> list[Any]:
    """Return one value for each prompt, from a list or from one value for all. is_phrase: whether a value may be a list
    of token ids."""
    value = scalar(value)
    if value is None or isinstance(value, str) or not isinstance(value, Iterable):
        return [value] * count
    values = list(value)
    if is_phrase and values and not any(isinstance(part, (str, tuple, list)) for part in values):
        return [tuple(values)] * count  # the token ids of one phrase
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


def likelier_form(model: Model, prompt: PromptLike, answer: Any, position: int | None = None) -> Any:
    """Return an answer as a causal model continues a prompt with it: with a space before it, where that is likelier.

    Token ids, and texts that begin with a space, stay as they are. A space that is added is said. position: the token
    whose output is read, as in `attribute`. Raises `InputError` for an answer that the model does not have.
    """
    if not (isinstance(answer, str) and answer.strip() and model.task.is_causal) or model.labels:
        return answer
    if answer[0].isspace() or not model.reads_any_text:
        return answer
    read, spaced, image = model.ids(prompt), f" {answer}", Prompt.of(prompt).image
    read = read if position is None else read[: index_of(position, read) + 1]
    try:
        forms = {text: phrase_ids(model, text, prompt) for text in (answer, spaced)}
        plain, word = (_log_probability(model, read, ids, image) for ids in forms.values())
    except InputError:  # said where the answer is read as it is written
        return answer
    if word <= plain or forms[answer] == forms[spaced]:
        return answer
    shares = (math.exp(value) for value in (word, plain))
    say("Read {1!r} as {0!r}, with the space of a word: {2:.2g} is more than {3:.2g}.".format(spaced, answer, *shares))
    return spaced


def _log_probability(model: Model, prompt_ids: Sequence[int], phrase: Sequence[int], image: Any) -> float:
    logs = model.continuation_logits(prompt_ids, phrase, image).log_softmax(-1)
    return logs[range(len(phrase)), list(phrase)].sum().item()

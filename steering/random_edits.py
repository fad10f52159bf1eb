"""Random-edit control: the effect of edits, and of the same edits of random other neurons."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from icebear.concepts.nodes.random_controls import RANDOM_DRAWS, objective_text
from icebear.edits import AnyEdit, Edit, VectorEdit, parse_edits
from icebear.models.model import Model
from icebear.models.objective import Objective, Token, likelier_form, objective_of
from icebear.models.text.prompts import PromptLike
from icebear.recipe import Recipe
from icebear.records import Neuron, RandomControl
from icebear.steering.apply import Statistic, reading_sources_once, steer
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, plural, seed_of, typed

EditT = TypeVar("EditT", bound=AnyEdit)

PASS_TOKENS = 256
"""Rows times tokens of a forward pass."""
TRIES = 20
"""Tries for each draw, to find neurons that were not drawn yet."""


@typed
def random_edit_control(
    model: Model,
    prompt: PromptLike,
    edits: Recipe | AnyEdit | str | Iterable[AnyEdit | str],
    target: Token | None = None,
    contrast: Token | None = None,
    statistic: Statistic | None = None,
    position: int | None = None,
    draws: int = RANDOM_DRAWS,
    seed: int = 0,
    on_progress: OnProgress = unwatched,
) -> RandomControl:
    """Compare the effect of edits on a logit with the effect of the same edits of random other neurons.

    Parameters
    ----------
    model, prompt, edits
        The edits are those that `steer` would make in this model after this prompt.
    target, contrast
        The logit of `target`, less that of `contrast`, where the next token is predicted; default the most probable
        token without edits.
    statistic
        As of `steer`.
    position
        The token whose output is read, as of `attribute`.
    draws
        The number of random draws, each of as many neurons of the same layers and sites; heads are drawn from all
        layers.
    seed
        The seed of the draws.
    on_progress
        Called with (done, total) draws.

    Returns
    -------
    RandomControl
        The number without edits, with them, and for each draw, with a permutation p-value.

    Raises
    ------
    InputError
        For a token, a neuron or a unit that cannot be used.
    RecipeError
        For a recipe of another model.

    References
    ----------
    The p-value: Phipson & Smyth 2010.
    """
    if isinstance(edits, Recipe):
        edits.check(model)
    draws, seed = check_int(draws, "The number of draws"), seed_of(seed)
    wanted = [edit.in_raw_units(statistic) for edit in parse_edits(edits, model.name)]
    named = (likelier_form(model, prompt, token, position) for token in (target, contrast))
    ids = [None if token is None else model.answer_id(token, after=prompt) for token in named]
    rows = [[], wanted, *random_edits(model, wanted, draws, seed)]
    of_draws = lambda done, total: on_progress(max(0, done - 2), total - 2)  # noqa: E731
    scores = logits_under(model, objective_of(model, [prompt], position=position), rows, of_draws)
    wanted_id = int(scores[0].argmax()) if ids[0] is None else ids[0]
    numbers = scores[:, wanted_id] - (0.0 if ids[1] is None else scores[:, ids[1]])
    before, after, *drawn = numbers.tolist()
    names = [None if id is None else model.token_scores(scores[0], [id])[0] for id in (wanted_id, ids[1])]
    count = plural(len(wanted), "edit")
    return RandomControl(
        f"{count} ({', '.join(map(str, wanted[:4]))}{', ...' * (len(wanted) > 4)})",
        random_edits_text(wanted),
        objective_text(*names),
        before,
        after,
        tuple(drawn),
    )


@torch.no_grad()
@reading_sources_once()
def logits_under(
    model: Model, objective: Objective, edits: Sequence[Sequence[AnyEdit]], on_progress: OnProgress = unwatched
) -> Tensor:
    """Return the logits (N, V) of a prompt under each of N lists of edits, which are rows of batches.

    on_progress: called with (done, total) rows.
    """
    size, parts = max(1, PASS_TOKENS // objective.batch.spans[1].stop), []
    for start in range(0, len(edits), size):
        on_progress(start, len(edits))
        part = edits[start : start + size]
        with ExitStack() as edited:
            edited.enter_context(model.lock)
            for row, row_edits in enumerate(part):
                edited.enter_context(steer(model, row_edits, rows=[row]))
            logits = model.logits(objective.rows([0] * len(part)).batch, list(objective.positions[0][:1]))
        parts.append(logits[:, 0].float())
    return torch.cat(parts)


def random_edits_text(edits: Sequence[AnyEdit]) -> str:
    """Say what `random_edits` draws."""
    if any(isinstance(edit, VectorEdit) for edit in edits):
        return "random vectors of the same length"
    if all(edit.neuron.site == "head" for edit in edits if isinstance(edit, Edit)):
        return "the same edits of random other heads"
    return "the same edits of random other neurons of the same layers"


def random_edits(model: Model, edits: Sequence[EditT], draws: int, seed: int = 0) -> list[list[EditT]]:
    """Return `draws` different draws of the same edits of other neurons of the same layers and sites, or of other heads
    of any layer, because a layer has few; fewer draws, or none, if there are not enough. A vector is drawn anew, of the
    same length."""
    generator = random.Random(seed)
    choices: dict[frozenset[EditT], list[EditT]] = {}
    for _ in range(TRIES * draws):
        drawn = _elsewhere(model, edits, generator)
        if not drawn or len(choices) == draws:
            break
        choices.setdefault(frozenset(drawn), drawn)
    return list(choices.values())


def _elsewhere(model: Model, edits: Sequence[AnyEdit], generator: random.Random) -> list[Any]:
    """Return the same edits of random other neurons, and vectors of random directions; none if there are not enough
    neurons."""
    neurons = dict.fromkeys(model.check(edit.neuron) for edit in edits if isinstance(edit, Edit))
    taken = {(neuron.layer, neuron.site, neuron.index) for neuron in neurons}
    moved: dict[Neuron, Neuron] = {}  # a neuron with several edits moves as a whole
    for neuron in neurons:
        site, layers = neuron.site, model.layers_with("attn") if neuron.site == "head" else [neuron.layer]
        free = [(layer, site, index) for layer in layers for index in range(model.width(site))]
        free = [at for at in free if at not in taken]
        if not free:
            return []
        moved[neuron] = Neuron(*generator.choice(free))
        taken.add((moved[neuron].layer, site, moved[neuron].index))
    return [
        replace(edit, neuron=moved[edit.neuron]) if isinstance(edit, Edit) else _random_vector(edit, generator)
        for edit in edits
    ]


def _random_vector(edit: VectorEdit, generator: random.Random) -> VectorEdit:
    """Return the edit with a vector of the same length in a random direction."""
    drawn = [generator.gauss() for _ in edit.vector]
    scale = math.hypot(*edit.vector) / math.hypot(*drawn)
    return replace(edit, vector=tuple(scale * number for number in drawn))

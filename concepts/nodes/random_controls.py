"""The number of random draws of stages, edits, effects, removed tokens and claims; random controls of two of these: of
effects and of removed tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from math import comb

import torch

from icebear.concepts.methods.common import explained_numbers, measure_without
from icebear.concepts.results.effects import Effects, NodeEffects
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.records import Neuron, RandomControl, Ranked, TokenScore

RANDOM_DRAWS = 20
"""The random draws of a control: enough for p < 0.05."""


def effects_on_answer(effects: Effects, relevance: Relevance) -> list[float | None]:
    """Return what each node does to the explained answer: in logits, to the target minus the contrast, or without one
    relative to the other likely tokens; of a phrase, in nats."""
    if effects.phrase is not None:
        return effects.phrase.tolist()  # type: ignore[no-any-return]
    if relevance.target is None:
        return [None] * len(effects.nodes)
    values = effects.matrix[:, effects.token_ids.index(relevance.target.id)]
    if relevance.contrast is not None:
        values = values - effects.matrix[:, effects.token_ids.index(relevance.contrast.id)]
    return values.tolist()  # type: ignore[no-any-return]


def random_effects(patched: NodeEffects, rows: Sequence[Ranked]) -> Effects | None:
    """Return what `RANDOM_DRAWS` random nodes, each of the layer and token of a ranked one, do to the next token; None
    if all of them are ranked."""
    generator, taken = random.Random(0), {(row.neuron, row.position) for row in rows}
    drawn: list[Ranked] = []
    for draw in range(RANDOM_DRAWS):
        row = rows[draw % len(rows)]
        width = patched.model.width(row.neuron.site)
        others = [
            Neuron(row.neuron.layer, row.neuron.site, index) for index in generator.sample(range(width), min(width, 9))
        ]
        free = [neuron for neuron in others if (neuron, row.position) not in taken]
        drawn += [Ranked(neuron, row.position, None, 0.0) for neuron in free[:1]]
    return patched.measure(drawn) if drawn else None


def objective_text(target: TokenScore | None, contrast: TokenScore | None) -> str:
    """Return the explained number in words."""
    if target is None:
        return "The sum of the answer's logits"
    return f"The logit of {target.text!r}" + (f" minus that of {contrast.text!r}" if contrast else "")


def token_removal_control(model: Model, relevance: Relevance, k: int = 2) -> RandomControl | None:
    """Remove the k tokens that contribute most to the answer, or k random others, and measure the explained number.

    A removed token has an embedding of zero. Sinks and tokens of a chat's template stay. If there are few other
    choices, all are measured; if all tokens stay, there is no control. Raises `InputError`.
    """
    model.check_made(relevance.made_with["model"], "The relevance")
    excluded = {*relevance.prompt.sinks, *relevance.prompt.template}
    free = [position for position in range(len(relevance.tokens)) if position not in excluded]
    order = sorted(free, key=lambda position: -relevance.tokens[position].item())
    removed, others = order[:k], sorted(order[k:])
    if not removed:
        return None
    if relevance.target is None or relevance.image:
        raise InputError("Tokens can be removed only from a text, with one target token; explain one token of a text.")
    contrast = relevance.contrast and relevance.contrast.id
    kind, position = relevance.prediction.objective, relevance.predicted_at if model.task.takes_position else None
    objective = objective_of(model, [relevance.read], relevance.target.id, contrast, position=position, kind=kind)
    choices: list[Sequence[int]] = [(), removed, *_drawn(others, len(removed))]
    masks = torch.zeros(len(choices), len(relevance.tokens), dtype=torch.bool)
    for mask, positions in zip(masks, choices, strict=True):
        mask[list(positions)] = True
    before, after, *drawn = measure_without(model, objective, 0, masks, explained_numbers).float().tolist()
    names = ", ".join(repr(relevance.prompt.strings[position]) for position in sorted(removed))
    number = objective_text(relevance.target, relevance.contrast)
    number += " against all others" if relevance.prediction.objective == "log-odds" else ""
    return RandomControl(f"{names} removed", "as many other tokens", number, before, after, tuple(drawn))


def _drawn(positions: Sequence[int], k: int) -> list[Sequence[int]]:
    """Return at most `RANDOM_DRAWS` choices of k positions."""
    if comb(len(positions), k) <= RANDOM_DRAWS:
        return list(combinations(positions, k))
    generator = random.Random(0)
    return [generator.sample(positions, k) for _ in range(RANDOM_DRAWS)]

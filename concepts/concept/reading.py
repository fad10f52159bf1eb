"""What neurons do over whole texts: means, the last token, and the furthest that they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.models.model import Model
from icebear.concepts.passes.sites import hooks
from icebear.errors import InputError
from icebear.records import Neuron

BATCH = 16
LONGEST = 256
"""Tokens of a text that are read."""


@dataclass(frozen=True, eq=False)
class Read:
    """Of S texts and N neurons."""

    neurons: tuple[Neuron, ...]
    means: np.ndarray
    """(S, N) over the tokens that count: all but the first, which is a sink, and special ones."""
    last: np.ndarray
    """(S, N) at the last of them."""
    low: np.ndarray
    """(N,) the least over all of them."""
    high: np.ndarray


def neurons_of(model: Model, sites: Sequence[str]) -> tuple[Neuron, ...]:
    """All neurons of some sites, by site and layer."""
    places = [(site, layer) for site in sites for layer in model.layers_with(site)]
    return tuple(Neuron(layer, site, index) for site, layer in places for index in range(model.width(site)))


def read(
    model: Model,
    texts: Sequence[str],
    neurons: Sequence[Neuron],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Read:
    """One forward pass over each text. Raises `InputError` for a text in which no token counts."""
    rows = [model.token_ids(text, min(LONGEST, model.context_length)) for text in texts]
    counted = [counts(model, ids) for ids in rows]
    for text, places in zip(texts, counted, strict=True):
        if not places:
            raise InputError(f"{text[:40]!r} has no token after its first one to be measured at; give whole sentences.")
    columns = columns_of(neurons)
    for own in columns.values():  # of a site and layer the last one speaks for all
        model.check(max((neurons[c] for c in own), key=lambda neuron: neuron.index))
    chosen = {place: torch.tensor([neurons[c].index for c in own]) for place, own in columns.items()}
    means, last = (np.zeros((len(texts), len(neurons)), dtype=np.float32) for _ in range(2))
    low, high = np.full(len(neurons), np.inf), np.full(len(neurons), -np.inf)

    def visit(part: list[int], site: str, layer: int, x: Tensor) -> None:
        here = columns[site, layer]
        values = x.detach()[..., chosen[site, layer].to(x.device)].float().cpu().numpy()  # (B, T, n)
        for row, number in enumerate(part):
            inside = values[row, counted[number]]
            means[number, here], last[number, here] = inside.mean(0), inside[-1]
            low[here] = np.minimum(low[here], inside.min(0))
            high[here] = np.maximum(high[here], inside.max(0))

    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    with model.lock, torch.no_grad():
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            with hooks(model, columns, partial(visit, part)):
                model.final_stream(model.read([rows[number] for number in part]))
            on_progress(start + len(part), len(order))
    return Read(tuple(neurons), means, last, low, high)


def columns_of(neurons: Sequence[Neuron]) -> dict[tuple[str, int], list[int]]:
    """(site, layer) -> where its neurons are among these."""
    found: dict[tuple[str, int], list[int]] = {}
    for column, neuron in enumerate(neurons):
        found.setdefault((neuron.site, neuron.layer), []).append(column)
    return found


def counts(model: Model, ids: Sequence[int]) -> list[int]:
    """The places of the tokens at which neurons are looked at."""
    special = model.special_ids()
    return [place for place, token in enumerate(ids) if place and token not in special]

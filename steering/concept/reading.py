"""Read the activations of neurons, and the residual stream, over whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.passes.sites import by_site_layer, hooks, stream_hooks
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Neuron
from icebear.steps import OnProgress, unwatched

Reading = Callable[[list[int]], AbstractContextManager[None]]
"""Makes the hooks of a pass over the rows with these numbers."""
SeeRows = Callable[[int, np.ndarray, np.ndarray], None]

TEXTS_PER_PASS = 16
TEXT_TOKENS = 256
"""Longer texts are truncated after this many tokens."""


@dataclass(frozen=True, eq=False)
class Read:
    """Activations of N neurons in S texts, and the residual stream, over the tokens that count (see `counts`)."""

    neurons: tuple[Neuron, ...]
    means: np.ndarray
    """(S, N)"""
    low: np.ndarray
    """(N,) the smallest of all texts."""
    high: np.ndarray
    stream: np.ndarray
    """(S, L, D) means of the residual stream after each layer."""


def neurons_of(model: Model, sites: Sequence[str]) -> tuple[Neuron, ...]:
    """Return all neurons of these sites, by site and layer."""
    layers = [(site, layer) for site in sites for layer in model.layers_with(site)]
    return tuple(Neuron(layer, site, index) for site, layer in layers for index in range(model.width(site)))


def read(
    model: Model,
    texts: Sequence[str],
    neurons: Sequence[Neuron],
    on_progress: OnProgress = unwatched,
) -> Read:
    """Run one forward pass over each text. Raises `InputError` for a text in which no token counts."""
    rows = [model.token_ids(text, min(TEXT_TOKENS, model.context_length)) for text in texts]
    counted = [require_counted_positions(model, ids) for ids in rows]
    means = np.zeros((len(texts), len(neurons)), dtype=np.float32)
    low, high = np.full(len(neurons), np.inf), np.full(len(neurons), -np.inf)
    streams: list[list[np.ndarray]] = [[] for _ in rows]

    def see(row: int, columns: np.ndarray, values: np.ndarray) -> None:
        means[row, columns] = values.mean(0)
        low[columns] = np.minimum(low[columns], values.min(0))
        high[columns] = np.maximum(high[columns], values.max(0))

    def see_stream(part: list[int], layer: int, x: Tensor) -> None:
        values = x.float().cpu().numpy()
        for row, number in enumerate(part):
            streams[number].append(values[row, counted[number]].mean(0))

    @contextmanager
    def reading(part: list[int]) -> Iterator[None]:
        layers = range(model.layers)
        with seeing(model, rows, neurons, see)(part), stream_hooks(model, layers, partial(see_stream, part)):
            yield

    run(model, rows, reading, on_progress)
    return Read(tuple(neurons), means, low, high, np.array(streams))


def see_each(model: Model, rows: Sequence[list[int]], neurons: Sequence[Neuron], see: SeeRows) -> None:
    """Call `see(row, columns, values (T, n))` for each row of token ids and each layer's part of the neurons, with the
    activations at the tokens that count."""
    if neurons:
        run(model, rows, seeing(model, rows, neurons, see))


def seeing(model: Model, rows: Sequence[list[int]], neurons: Sequence[Neuron], see: SeeRows) -> Reading:
    """Return the hooks of `see_each`, for `run`."""
    columns = {layer: np.array(numbers) for layer, numbers in by_site_layer(neurons).items()}
    indices = {layer: torch.tensor([neurons[number].index for number in columns[layer]]) for layer in columns}
    counted = [require_counted_positions(model, ids) for ids in rows]

    def visit(part: list[int], site: str, layer: int, x: Tensor) -> None:
        layer_columns = columns[site, layer]
        values = x[..., indices[site, layer].to(x.device)].float().cpu().numpy()  # (B, T, n)
        for row, number in enumerate(part):
            see(number, layer_columns, values[row, counted[number]])

    return lambda part: hooks(model, columns, partial(visit, part))


@torch.no_grad()
def run(model: Model, rows: Sequence[list[int]], reading: Reading, on_progress: OnProgress = unwatched) -> None:
    """Run one forward pass over each row of token ids, in batches, each inside `reading(numbers of its rows)`."""
    done = 0
    for part in model.batches_by_length(rows, TEXTS_PER_PASS):
        with model.lock, reading(part):
            model.final_stream(model.read([rows[number] for number in part]))
        done += len(part)
        on_progress(done, len(rows))


def counted_positions(model: Model, ids: Sequence[int]) -> list[int]:
    """Return all positions but the first, which is a sink, and those of special tokens."""
    special = model.special_ids()
    return [position for position, token in enumerate(ids) if position and token not in special]


def require_counted_positions(model: Model, ids: Sequence[int]) -> list[int]:
    """Return the positions that count. Raises `InputError` where there are none."""
    positions = counted_positions(model, ids)
    if not positions:
        text = "".join(model.pieces(ids))
        raise InputError(
            f"The text {text[:40]!r} has only a first token, and concepts are read at later tokens; give whole "
            "sentences."
        )
    return positions

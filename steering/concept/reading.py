"""Read the activations of neurons, and the residual stream, over whole texts; add a vector to the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from icebear.concepts.passes.sites import by_site_layer, hooks
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Neuron
from icebear.steps import OnProgress, unwatched

BATCH = 16
LONGEST = 256
"""Longer texts are truncated after this many tokens."""


@dataclass(frozen=True, eq=False)
class Read:
    """Activations of N neurons in S texts, over the tokens that count (see `counts`)."""

    neurons: tuple[Neuron, ...]
    means: np.ndarray
    """(S, N)"""
    low: np.ndarray
    """(N,) the smallest of all texts."""
    high: np.ndarray


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
    rows = [model.token_ids(text, min(LONGEST, model.context_length)) for text in texts]
    means = np.zeros((len(texts), len(neurons)), dtype=np.float32)
    low, high = np.full(len(neurons), np.inf), np.full(len(neurons), -np.inf)

    def see(row: int, columns: np.ndarray, values: np.ndarray) -> None:
        means[row, columns] = values.mean(0)
        low[columns] = np.minimum(low[columns], values.min(0))
        high[columns] = np.maximum(high[columns], values.max(0))

    see_each(model, rows, neurons, see, on_progress)
    return Read(tuple(neurons), means, low, high)


@torch.no_grad()
def see_each(
    model: Model,
    rows: Sequence[list[int]],
    neurons: Sequence[Neuron],
    see: Callable[[int, np.ndarray, np.ndarray], None],
    on_progress: OnProgress = unwatched,
) -> None:
    """Call `see(row, columns, values (T, n))` for each row of token ids and each layer's part of the neurons, with the
    activations at the tokens that count."""
    if not neurons:
        return
    columns = {layer: np.array(numbers) for layer, numbers in by_site_layer(neurons).items()}
    indices = {layer: torch.tensor([neurons[number].index for number in columns[layer]]) for layer in columns}
    counted = [counts(model, ids) for ids in rows]

    def visit(part: list[int], site: str, layer: int, x: Tensor) -> None:
        layer_columns = columns[site, layer]
        values = x[..., indices[site, layer].to(x.device)].float().cpu().numpy()  # (B, T, n)
        for row, number in enumerate(part):
            see(number, layer_columns, values[row, counted[number]])

    done = 0
    with model.lock:
        for part in batches(model, rows):
            with hooks(model, columns, partial(visit, part)):
                model.final_stream(model.read([rows[number] for number in part]))
            done += len(part)
            on_progress(done, len(rows))


def batches(model: Model, rows: Sequence[list[int]]) -> list[list[int]]:
    """Return the numbers of the rows in batches, the shortest rows first."""
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    parts = model.batches([len(rows[number]) for number in order], BATCH)
    return [[order[index] for index in part] for part in parts]


def counts(model: Model, ids: Sequence[int]) -> list[int]:
    """Return the positions that count: all but the first, which is a sink, and special tokens. Raises `InputError`
    where there are none."""
    special = model.special_ids()
    positions = [position for position, token in enumerate(ids) if position and token not in special]
    if not positions:
        text = "".join(model.pieces(ids))
        raise InputError(
            f"The text {text[:40]!r} has only a first token, and concepts are read at later tokens; give whole "
            "sentences."
        )
    return positions


@torch.no_grad()
def stream_means(model: Model, texts: Sequence[str]) -> np.ndarray:
    """(S, L, D) means of the residual stream after each layer, over the tokens that count."""
    rows = [model.token_ids(text, min(LONGEST, model.context_length)) for text in texts]
    means: dict[int, np.ndarray] = {}
    seen: list[np.ndarray] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).float().cpu().numpy())

    with model.lock, ExitStack() as undo:
        for module in model.layer_modules:
            undo.callback(module.register_forward_hook(keep).remove)
        for part in batches(model, rows):
            seen.clear()
            model.final_stream(model.read([rows[number] for number in part]))
            for row, number in enumerate(part):
                positions = counts(model, rows[number])
                means[number] = np.stack([x[row, positions].mean(0) for x in seen])
    return np.stack([means[number] for number in range(len(rows))])


def vector_added(model: Model, layer: int, vector: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Make a context in which `vector` (D,) is added to the residual stream after a layer, at every token."""

    def push(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + vector.to(output[0]), *output[1:])
        return output + vector.to(output)

    @contextmanager
    def hooked() -> Iterator[None]:
        hook = model.layer_modules[layer].register_forward_hook(push)
        try:
            yield
        finally:
            hook.remove()

    return lambda: model.lock.yielding(hooked)

"""The activations of neurons at each token of a sample, in one forward pass for all neurons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from icebear.actmax.labels.sample import Sample
from icebear.concepts.methods.attention import eager
from icebear.concepts.models.model import Model
from icebear.concepts.passes.run import first_layers
from icebear.concepts.passes.sites import hooks
from icebear.records import Neuron

BATCH = 32


def read_activations(
    model: Model,
    sample: Sample,
    neurons: Sequence[Neuron],
    on_progress: Callable[[int], None] = lambda sentences: None,
) -> np.ndarray:
    """Return the activations (P, N) of P neurons at the tokens of a sample.

    For heads, return the attention that each token gets, averaged over the later tokens of its sentence. Layers above
    the neurons are not computed.
    """
    for neuron in neurons:
        model.check(neuron)
    activations = np.zeros((len(neurons), len(sample)), dtype=np.float32)
    order = sorted(range(len(sample.ids)), key=lambda number: len(sample.ids[number]))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(torch.no_grad())
        if model.task.stacks == 1:
            stack.enter_context(first_layers(model, 1 + max(neuron.layer for neuron in neurons)))
        heads = neurons[0].site == "head"
        if heads:
            stack.enter_context(eager(model))
        for part in batches:
            (_attended if heads else _fired)(model, sample, neurons, part, activations)
            on_progress(len(part))
    return activations


def _fired(model: Model, sample: Sample, neurons: Sequence[Neuron], part: list[int], activations: np.ndarray) -> None:
    by_place: dict[tuple[str, int], list[int]] = {}
    for row, neuron in enumerate(neurons):
        by_place.setdefault((neuron.site, neuron.layer), []).append(row)

    def visit(site: str, layer: int, x: Tensor) -> None:
        rows = by_place[site, layer]
        values = x[..., [neurons[row].index for row in rows]].float().cpu().numpy()  # (B, T, P of the place)
        for row, number in enumerate(part):
            span = slice(sample.starts[number], sample.ends[number])
            activations[rows, span] = values[row, : span.stop - span.start].T

    with hooks(model, by_place, visit):
        model.final_stream(model.read([sample.ids[number] for number in part]))


def _attended(model: Model, sample: Sample, heads: Sequence[Neuron], part: list[int], activations: np.ndarray) -> None:
    maps = model.task.forward(
        model, model.read([sample.ids[number] for number in part]), output_attentions=True
    ).attentions
    for row, number in enumerate(part):
        span = slice(sample.starts[number], sample.ends[number])
        count = span.stop - span.start
        later = torch.arange(count - 1, -1, -1).clamp(min=1)
        for place, head in enumerate(heads):
            weights = maps[head.layer][row, head.index, :count, :count].float().cpu()
            activations[place, span] = ((weights.tril(-1).sum(0)) / later).numpy()

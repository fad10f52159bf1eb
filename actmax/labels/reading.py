"""What neurons do at each token of a sample: one forward pass for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from actmax.labels.sample import Sample
from concepts.models.model import Model
from concepts.passes.sites import visiting
from concepts.passes.targets import first_layers
from icebear.records import Neuron

BATCH = 32


def read(
    model: Model,
    sample: Sample,
    neurons: Sequence[Neuron],
    on_progress: Callable[[int], None] = lambda sentences: None,
) -> np.ndarray:
    """(P, N) activations of P neurons at the sample's tokens. No layer above them is passed."""
    for neuron in neurons:
        model.check(neuron)
    by_place: dict[tuple[str, int], list[int]] = {}
    for row, neuron in enumerate(neurons):
        by_place.setdefault((neuron.site, neuron.layer), []).append(row)
    columns = {place: [neurons[row].index for row in rows] for place, rows in by_place.items()}
    found = np.zeros((len(neurons), len(sample)), dtype=np.float32)
    order = sorted(range(len(sample.ids)), key=lambda number: len(sample.ids[number]))
    with ExitStack() as stack:
        stack.enter_context(model.lock)
        stack.enter_context(torch.no_grad())
        if model.task.stacks == 1:
            stack.enter_context(first_layers(model, 1 + max(neuron.layer for neuron in neurons)))
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]

            def visit(site: str, layer: int, x: Tensor, part: list[int] = part) -> None:
                values = x[..., columns[site, layer]].float().cpu().numpy()  # (B, T, P of the place)
                for row, number in enumerate(part):
                    span = slice(sample.starts[number], sample.ends[number])
                    found[by_place[site, layer], span] = values[row, : span.stop - span.start].T

            with visiting(model, by_place, visit):
                model.final_stream(model.read([sample.ids[number] for number in part]))
            on_progress(len(part))
    return found

"""The activations of neurons at the tokens of one prompt, and the most active neurons."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from icebear.concepts.passes.sites import hooks
from icebear.models.model import Model
from icebear.records import Neuron


class Active(NamedTuple):
    """A neuron with its activation at each of T tokens, times a sign."""

    neuron: Neuron
    sign: int
    values: list[float]
    score: float
    """What neurons are ranked by: the largest value, or the sum at chosen tokens."""

    @property
    def argmax(self) -> int:
        return max(range(len(self.values)), key=self.values.__getitem__)


@torch.no_grad()
def prompt_activations(model: Model, ids: Sequence[int], site: str, layer: int) -> Tensor:
    """Return the activations (T, N) of the neurons of a site and layer. Raises `InputError` if the model lacks them."""
    model.check(Neuron(layer, site, 0))
    rows: list[Tensor] = []
    with model.lock, hooks(model, [(site, layer)], lambda site, layer, x: rows.append(x[0].float())):
        model.final_stream(model.read_ids([list(ids)]))
    return rows[0]


@torch.no_grad()
def most_active(
    model: Model,
    ids: Sequence[int],
    sides: Sequence[tuple[str, int, int]],
    k: int,
    at: Sequence[int] = (),
    ignored: Collection[int] = (),
) -> list[Active]:
    """Return the k most active neurons of these sites, layers and signs, ranked by the largest value at a token, or by
    the sum at the tokens `at`. Values at the tokens `ignored` are 0."""
    best: list[Active] = []
    signs: dict[tuple[str, int], list[int]] = {}
    for site, layer, sign in dict.fromkeys(sides):
        signs.setdefault((site, layer), []).append(sign)

    def visit(site: str, layer: int, x: Tensor) -> None:
        nonlocal best
        activations = x[0].float().T.clone()  # (N, T); the model goes on with x
        activations[:, list(ignored)] = 0
        for sign in signs[site, layer]:
            values = sign * activations
            scores = values[:, list(at)].sum(1) if at else values.amax(1)
            top = scores.topk(min(k, len(scores)))
            rows = zip(top.indices.tolist(), values[top.indices].tolist(), top.values.tolist(), strict=True)
            best += [Active(Neuron(layer, site, index), sign, row, score) for index, row, score in rows]
        best = sorted(best, key=lambda row: (-row.score, row.neuron))[:k]

    with model.lock, hooks(model, signs, visit):
        model.final_stream(model.read_ids([list(ids)]))
    return best


def most_active_by_token(
    model: Model, ids: Sequence[int], site: str, layer: int, sign: int, k: int
) -> list[list[tuple[int, float]]]:
    """Return for each token the k neurons of a site and layer with the largest values: index and value."""
    values = sign * prompt_activations(model, ids, site, layer)
    top = values.topk(min(k, values.shape[1]))
    return [list(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)]

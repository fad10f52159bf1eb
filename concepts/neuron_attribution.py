"""`attribute_neurons`: relevance of the tokens for a neuron's own activation, many neurons in one backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from concepts.attribution import embedding_leaf, new_ledger
from concepts.lrp.context import relevance_rules
from concepts.lrp.method import ATTNLRP, AttnLRP
from concepts.models import tasks
from concepts.models.model import Model, Prompt
from concepts.passes.taps import visiting
from concepts.relevance import Conservation
from icebear.records import Neuron


@dataclass(frozen=True, eq=False)
class NeuronRelevance:
    """Why a neuron fired at a token: signed relevance of the tokens (T,), and where the rest of it went."""

    tokens: Tensor
    conserved: Conservation
    """Its target is the activation."""


def attribute_neurons(
    model: Model,
    prompts: Sequence[Prompt],
    neurons: Sequence[Neuron],
    positions: Sequence[int],
    method: AttnLRP = ATTNLRP,
) -> list[NeuronRelevance]:
    """For each row: the relevance of the prompt's tokens for the activation of its neuron at its position.

    The decoder of an encoder-decoder has written what the encoder reads, as in an index (`Model.read`).

    Rows of a batch do not see each other, so one backward pass from the sum of all activations explains each.
    Source: AttnLRP (Achtibat et al. 2024), started at a latent neuron instead of a logit.
    """
    for neuron in neurons:
        model.check(neuron)
    encoded = model.encode(prompts)
    rows = [ids[:length] for ids, length in zip(encoded.ids.tolist(), encoded.lengths, strict=True)]
    if model.task == "causal":  # what comes after the neuron, in text and in layers, has no part in it
        rows = [ids[: at + 1] for ids, at in zip(rows, positions, strict=True)]
    batch = model.read(rows)
    ledger = new_ledger(model, len(prompts))
    seen: dict[tuple[str, int], Tensor] = {}

    def visit(site: str, layer: int, x: Tensor) -> None:
        seen[site, layer] = x

    places = {(neuron.site, neuron.layer) for neuron in neurons}
    with (
        model.lock,
        torch.enable_grad(),
        _first_layers(model, 1 + max(neuron.layer for neuron in neurons)) if len(model.stacks) == 1 else nullcontext(),
        relevance_rules(model.net, method, ledger=ledger),
        embedding_leaf(model) as leaves,
        visiting(model, places, visit),
    ):
        tasks.logits(model, batch, [0])
        activations = torch.stack(
            [
                seen[neuron.site, neuron.layer][row, position, neuron.index]
                for row, (neuron, position) in enumerate(zip(neurons, positions, strict=True))
            ]
        )
        gradients = torch.autograd.grad(activations.sum(), leaves, allow_unused=True)
    dtype = ledger["softmax"].dtype
    tokens = torch.zeros(encoded.ids.shape, dtype=dtype)  # (B, T)
    for leaf, gradient in zip(leaves, gradients, strict=True):  # encoder and decoder read the same
        if gradient is not None:
            tokens[:, : batch.ids.shape[1]] += (leaf.detach().to(dtype) * gradient.to(dtype)).sum(-1).cpu()
    return [
        NeuronRelevance(
            tokens[row, :length],
            Conservation(
                target=activations[row].item(),
                tokens=tokens[row, :length].sum().item(),
                **{name: entry[row].item() for name, entry in ledger.items()},
            ),
        )
        for row, length in enumerate(encoded.lengths)
    ]


@contextmanager
def _first_layers(model: Model, count: int) -> Iterator[None]:
    """The model with its first `count` layers only."""
    path, _, name = model.family.layers.rpartition(".")
    parent = model.net.get_submodule(path)
    whole = getattr(parent, name)
    setattr(parent, name, nn.ModuleList(model.layer_modules[:count]))
    try:
        yield
    finally:
        setattr(parent, name, whole)

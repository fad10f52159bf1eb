"""The heads that move the difference of two images to [CLS], and the patches that each reads."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.nodes.random_controls import RANDOM_DRAWS, effects_on_answer
from icebear.concepts.passes.sites import eager, hooks, neuron_columns
from icebear.concepts.results.effects import NodeEffects
from icebear.concepts.results.result import Relevance
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.text.images import own_names
from icebear.records import Neuron, Ranked

HEADS = 3
"""The number of heads that are read."""
CLS = "[CLS]"


@dataclass(frozen=True)
class ImageHead:
    """A head at [CLS], and what it reads."""

    head: Neuron
    relevance: float
    """Its share of the difference, by difference rules."""
    effect: float
    """By how much the explained number falls when only this head has its value of the other image, at [CLS]."""
    reads: tuple[float, ...]
    """(T,) what each token gives of the relevance; the sum is the relevance."""


@dataclass(frozen=True)
class ImageHeads:
    """The heads with the largest relevance at [CLS], beside random ones."""

    heads: tuple[ImageHead, ...]
    strings: tuple[str, ...]
    """(T,) the names of the tokens."""
    sinks: tuple[int, ...]
    """Tokens with huge residual streams, and the model's own tokens, of which none is a patch that shows something."""
    random_effects: tuple[float, ...]
    """The effects of random other heads."""

    @property
    def random_effect(self) -> float:
        """The largest effect of a random head, of either sign."""
        return max(map(abs, self.random_effects), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: each head with what it reads by the names of the tokens."""
        rows = [
            {
                "neuron": str(head.head),
                "relevance": head.relevance,
                "effect": head.effect,
                "reads": dict(zip(self.strings, head.reads, strict=True)),
                "of_sinks": self.of_sinks(head),
            }
            for head in self.heads
        ]
        return {"heads": rows, "random_effects": list(self.random_effects)}

    def patches(self, head: ImageHead) -> list[str]:
        """Return the names of the three patches that give most, sinks left out."""
        left_out = {0, *self.sinks}
        order = sorted(set(range(len(head.reads))) - left_out, key=lambda token: -head.reads[token])
        return [self.strings[token] for token in order[:3] if head.reads[token] > 0]

    def of_sinks(self, head: ImageHead) -> float:
        """Return what [CLS] itself and the sinks give."""
        return sum(head.reads[token] for token in {0, *self.sinks})


def image_heads(model: Model, relevance: Relevance) -> ImageHeads | None:
    """Read the heads of [CLS] with the largest relevance for the difference to one other image.

    What a head writes at [CLS] is a sum over the tokens that it attends to. The relevance of each is its part of the
    change of that sum, times the multipliers of the head.
    None for other explanations, for models without [CLS], and for prompts with an image.
    """
    compared = relevance.counterfactual
    if relevance.image is None or compared is None or len(compared.pairs) != 1 or relevance.target is None:
        return None
    if (
        model.task.reads_text
        or own_names(model)[:1] != (CLS,)
        or "attn" not in relevance.sites
        or 0 not in relevance.neurons.recorded
    ):
        return None
    rows = relevance.top(HEADS, "head", position=0)
    every = [Neuron(layer, "head", index) for layer in model.layers_with("attn") for index in range(model.heads)]
    others = [head for head in every if head not in {row.neuron for row in rows}]
    drawn = random.Random(0).sample(others, min(RANDOM_DRAWS, len(others)))
    measured = [*rows, *(Ranked(head, 0, None, 0.0) for head in drawn)]
    effects = [
        effect or 0.0 for effect in effects_on_answer(NodeEffects(model, relevance).measure(measured), relevance)
    ]
    read = _read(model, relevance, compared.pairs[0].batch, [row.neuron for row in rows])
    heads = (
        ImageHead(row.neuron, row.relevance, effect, tuple(shares.tolist()))
        for row, effect, shares in zip(rows, effects, read, strict=False)
    )
    prompt = relevance.prompt
    return ImageHeads(tuple(heads), prompt.strings, prompt.sinks, tuple(effects[len(rows) :]))


@torch.no_grad()
def _read(model: Model, relevance: Relevance, batch: Batch, heads: list[Neuron]) -> list[Tensor]:
    """Return (T,) for each head what each token gives of its relevance."""
    values: dict[int, Tensor] = {}
    layers = sorted({head.layer for head in heads})
    keep = lambda site, layer, x: values.update({layer: x.detach()})  # noqa: E731
    with model.lock, eager(model), hooks(model, [("v", layer) for layer in layers], keep):
        maps = model.task.forward(model, batch, output_attentions=True).attentions
    column, reads = relevance.neurons.columns("attn", [0])[0], []
    for head in heads:
        width = neuron_columns(head, model.head_dim)
        scores = relevance.neurons
        parts = (scores.relevance, scores.activation, scores.counterfactual)
        total, image, other = (part["attn"][head.layer, column, width].double().cpu() for part in parts)
        change = image - other
        multiplier = torch.where(change == 0, 0, total / torch.where(change == 0, 1, change))
        attention = maps[head.layer][:, head.index, 0].double().cpu()  # (2, T)
        written = attention[..., None] * values[head.layer][..., width].double().cpu()  # (2, T, d)
        reads.append((written[0] - written[1]) @ multiplier)
    return reads

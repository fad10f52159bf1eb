"""The laws of models of images and text: what must hold of the relevance of prompts with an image, measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.deviation import deviation
from icebear.concepts.passes.inputs import input_hooks
from icebear.concepts.passes.prompt import image_positions
from icebear.concepts.results.result import Relevance
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.models.prompt_image import PromptImage
from icebear.models.text.prompt_images import with_image
from icebear.models.text.prompts import Prompt

METHODS = ("cp-lrp", "attnlrp")
ROUNDING = 1000
"""Rounding errors by which a row of a batch may differ from another one."""


def image_laws(model: Model, prompts: Sequence[Prompt]) -> dict[str, float]:
    """Measure each law, as the largest deviation from it.

    ``sums``: the part of the explained number that the relevance of CP-LRP and AttnLRP does not account for, as a share
    of the sizes of all relevance. ``differences``: the same for difference rules, compared with the blurred image and
    with another prompt about the same image. ``gradient``: gradient x input and torch's. ``batch``: two prompts with
    their images together, and each alone.
    ``blocks``: tokens of the image whose pixels change the vector of another token, or not their own, where attention
    in the vision tower is shut off.

    prompts: two prompts with images of the same size. Raises what `attribute` raises.
    """
    read = [with_image(model, prompt) for prompt in prompts]
    return {
        "sums": max(_unaccounted(model, read[0])),
        "differences": max(_unaccounted_differences(model, read[0])),
        "gradient": _from_gradient(model, read[0]),
        "batch": _from_alone(model, read),
        "blocks": float(len(misplaced(model, read[0]))),
    }


def _unaccounted(model: Model, prompt: Prompt) -> Iterator[float]:
    for method in METHODS:
        yield _remainder(attribute(model, prompt, method=method, number="logit", sites=()))


def _unaccounted_differences(model: Model, prompt: Prompt) -> Iterator[float]:
    ids = list(prompt.ids or ())
    other = replace(prompt, ids=(*ids[:-1], (ids[-1] + 1) % model.config.vocab_size))
    best = [token.id for token in model.predict(prompt, 2)]
    yield _remainder(attribute(model, prompt, *best, counterfactual_image="blur", sites=()))
    yield _remainder(attribute(model, prompt, *best, counterfactual=other, sites=()))


def _remainder(result: Relevance) -> float:
    """Return what is left of the explained number, as a share of the sizes of all relevance."""
    sums = result.conservation()
    return abs(sums.remainder) / max(abs(sums.target), result.tokens.abs().sum().item(), 1e-30)


def _from_gradient(model: Model, prompt: Prompt) -> float:
    """Compare gradient x input with the gradient that torch gives of a plain pass, summed by our blocks."""
    result = attribute(model, prompt, method="gxi", number="logit", sites=())
    objective, leaves = result.explained(), {}

    def leaf(stack: int, x: Tensor) -> Tensor:
        leaves[stack] = x.detach().requires_grad_()
        return leaves[stack].clone()

    with model.lock, torch.enable_grad(), input_hooks(model, leaf):
        _, number = objective.evaluate(model.logits(objective.batch, objective.all_positions))
        gradients = torch.autograd.grad(number.sum(), list(leaves.values()))
    embeddings, pixels = (
        (leaves[stack] * gradient).detach() for stack, gradient in sorted(zip(leaves, gradients, strict=True))
    )
    expected = embeddings[0].sum(-1)
    expected[list(result.prompt.image_positions)] += prompt.image.token_sums(pixels)
    return deviation(result.tokens, expected)


def _from_alone(model: Model, prompts: Sequence[Prompt]) -> float:
    """Compare two prompts in one pass with each alone."""
    options: dict[str, Any] = {"method": "cp-lrp", "number": "logit", "sites": ()}
    alone = [attribute(model, prompt, **options) for prompt in prompts]
    targets = [row.target.id if row.target else None for row in alone]
    together = attribute(model, list(prompts), targets, **options)
    return max(deviation(batched.tokens, row.tokens) for batched, row in zip(together, alone, strict=True))


def misplaced(model: Model, prompt: Prompt) -> list[int]:
    """Return the numbers of the image's tokens that do not hang on the pixels of their block alone."""
    image: PromptImage = prompt.image
    batch = objective_of(model, [prompt]).batch
    positions = image_positions(model, batch, 0)
    changed = [
        replace(image, inputs={**image.inputs, "pixel_values": image.values + block}) for block in pixel_blocks(image)
    ]
    before, *after = _text_inputs(model, replace(batch.rows([0] * (1 + len(changed))), images=(image, *changed)))
    least = ROUNDING * torch.finfo(before.dtype).eps * before.abs().max()
    moved = [set((row - before).abs().amax(-1).gt(least).nonzero().flatten().tolist()) for row in after]
    return [number for number, position in enumerate(positions) if moved[number] != {position}]


def pixel_blocks(image: PromptImage) -> list[Tensor]:
    """Return for each token of the image 1 at the pixels that it was made of, in the shape of the model's input."""
    pixels = torch.zeros_like(image.values).requires_grad_()
    with torch.enable_grad():
        sums = image.token_sums(pixels)
        return [torch.autograd.grad(x, pixels, retain_graph=True)[0] for x in sums]


@torch.no_grad()
def _text_inputs(model: Model, batch: Batch) -> Tensor:
    """Return what the first layer of the text model reads (B, T, D), with no attention between patches."""
    seen: list[Tensor] = []
    with model.lock, without_vision_attention(model), ExitStack() as undo:
        see = lambda module, args: seen.append(args[0])  # noqa: E731
        undo.callback(model.layer_modules[0].register_forward_pre_hook(see).remove)
        model.logits(batch, [0])
    return seen[0]


@contextmanager
def without_vision_attention(model: Model) -> Iterator[None]:
    """Let attention in the vision tower write nothing, so that each patch stays by itself."""

    def silent(module: Any, args: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)

    of_text = {id(part) for layer in model.layer_modules for part in layer.modules()}
    with ExitStack() as undo:
        for module in model.net.modules():
            if type(module).__name__.endswith("Attention") and id(module) not in of_text:
                undo.callback(module.register_forward_hook(silent).remove)
        yield

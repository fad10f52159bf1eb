"""Maps of vision transformers that only our tables compare, from their papers: attention rollout and LeGrad."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from icebear.concepts.passes.sites import eager
from icebear.models.model import Model
from icebear.models.text.images import grid, own_names


def rollout(model: Model, pixels: Tensor) -> Tensor:
    """Return the map (rows, columns) of attention rollout (Abnar & Zuidema 2020): the row of [CLS] in the product over
    layers of (mean attention of heads + identity) / 2."""
    with model.lock, torch.no_grad(), eager(model):
        maps = model.net(pixels[None].to(model.device, model.dtype), output_attentions=True).attentions
    joint = torch.eye(maps[0].shape[-1], device=model.device)
    for attention in maps:
        mean = attention[0].float().mean(0)
        joint = (mean + torch.eye(len(mean), device=model.device)) / 2 @ joint
    return _on_patches(model, pixels, joint[0])


def legrad(model: Model, pixels: Tensor) -> Tensor:
    """Return the map (rows, columns) of LeGrad (Bousselham et al. 2024), of a model with one label.

    The label is read at each layer: the final norm and the head are applied to the tokens after it. Its gradient at
    the attention of that layer, where positive, is averaged over heads and queries, and then over layers.
    """
    layers: list[Tensor] = []
    streams: list[Tensor] = []
    with model.lock, torch.enable_grad(), eager(model), ExitStack() as undo:
        for layer in model.layer_modules:
            undo.callback(layer.register_forward_hook(lambda module, args, output: streams.append(output)).remove)
        leaf = pixels[None].to(model.device, model.dtype).requires_grad_()
        attentions = model.net(leaf, output_attentions=True).attentions
        for attention, tokens in zip(attentions, streams, strict=True):
            normed = model.net.base_model.layernorm(tokens)
            label = model.net.classifier(torch.cat((normed[:, 0], normed[:, 1:].mean(1)), -1)).sum()
            (gradient,) = torch.autograd.grad(label, attention, retain_graph=True)
            layers.append(gradient[0].float().clamp(min=0).mean((0, 1)))
    return _on_patches(model, pixels, torch.stack(layers).mean(0))


def _on_patches(model: Model, pixels: Tensor, scores: Tensor) -> Tensor:
    """Return the scores (T,) of the patches as (rows, columns)."""
    return scores[len(own_names(model)) :].detach().cpu().unflatten(0, grid(model, pixels))

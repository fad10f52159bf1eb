"""The mean Jacobian lens: how the output of the final norm follows what a neuron writes, mean over calibration texts.

J is the mean of d norm(h, t) / d o(t) over one token t of each of 48 texts, where o is the output of the module that
writes (W_out of the FFN, the attention output projection). W_out row -> J -> unembedding are the lens's logits.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from icebear.cache import cache_folder
from icebear.concepts.cached import Damaged, made_by, read_tensors, save_tensors
from icebear.concepts.passes.prefix import Prefix
from icebear.concepts.passes.sites import hooks, is_hooked
from icebear.concepts.vocabulary import calibration
from icebear.concepts.vocabulary.weight_rows import direct_row, gives_answers, unembed, w_out_rows
from icebear.errors import InputError, ModelError
from icebear.models.model import Model
from icebear.records import WRITERS, Neuron, Reliability
from icebear.steps import OnProgress, unwatched

LENS_TEXTS = 48
"""The number of texts in which the Jacobians are averaged."""
RELIABILITY_SAMPLES = 20
"""The number of other texts, and of random neurons of each layer, that the reliability is measured with."""
BLOCK = 32
"""Rows of the Jacobians that are saved at a time."""
BEST = 5
WIDEST = 2048
"""Without a GPU, `icebear index --lens` does not build the lens of wider models."""
REBUILD = "is damaged, or of an older icebear; build it again with: icebear index --lens"

SiteLayer = tuple[str, int]
"""A site that writes, and a layer."""


@dataclass(frozen=True, eq=False)
class MeanLens:
    """The mean Jacobians of a model, in a file of the cache."""

    file: Path
    reliability: tuple[Reliability | None, ...]
    """By layer: how well the lens predicts the measured effects of its FFN neurons; None where there are no logits."""
    direct: tuple[Reliability | None, ...]
    """The same of the direct projection."""
    made_with: dict[str, Any]
    """The model and the versions of the software."""

    def jacobian(self, site: str, layer: int) -> Tensor:
        """Return J (D, D), in float32: from an output of the site's writing module to the final norm's output.

        Raises `ModelError` if the file is damaged.
        """
        name = f"{site}.{layer}"
        try:
            return read_tensors(self.file, name)[0][name]
        except (Damaged, FileNotFoundError):
            raise ModelError(f"The lens {self.file} {REBUILD}") from None

    def rows(self, model: Model, neurons: Sequence[Neuron]) -> Tensor:
        """Return J @ w_out (N, D) of neurons."""
        return torch.stack([self.jacobian(n.site, n.layer).to(model.device) @ w_out_row(model, n) for n in neurons])

    def is_better(self, layer: int) -> bool:
        """Return whether the lens predicts the effects of a layer's neurons better than the direct projection."""
        mean, direct = self.reliability[layer], self.direct[layer]
        return mean is not None and (direct is None or mean.correlation > direct.correlation)


def mean_lens(model: Model) -> MeanLens | None:
    """Return the lens of a model if `build_mean_lens` has built it; None inside `steer`."""
    if is_hooked(model):
        return None
    file, names = _file(model), ("reliability", "direct")
    try:
        measured, made_with = read_tensors(file, *names)
    except FileNotFoundError:
        return None
    except Damaged:
        logging.getLogger("icebear").warning("The lens %s %s", file, REBUILD)
        return None
    mean, direct = (
        tuple(None if torch.isnan(row).any() else Reliability(*row.tolist()) for row in measured[name])
        for name in names
    )
    return MeanLens(file, mean, direct, made_with)


def build_mean_lens(model: Model, on_progress: OnProgress = unwatched) -> MeanLens:
    """Build the lens of a model, by one backward pass for each dimension of the residual stream, and save it.

    An interrupted build continues where it stopped. on_progress: called with the steps done and all steps.
    """
    if is_hooked(model):
        raise InputError("The averaged Jacobian lens is of the model without edits; build the lens outside of steer.")
    file, width, total = _file(model), model.config.hidden_size, model.config.hidden_size + model.layers
    folder = file.with_suffix("")
    parts = [folder / f"{start:06}.safetensors" for start in range(0, width, BLOCK)]
    missing = [number for number, part in enumerate(parts) if not _is_whole(part)]
    if missing:
        rows = _jacobian_rows(model, [range(n * BLOCK, min((n + 1) * BLOCK, width)) for n in missing], on_progress)
        for number, block in zip(missing, rows, strict=True):
            save_tensors(parts[number], block, made_by(model))
    blocks = [read_tensors(part)[0] for part in parts]
    tensors = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
    del blocks
    measured = torch.full((2, model.layers, 3), torch.nan)
    for layer in range(model.layers):
        on_progress(width + layer, total)
        if gives_answers(model, layer) and layer in model.layers_with("ffn"):
            measured[:, layer] = reliability_of(model, layer, tensors[f"ffn.{layer}"])
    save_tensors(file, {**tensors, "reliability": measured[0], "direct": measured[1]}, made_by(model))
    rmtree(folder, ignore_errors=True)
    on_progress(total, total)
    lens = mean_lens(model)
    assert lens
    return lens


def _is_whole(part: Path) -> bool:
    try:
        read_tensors(part)
    except (Damaged, FileNotFoundError):
        return False
    return True


def mean_rows(model: Model, neurons: Sequence[Neuron]) -> Tensor:
    """Return J @ w_out (N, D) of neurons without the lens, one pass for each: v J is linear in v, and its derivative
    along w_out is J @ w_out."""
    rows = {}
    for stack in {model.stack_of(neuron.layer) for neuron in neurons}:
        stack_neurons = [neuron for neuron in dict.fromkeys(neurons) if model.stack_of(neuron.layer) == stack]
        site_layers = list(dict.fromkeys((neuron.site, neuron.layer) for neuron in stack_neurons))
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the others have no second derivatives
            final, outputs = _graph(model, stack, site_layers)
            v = torch.zeros_like(final, requires_grad=True)  # (B, D)
            gradients = torch.autograd.grad((final * v).sum(), outputs, create_graph=True)
            for neuron in stack_neurons:
                gradient = gradients[site_layers.index((neuron.site, neuron.layer))]
                at = contexts_of(model).index(gradient)
                (products,) = torch.autograd.grad((gradient[at] * w_out_row(model, neuron)).sum(), v, retain_graph=True)
                rows[neuron] = products.float().mean(0)
    return torch.stack([rows[neuron] for neuron in neurons])


OutputChange = Callable[[SiteLayer, Tensor, Any], Tensor]
"""Takes a site and layer, the output of its writing module, and the index of the tokens in it; returns a new output."""


class Contexts:
    """One token of each of some texts, and passes over it; over it alone where cached keys and values are exact."""

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], positions: Sequence[int]) -> None:
        """positions: the token of each text. A causal model does not see the tokens after it: they are left out."""
        self.model, self.positions = model, list(positions)
        cut = [position + 1 if model.task.is_causal else None for position in positions]
        self.texts = [list(ids[:end]) for ids, end in zip(texts, cut, strict=True)]
        self._prefix = Prefix.of(model, [ids[:-1] for ids in self.texts])
        self._last = torch.tensor([[ids[-1]] for ids in self.texts], device=model.device)
        self._at = torch.tensor([0] * len(cut) if self._prefix else self.positions)
        self._rows = torch.arange(len(cut))

    def read(self, stack: int, site_layers: Sequence[SiteLayer], change: OutputChange) -> Tensor:
        """Return the output (B, D) of a stack's final norm at the tokens, with changed outputs of writing modules."""
        model, seen = self.model, []
        with model.lock, ExitStack() as undo:
            if model.family.experts:  # expert by expert: grouped products have no second derivatives
                mixtures = [("ffn", layer) for layer in model.layers_with("ffn")]
                undo.enter_context(hooks(model, mixtures, lambda site, layer, x: None))
            for site, layer in site_layers:
                hook = partial(self._changed, (site, layer), change)
                mixture = model.experts(layer) if site == "ffn" else None
                writer = model.site_module(site, layer) if mixture is None else mixture
                undo.callback(writer.register_forward_hook(hook).remove)
            family, layers = model.stacks[stack]
            final = model.net.get_submodule(family.final_norm) if family.final_norm else layers[-1]
            undo.callback(final.register_forward_hook(lambda module, args, output: seen.append(output)).remove)
            if self._prefix:
                inputs = self._prefix.inputs(self._last, range(len(self.positions)), self.positions)
                model.net.base_model(**inputs, use_cache=True)
            else:
                model.final_stream(model.read(self.texts))
        output = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
        return output[self._rows, self._at]

    def _changed(self, site_layer: SiteLayer, change: OutputChange, module: Any, args: Any, output: Tensor) -> Tensor:
        return change(site_layer, output, self.index(output))

    def index(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return where the tokens are in an output (B, T, D), or in the (B * T, D) of some FFNs and experts."""
        if output.dim() == 3:
            return self._rows, self._at
        return (self._rows * (len(output) // len(self._rows)) + self._at,)


_CONTEXTS: WeakKeyDictionary[Model, Contexts] = WeakKeyDictionary()


def contexts_of(model: Model, others: bool = False) -> Contexts:
    """Return the contexts of the lens, or others that its reliability is measured in: seeded texts of the calibration,
    each read up to a seeded token that is not special. The first are kept, because cards read them again."""
    if not others and model in _CONTEXTS and not is_hooked(model):
        return _CONTEXTS[model]
    if not model.task.reads_text:
        raise InputError(f"{model.name} reads images; the averaged Jacobian lens needs a model that reads text.")
    generator, special = random.Random(0), model.special_ids()
    texts, positions = [], []
    for ids in generator.sample(rows := calibration.token_rows(model), len(rows)):
        inner = [position for position in range(1, len(ids)) if ids[position] not in special]
        if inner:
            texts.append(ids)
            positions.append(generator.choice(inner))
    lens_texts = min(LENS_TEXTS, max(1, len(texts) * 2 // 3))
    chosen = slice(lens_texts, lens_texts + RELIABILITY_SAMPLES) if others else slice(lens_texts)
    contexts = Contexts(model, texts[chosen], positions[chosen])
    if not others and not is_hooked(model):
        _CONTEXTS[model] = contexts
    return contexts


def _jacobian_rows(model: Model, blocks: Sequence[range], on_progress: OnProgress) -> Iterator[dict[str, Tensor]]:
    """Yield blocks of rows (R, D) of the Jacobians, by site and layer, from one graph over the tokens."""
    contexts, graphs = contexts_of(model), []
    site_layers = [(site, layer) for site in WRITERS if site in model.sites for layer in model.layers_with(site)]
    for stack in range(model.task.stacks):
        in_stack = [site_layer for site_layer in site_layers if model.stack_of(site_layer[1]) == stack]
        graphs.append((in_stack, *_graph(model, stack, in_stack)))
    for block in blocks:
        rows: dict[str, list[Tensor]] = {f"{site}.{layer}": [] for site, layer in site_layers}
        for number in block:
            on_progress(number, model.config.hidden_size + model.layers)
            for in_stack, final, outputs in graphs:
                gradients = torch.autograd.grad(final[:, number].sum(), outputs, retain_graph=True)
                for (site, layer), gradient in zip(in_stack, gradients, strict=True):
                    rows[f"{site}.{layer}"].append(gradient[contexts.index(gradient)].float().mean(0).cpu())
        yield {name: torch.stack(blocks_of_rows) for name, blocks_of_rows in rows.items()}


def _graph(model: Model, stack: int, site_layers: Sequence[SiteLayer]) -> tuple[Tensor, list[Tensor]]:
    """Return the final norm's output (B, D) in the contexts, and the outputs that it depends on, of writing modules."""
    outputs = {}

    def leaf(site_layer: SiteLayer, output: Tensor, at: Any) -> Tensor:
        outputs[site_layer] = output if output.requires_grad else output.detach().requires_grad_()
        return outputs[site_layer].clone()  # some models change it in place

    with torch.enable_grad():
        final = contexts_of(model).read(stack, site_layers, leaf)
    return final, [outputs[site_layer] for site_layer in site_layers]


def reliability_of(model: Model, layer: int, jacobian: Tensor) -> Tensor:
    """Return the reliability (2, 3) of the lens and of the direct projection, see `Reliability`."""
    contexts, measured = contexts_of(model, others=True), []
    for (mean, direct), effects in predicted_and_measured(model, contexts, layer, jacobian):
        others = (effects.sum(0) - effects) / max(1, len(effects) - 1)
        ceiling = correlation(others, effects)
        measured.append([(correlation(row, effects), ratio(row, effects), ceiling) for row in (mean, direct)])
    return torch.tensor(measured).median(0).values


def predicted_and_measured(
    model: Model, contexts: Contexts, layer: int, jacobian: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for seeded FFN neurons of a layer, the change of logits by one unit that the lens and the direct
    projection predict (2, V), and the measured one in each text (T, V). All are centered over the vocabulary."""
    generator = torch.Generator().manual_seed(layer)
    indices = torch.randperm(model.width("ffn"), generator=generator)[:RELIABILITY_SAMPLES].tolist()
    plain = _logits_with(model, contexts, layer, torch.zeros(len(jacobian)))
    for neuron in (Neuron(layer, "ffn", index) for index in indices):
        w_out = w_out_row(model, neuron)
        rows = torch.stack((jacobian.to(model.device) @ w_out, direct_row(model, neuron)))
        yield _centered(unembed(model, rows)), _centered(_logits_with(model, contexts, layer, w_out) - plain)


@torch.no_grad()
def _logits_with(model: Model, contexts: Contexts, layer: int, w_out: Tensor) -> Tensor:
    """Return the logits (T, V), before a cap, where an FFN writes a vector more at the tokens."""

    def add(site_layer: SiteLayer, output: Tensor, at: Any) -> Tensor:
        output = output.clone()
        output[at] += w_out.to(output)
        return output

    return unembed(model, contexts.read(model.stack_of(layer), [("ffn", layer)], add).float())


def _centered(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def correlation(prediction: Tensor, effects: Tensor) -> float:
    """Return the correlation over the vocabulary, mean over texts."""
    return torch.cosine_similarity(prediction, effects, dim=-1).mean().item()


def ratio(prediction: Tensor, effects: Tensor) -> float:
    """Return the effect on the words predicted to rise most, divided by that on those that do, mean over texts."""
    best = effects[:, prediction.topk(BEST).indices].mean(1)
    return (best / effects.topk(BEST).values.mean(1)).mean().item()


def w_out_row(model: Model, neuron: Neuron) -> Tensor:
    """Return the W_out row (D,) of a neuron. Raises `InputError` if it does not write to the residual stream."""
    rows = w_out_rows(model, neuron.site, neuron.layer, slice(neuron.index, neuron.index + 1))
    if rows is None:
        raise InputError(f"{neuron} does not write to the residual stream; choose neurons of site ffn or attn.")
    return rows[0].to(model.device)


def _file(model: Model) -> Path:
    return cache_folder() / "lens" / f"{calibration.file_stem(model)}.safetensors"

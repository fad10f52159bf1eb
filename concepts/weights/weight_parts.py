"""Which rows and columns of a model's weights belong to which neuron, head or token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from icebear.models.model import Model
from icebear.models.parts import experts
from icebear.models.parts.linear import Linear

WeightKind = str
"""``gate``, ``w_in`` and ``w_out``: FFN neurons (the gate only where there are two maps); ``q`` and ``o``: heads; ``k``
and ``v``: key-value heads, which a group of heads reads; ``cross``; ``router``; ``embedding`` and ``unembedding``:
tokens; ``norm``, ``bias`` and ``other``: whole parameters."""
NEURONS = {"gate": "ffn", "w_in": "ffn", "w_out": "ffn", "q": "head", "o": "head", "router": "router"}
"""The site of the unit of a kind, where it is a neuron or a head."""


@dataclass(frozen=True)
class Part:
    """Slices of a weight that belong to units."""

    layer: int | None
    kind: WeightKind
    module: str
    """The path of the module; rows of its weight and of its bias are one unit."""
    count: int = 1
    axis: int | None = None
    """None: the whole weight is one unit."""
    units: Tensor | None = None
    """The unit of each slice along the axis; -1 for none."""

    def sums(self, along: Callable[[int], Tensor]) -> Tensor:
        """Sum slices for each unit, (count,). along: returns a value for each slice along an axis."""
        if self.axis is None or self.units is None:
            return _wide(along(0)).sum()[None].cpu()
        slices = _wide(along(self.axis)).cpu()
        inside = self.units >= 0
        return torch.zeros(self.count, dtype=slices.dtype).index_add_(0, self.units[inside], slices[inside])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class WeightParts:
    """The parts of each weight of a model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        paths = {id(module): path for path, module in model.net.named_modules()}
        self.layers = {f"{paths[id(module)]}.": layer for layer, module in enumerate(model.layer_modules)}
        self._known: dict[str, list[Part]] = {}
        self.linears: dict[str, list[tuple[int | None, WeightKind, bool, int, Tensor]]] = {}
        """By module: layer, kind, whether units are inputs, their number, and the unit of each input or output."""
        if model.has_family:
            for layer in range(model.layers):
                for site, kind in (("attn", "o"), ("cross", "cross"), ("q", "q"), ("k", "k"), ("v", "v")):
                    self._attention(layer, site, kind, paths)
                self._ffn(layer, paths)
        head = model.net.get_output_embeddings() if hasattr(model.net, "get_output_embeddings") else None
        if head is not None and Linear.reads(head):
            self._add(head, paths, None, "unembedding", False, torch.arange(Linear(head).shape[0]))

    def of(self, name: str) -> list[Part]:
        """Return the parts of a weight. name: as in `named_parameters`, or ``name[e]`` for expert e."""
        if name not in self._known:
            self._known[name] = self._parts(name)
        return self._known[name]

    def _parts(self, name: str) -> list[Part]:
        path, _, last = name.rpartition(".")
        layer = next((layer for prefix, layer in self.layers.items() if name.startswith(prefix)), None)
        if expert := re.fullmatch(r"(.*)\[(\d+)\]", last):
            return list(self._expert(layer, path, expert[1], int(expert[2])))
        module = self.model.net.get_submodule(path)
        if path in self.linears:
            return [part for entry in self.linears[path] for part in self._of_linear(entry, path, module, last)]
        is_bias = last == "bias" and not _is_norm(module)
        kind = "norm" if _is_norm(module) else "bias" if is_bias else "other"
        if layer is not None and self._routes(layer, path, getattr(module, "weight", None)):
            count = module.weight.shape[0]  # type: ignore[union-attr,operator]
            return [Part(layer, "router", path, count, 0, torch.arange(count))]
        return [Part(layer, kind, path if last in ("weight", "bias") else name)]

    def _of_linear(self, entry: Any, path: str, module: nn.Module, last: str) -> Iterator[Part]:
        layer, kind, is_input, count, units = entry
        if last == "bias":
            yield Part(layer, "bias", f"{path}.bias") if is_input else Part(layer, kind, path, count, 0, units)
        else:
            yield Part(layer, kind, path, count, int(is_input) ^ int(isinstance(module, Conv1D)), units)

    def _add(
        self,
        module: nn.Module,
        paths: dict[int, str],
        layer: int | None,
        kind: WeightKind,
        is_input: bool,
        units: Tensor,
    ) -> None:
        entry = layer, kind, is_input, int(units.max()) + 1, units
        self.linears.setdefault(paths[id(module)], []).append(entry)

    def _attention(self, layer: int, site: str, kind: WeightKind, paths: dict[int, str]) -> None:
        model = self.model
        if site not in model.sites or layer not in model.layers_with(site):
            return
        module, is_input = model.site_module(site, layer), site in ("attn", "cross")
        total, dim = Linear(module).shape[is_input], model.head_dim
        columns = model.columns(site)
        units = torch.arange(total) // dim
        if columns is not None:
            units = torch.full((total,), -1).index_copy_(0, columns, torch.arange(len(columns)) // dim)
        self._add(module, paths, layer, kind, is_input, units)

    def _ffn(self, layer: int, paths: dict[int, str]) -> None:
        """Find the maps into the FFN: of the same parent as the first one, and as wide as the layer's neurons."""
        family, modules = self.model.family_at(layer), dict(self.model.layer_modules[layer].named_modules())
        last = modules.get(family.ffn_out) if family.ffn_out else None
        if last is None or not Linear.reads(last):
            return
        width = Linear(last).shape[1]
        self._add(last, paths, layer, "w_out", True, torch.arange(width))
        first_name = next(name for name in family.ffn_in.split() if name in modules)
        parent = first_name.rpartition(".")[0]
        others = [
            module
            for name, module in modules.items()
            if name.rpartition(".")[0] == parent and name not in (first_name, family.ffn_out) and Linear.reads(module)
        ]
        second = next((module for module in others if parent and Linear(module).shape[0] == width), None)
        if Linear(modules[first_name]).shape[0] == 2 * width:
            for kind, shift in (("gate", 0), ("w_in", width)):
                units = torch.full((2 * width,), -1)
                units[shift : shift + width] = torch.arange(width)
                self._add(modules[first_name], paths, layer, kind, False, units)
            return
        self._add(modules[first_name], paths, layer, "gate" if second else "w_in", False, torch.arange(width))
        if second is not None:
            self._add(second, paths, layer, "w_in", False, torch.arange(width))

    def _expert(self, layer: int | None, path: str, name: str, expert: int) -> Iterator[Part]:
        mixture: Any = self.model.net.get_submodule(path)
        stem = name.removesuffix("_bias")
        if layer is None or stem not in ("gate_up_proj", "down_proj") or not hasattr(mixture, "is_transposed"):
            yield Part(layer, "other", f"{path}.{name}[{expert}]")
            return
        each, count, is_bias = experts.width(mixture), experts.neuron_count(mixture), stem != name
        expert_units, module = torch.arange(each) + expert * each, f"{path}.{stem}"
        if stem == "down_proj":
            bias = Part(layer, "bias", f"{path}.{name}[{expert}]")
            yield bias if is_bias else Part(layer, "w_out", module, count, 1 - int(mixture.is_transposed), expert_units)
            return
        axis = 0 if is_bias else int(mixture.is_transposed)
        total = getattr(mixture, name)[expert].shape[axis]
        if total == each:
            yield Part(layer, "w_in", module, count, axis, expert_units)
            return
        for kind, shift in (("gate", 0), ("w_in", 1)):
            units = torch.full((total,), -1)
            chosen = slice(shift * each, (shift + 1) * each) if mixture.is_concatenated else slice(shift, None, 2)
            units[chosen] = expert_units
            yield Part(layer, kind, module, count, axis, units)

    def _routes(self, layer: int, path: str, weight: Any) -> bool:
        """Return whether a weight has a row for each expert of its layer."""
        mixture = self.model.experts(layer) if self.model.has_family else None
        beside = mixture is not None and path.count(".") > 1 and isinstance(weight, Tensor) and weight.dim() == 2
        return beside and weight.shape[0] == experts.count(mixture)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()

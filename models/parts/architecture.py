"""Where the parts of a transformers model are: its layers, sites and matrices, by its family."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from icebear.errors import InputError, ModelError
from icebear.models.lock import FairLock, as_written
from icebear.models.modules import modules_of, parameters_of
from icebear.models.parts import experts
from icebear.models.parts.families import FAMILIES, SCANS, Family, family_of
from icebear.models.parts.linear import Linear, fingerprint, offloaded
from icebear.models.parts.vision import Vision, vision_of
from icebear.models.tasks import ModelTask, task_of
from icebear.records import SITES, WRITERS, Neuron, as_neuron
from icebear.values import shown

POSITION_TABLE = re.compile(r"(^|\.)(wpe|(embed_)?pos(ition)?s?(_emb(ed(ding)?s?)?)?)$")
"""The names that transformers gives to tables of learned positions."""


def _positions(table: nn.Embedding) -> int:
    """Return for how many positions a table has rows; those before the first one are of padding."""
    padding = table.padding_idx
    offset: Any = getattr(table, "offset", 0 if padding is None else padding + 1)
    return table.weight.shape[0] - int(offset)


def first_of(layer: nn.Module, names: str) -> nn.Module | None:
    """Return the first of the named parts that a layer has, None if it has none."""
    for name in names.split():
        try:
            return layer.get_submodule(name)
        except AttributeError:
            continue
    return None


def attention_maps(net: Any, inputs: bool) -> list[nn.Module]:
    """Return the projections to queries, keys and values (inputs), or those of attention's outputs, of self-attention
    and cross-attention; none for an unknown family."""
    family = family_of(net)
    maps: list[nn.Module | None] = []
    for part in filter(None, (family, family and family.decoder)):
        home, projections = part.cross.rpartition(".")[0], (part.q, part.k, part.v)
        names = [*projections, part.qkv] if inputs else [part.attn_out, part.cross]
        if inputs and home:
            names += [f"{home}.{name.rpartition('.')[2]}" for name in projections]
        layers = net.get_submodule(part.layers).children()
        maps += [first_of(layer, name) for layer in layers for name in names]
    return [module for module in maps if module is not None]


class Architecture:
    """A transformers model and where its neurons are."""

    weights_note = "weights as saved"
    """How the weights are stored, in words."""
    task: ModelTask
    """The kind of input and output."""
    without_label: Architecture | None = None
    """Of a model that is asked by examples: the model that was given."""

    def __init__(self, net: Any, name: str = "") -> None:
        net = getattr(net, "_orig_mod", net)  # of torch.compile(net)
        if any(type(module).__module__.startswith("peft.") for module in net.modules()):
            raise ModelError(
                "The model has an adapter that is not merged; merge it first (net = net.merge_and_unload())."
            )
        self.net = net.eval().requires_grad_(False)
        for module in self.net.modules():  # bitsandbytes would repack 4-bit weights, with rounded scales, on some CPUs
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        if self.net.dtype == torch.float64 and any(hasattr(module, "is_transposed") for module in self.net.modules()):
            self.net.set_experts_implementation("eager")  # torch has no grouped products of experts in float64
        self.lock = FairLock(partial(as_written, self.net))
        self._fingerprint: tuple[Any, str] = (None, "")
        self.proofs: dict[Hashable, Any] = {}
        """Kinds of passes -> what `icebear.concepts.passes.proved` knows of them."""
        self.name = name or net.config._name_or_path or type(net).__name__
        self.task = task_of(type(self.net).__name__, self.net.config.is_encoder_decoder)
        if self.task.reads_text and getattr(self.config, "vocab_size", None) is None:
            raise ModelError(f"icebear cannot explain a {type(self.net).__name__}, which has no vocabulary of tokens.")
        if not self.task.reads_text and not self.has_family:
            known = ", ".join(kind for kind, family in FAMILIES.items() if family.own_tokens is not None)
            raise ModelError(
                f"icebear cannot explain a {type(self.net).__name__}; it explains image classifiers of the model types "
                f"{known}."
            )

    @property
    def device(self) -> torch.device:
        """The device of the inputs; layers of a dispatched model may be on other devices."""
        device = next(self.net.parameters()).device
        if device.type != "meta":
            return device
        hooks = (getattr(module, "_hf_hook", None) for module in self.net.modules())
        devices = (getattr(hook, "execution_device", None) for hook in hooks)
        return torch.device(next(device for device in devices if device is not None))

    @cached_property
    def offloaded(self) -> bool:
        """Whether weights are loaded only when they are used (see `icebear.models.parts.linear`)."""
        return offloaded(self.net)

    @property
    def dtype(self) -> torch.dtype:
        return self.net.dtype

    @property
    def sums_in(self) -> dict[str, Any]:
        """The device, and the type of sums: float32, or float64 for a float64 model."""
        return {"dtype": torch.promote_types(self.dtype, torch.float32), "device": self.device}

    @property
    def dtype_name(self) -> str:
        """The dtype as text, such as ``float32``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def config(self) -> Any:
        """The configuration of the text model, also for a model that reads images as well; that of the vision tower for
        an image classifier."""
        if not self.task.reads_text:
            return getattr(self.net.config, "vision_config", self.net.config)
        return self.net.config.get_text_config()

    @cached_property
    def family(self) -> Family:
        family = family_of(self.net)
        if family is None:
            raise ModelError(
                f"icebear does not know where {self.net.config.model_type!r} models have their neurons, so it can "
                f"compute only the relevance of tokens (sites=()). Known families are {', '.join(FAMILIES)}; "
                "docs/new-family.md shows how to add another one."
            )
        return family

    @cached_property
    def vision(self) -> Vision | None:
        """How the model reads images with text; None if it does not. Raises `ModelError` for a kind of such models that
        icebear does not know."""
        return vision_of(self.net) if self.task.reads_text else None

    @property
    def fingerprint(self) -> str:
        """Identifies the model, see `icebear.models.parts.linear.fingerprint`.

        It is computed again when weights were replaced, or changed in place; not when they were changed through
        ``.data``, which torch does not count.
        """
        if self._fingerprint[0] != self._state():
            with self.lock:  # because another thread may run the first layers only
                state = self._state()
                if self._fingerprint[0] != state:
                    kind = f"{self.net.config.model_type} {self.output_size}"
                    self._fingerprint = state, fingerprint(self.net, kind)
        return self._fingerprint[1]

    @property
    def index_fingerprint(self) -> str:
        """The fingerprint that an index of this model has: of a model that is asked by examples, that of the model
        without the label, whose neurons are the same."""
        return (self.without_label or self).fingerprint

    def _state(self) -> list[tuple[int, int, int]]:
        """Return what changes with the weights: the address and the version of each."""
        return [(id(x), x.data_ptr(), 0 if x.is_inference() else x._version) for x in parameters_of(self.net)]

    def check_made(self, saved: Mapping[str, Any], what: str = "The result") -> None:
        """Raise `InputError` if something was made with another model. saved: its name and fingerprint."""
        if saved["fingerprint"] != self.fingerprint:
            raise InputError(
                f"{what} was made with {saved['name']} ({saved['fingerprint']}), not with {self.name} "
                f"({self.fingerprint}); load the model that it was made with."
            )

    @cached_property
    def context_length(self) -> int:
        longest: int = getattr(self.config, "max_position_embeddings", None) or 0
        return min([longest if longest > 0 else 1 << 30, *map(_positions, self._position_tables)])

    @property
    def _position_tables(self) -> list[nn.Embedding]:
        """The tables of learned positions, one row a position, of the text model."""
        config = type(self.config)
        text = next((part for part in self.net.modules() if type(getattr(part, "config", None)) is config), self.net)
        tables = ((path, part) for path, part in text.named_modules() if isinstance(part, nn.Embedding))
        return [table for path, table in tables if POSITION_TABLE.search(path)]

    @property
    def scales_positions_from(self) -> int:
        """The longest row whose positions do not depend on its length: longer ones, and all rows of their batch, are
        rotated by other angles in some models (longrope, dynamic scaling)."""
        scaling = getattr(self.config, "rope_parameters", None) or {}
        kinds = [scaling, *(part for part in scaling.values() if isinstance(part, dict))]
        original = getattr(self.config, "original_max_position_embeddings", None)
        limits = [
            (kind["rope_type"] == "longrope" and (kind.get("original_max_position_embeddings") or original))
            or self.config.max_position_embeddings
            for kind in kinds
            if kind.get("rope_type") in ("longrope", "dynamic")
        ]
        return min(limits, default=self.context_length)

    @property
    def labels(self) -> dict[int, str]:
        """The labels of a classifier; empty for other models."""
        return self.net.config.id2label if self.task.labelled else {}

    @property
    def output_size(self) -> int:
        """The number of tokens in the vocabulary, or of labels; 0 for a model of images without labels."""
        return len(self.labels) if self.labels or not self.task.reads_text else self.config.vocab_size

    @property
    def has_family(self) -> bool:
        """Whether it is known where the neurons are; the relevance of tokens does not need them."""
        return family_of(self.net) is not None

    @cached_property
    def has_scan(self) -> bool:
        """Whether it has scans over tokens, which are explained only with a counterfactual."""
        return any(SCANS.search(type(module).__name__) for module in self.net.modules())

    @cached_property
    def stacks(self) -> list[tuple[Family, list[nn.Module]]]:
        """The layers of the only stack, or of the encoder and the decoder."""
        second = self.family.decoder if self.task.stacks == 2 else None
        families = [self.family, second] if second else [self.family]
        lists = (self.net.get_submodule(family.layers)._modules for family in families)
        return [(family, list(modules.values())) for family, modules in zip(families, lists, strict=True)]

    def stack_of(self, layer: int) -> int:
        """Return 0 for a layer of the encoder or of the only stack, 1 for a layer of the decoder."""
        return int(self.task.stacks == 2 and layer >= len(self.stacks[0][1]))

    def family_at(self, layer: int) -> Family:
        return self.stacks[self.stack_of(layer)][0]

    @cached_property
    def layer_modules(self) -> list[nn.Module]:
        """The layers of all stacks; for an unknown family the longest list of modules, to find sinks and NaNs."""
        if self.has_family:
            return [module for _, modules in self.stacks for module in modules]
        if self.task.stacks == 2:
            return []
        lists = [list(module) for module in self.net.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])

    @property
    def unembedding_in(self) -> nn.Module | None:
        """The linear map between the final norm and the unembedding, if there is one."""
        path = self.family.unembedding_in if self.has_family else ""
        return dict(self.net.named_modules()).get(path) if path else None

    @property
    def embeddings(self) -> list[nn.Module]:
        """The token embeddings of the only stack, or of encoder and decoder."""
        try:
            if self.task.stacks == 2:
                parts = [self.net.get_encoder(), self.net.get_decoder()]
                return list(dict.fromkeys(part.get_input_embeddings() for part in parts))
            input_table = self.net.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            raise ModelError(f"icebear does not find the token embeddings of a {type(self.net).__name__}.") from None
        tables = (module for module in modules_of(self.net) if isinstance(module, nn.Embedding))
        tied = getattr(input_table, "weight", None)
        return [input_table, *(table for table in tables if table is not input_table and table.weight is tied)]

    @property
    def layers(self) -> int:
        return len(self.layer_modules)

    @property
    def heads(self) -> int:
        return getattr(self.config, "num_attention_heads", 1)

    @cached_property
    def head_dim(self) -> int:
        return self.width("attn") // self.heads if "attn" in self.sites else 1

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that this model has."""
        return tuple(self._layers_with)

    @property
    def main_site(self) -> str:
        """The site of the nodes that are explained unless another one is asked for: ``ffn``; in a model of attention
        only, ``head``; in one of scans only, ``mixer``."""
        if not self.has_family or "ffn" in self.sites:
            return "ffn"
        return "head" if "attn" in self.sites else self.sites[0]

    def layers_with(self, site: str) -> Sequence[int]:
        """Return the layers that have a site. Raises `InputError` if the model lacks the site."""
        if not isinstance(site, str) or site not in self.sites:
            raise InputError(f"{shown(site)} is not a site of {self.name}; its sites are {', '.join(self.sites)}.")
        return self._layers_with[site]

    @cached_property
    def _layers_with(self) -> dict[str, list[int]]:
        """Site -> the layers that have it, for the sites that some layers have."""
        having = {site: [layer for layer in range(self.layers) if self._has(site, layer)] for site in SITES}
        return {site: layers for site, layers in having.items() if layers}

    def _has(self, site: str, layer: int) -> bool:
        if self.family.experts and site in ("ffn", "router"):
            mixture = self.experts(layer)
            return mixture is not None and not (site == "router" and experts.routes_inputs(mixture))
        return self._part(site, layer) is not None

    def _part(self, site: str, layer: int) -> nn.Module | None:
        family = self.family_at(layer)
        names = {"ffn": family.ffn_out, "attn": family.attn_out, "cross": family.cross, "shared": family.shared}
        names["mixer"] = family.mixer
        names |= {name: family.qkv or getattr(family, name) for name in "qkv"}
        return first_of(self.layer_modules[layer], names.get(site, ""))

    def site_module(self, site: str, layer: int) -> nn.Module:
        """Return the module whose input (ffn, shared, attn, cross, mixer) or output (q, k, v) is the site."""
        part = self._part(site, layer)
        assert part is not None  # of a layer of `layers_with(site)`
        return part

    @property
    def ffn_width(self) -> int:
        """The number of FFN neurons of a layer, 0 in a model of attention only."""
        return self.width("ffn") if "ffn" in self.sites else 0

    def residual_scale(self, site: str) -> float:
        """Return the multiplier of what a site writes to the residual stream."""
        entry = self.family.residual_scale
        name, _, index = (entry if isinstance(entry, str) else entry.get(site, "")).partition(".")
        value: Any = getattr(self.config, name) if name else 1.0
        return float(value[int(index)] if index else value)

    @property
    def logit_scale(self) -> float:
        name = self.family.logit_scale if self.has_family else ""
        value = getattr(self.config, name.removeprefix("/")) if name else 1.0
        return 1 / value if name.startswith("/") else value

    def norms_after(self, layer: int, site: str = "ffn") -> list[str]:
        """Return the paths of the norms on the direct path from a neuron to the unembedding: the layer's norm after W2
        (sandwich or post-norm), and the final norm."""
        family, stack_start = self.family_at(layer), len(self.stacks[0][1]) if self.stack_of(layer) else 0
        others = {"mixer": family.mixer_norm, "attn": family.attn_norm, "cross": family.attn_norm}
        norm = others.get(site, family.ffn_norm)
        if norm and first_of(self.layer_modules[layer], norm) is None:
            norm = ""
        paths = (f"{family.layers}.{layer - stack_start}.{norm}" if norm else "", family.final_norm)
        return [path for path in paths if path]

    def experts(self, layer: int) -> Any:
        """Return the module of a layer's experts, whose neurons are its site `ffn`; None if it has none, or not in the
        form that transformers 5.23 has them in."""
        part = first_of(self.layer_modules[layer], self.family.experts)
        return part if hasattr(part, "down_proj") else None

    def columns(self, site: str) -> Tensor | None:
        """Return the indices of a site's neurons in the output of a joint q, k, v map; None for other sites."""
        if site not in ("q", "k", "v") or not self.family.qkv:
            return None
        total, dim = Linear(self.site_module(site, self.layers_with(site)[0])).shape[0], self.head_dim
        groups = (total // dim - self.heads) // 2  # key-value heads
        each = self.heads // groups  # query heads of one
        if self.family.qkv_order == "apart":
            sizes = [self.heads * dim, groups * dim, groups * dim]
            return torch.arange(total).split(sizes)["qkv".index(site)]
        indices = torch.arange(total).view(groups, each + 2, dim)
        return {"q": indices[:, :each], "k": indices[:, each], "v": indices[:, each + 1]}[site].flatten()

    def width(self, site: str) -> int:
        """Return the number of neurons of a site in each layer (of heads, for `head`)."""
        if site == "head":
            return self.heads
        layer = self.layers_with(site)[0]
        if site == "ffn" and self.family.experts:
            return experts.neuron_count(self.experts(layer))
        if site == "router":
            return experts.count(self.experts(layer))
        columns = self.columns(site)
        if columns is not None:
            return len(columns)
        linear = Linear(self.site_module(site, layer))
        return linear.shape[1 if site in WRITERS else 0]

    def check(self, neuron: Neuron | str) -> Neuron:
        """Return a neuron (or the neuron of an id) if this model has it. Raises `InputError`."""
        neuron = as_neuron(neuron, self.name)
        layers = self.layers_with("attn" if neuron.site == "head" else neuron.site)
        if neuron.layer not in layers:
            of_site = f" with {neuron.site}" if len(layers) < self.layers else ""
            raise InputError(f"{neuron} is not in {self.name}: its layers{of_site} are {layers[0]} to {layers[-1]}.")
        if neuron.index >= self.width(neuron.site):
            raise InputError(
                f"{neuron} is not in {self.name}: {neuron.site} has the neurons 0 to {self.width(neuron.site) - 1}."
            )
        return neuron

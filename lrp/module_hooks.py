"""The rules at modules, which costs less than at each operation, and is enough for most language models.

They multiply activations at two places of a layer: in attention and in a gated FFN. The uniform rule (AttnLRP Eq. 14,
15) is then a half at the input of each output projection, and one more at queries and keys. Nothing here knows whether
a model has other products: `icebear.concepts.passes.proved` compares with a pass that looks every operation up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from icebear.lrp.context import elementwise_modules, identity_of
from icebear.lrp.operation_table import RelevanceMode, constant_name, is_activation, norm
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.modules import modules_of
from icebear.models.parts.linear import Linear, packed

FACTORS = {"taylor": (0.5, 0.5), "constant": (0.0, 1.0)}
"""Softmax rule -> the factors of the gradients at queries and keys, and at the output of attention."""
HOOKED_SITES = ("q", "k", "attn", "ffn")


class ModuleHooks:
    """Where the rules are in a model of the usual form."""

    def __init__(self, model: Model) -> None:
        """Raises `LookupError` if the model lacks a part of the form."""
        net, layers = model.net, range(model.layers)
        modules = modules_of(net)
        self.methods = [(part, type(part).forward) for part in modules]
        usual = model.has_family and model.task.stacks == 1 and not (model.family.experts or model.has_scan)
        usual = usual and all(
            site in model.sites and len(model.layers_with(site)) == len(layers) for site in HOOKED_SITES
        )
        if not usual or model.offloaded or any(map(packed, modules)):
            raise LookupError("not a language model of the usual form")
        self.q, self.k, self.attention_outputs, self.ffn = (
            [model.site_module(site, layer) for layer in layers] for site in HOOKED_SITES
        )
        self.q_columns, self.k_columns = model.columns("q"), model.columns("k")
        self.elementwise = elementwise_modules(net)
        self.norms = [module for module in modules if isinstance(module, nn.LayerNorm)]
        biased = [part for part in modules if Linear.reads(part) and getattr(part, "bias", None) is not None]
        self.scored = [module for module in dict.fromkeys((*self.q, *self.k)) if module in biased]
        self.biased = [module for module in biased if module not in self.scored]
        self.gated = _gated_outputs(self.ffn, modules)
        table = model.family.position_embedding
        self.tables = [module for path, module in net.named_modules() if table and path == table]
        self.first_layer = model.layer_modules[0]

    def fits(self, net: nn.Module) -> bool:
        """Return whether these are still the modules, with the same methods, and nothing was put into them."""
        modules = modules_of(net)
        inside = (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in modules)
        return [(part, type(part).forward) for part in modules] == self.methods and not any(inside)

    @contextmanager
    def below_recorders(self, mode: RelevanceMode) -> Iterator[None]:
        """Apply all rules but those of queries and keys: recorders, which come after, see what these return."""
        with ExitStack() as undo:
            for module in self.elementwise:
                undo.enter_context(replaced(module, "forward", partial(identity_of, module.forward)))
            for module in self.norms:
                rule = partial(norm, mode, weight=module.weight, bias=module.bias, eps=module.eps, center=True)
                undo.enter_context(replaced(module, "forward", rule))
            for module in self.biased:
                undo.callback(module.register_forward_hook(partial(_biased, mode)).remove)
            for module in self.gated:
                undo.callback(module.register_forward_pre_hook(_halved).remove)
            for module in self.attention_outputs:
                undo.callback(module.register_forward_pre_hook(partial(_attention_output, mode)).remove)
            for module in self.tables:
                added: list[Tensor] = []
                undo.callback(module.register_forward_hook(lambda *call: added.append(call[-1])).remove)  # noqa: B023
                undo.callback(self.first_layer.register_forward_pre_hook(partial(_positioned, mode, added)).remove)
            yield

    @contextmanager
    def above_recorders(self, mode: RelevanceMode) -> Iterator[None]:
        """Apply the rules of queries and keys to what the recorders return."""
        with ExitStack() as undo:
            for modules, hook in (
                (self.q, partial(_scored, mode, self.q_columns, False)),
                (self.k, partial(_scored, mode, self.k_columns, mode.method.softmax == "taylor")),
            ):
                for module in modules:
                    undo.callback(module.register_forward_hook(hook).remove)
            for module in self.scored:  # their biases retain what is left by the halves above
                undo.callback(module.register_forward_hook(partial(_biased, mode)).remove)
            yield


def _gated_outputs(ffn: Sequence[nn.Module], modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the W_out of gated FFNs: the maps beside them have two outputs for each neuron."""
    parents = {child: module for module in modules for child in module.children()}
    maps = {w_out: [part for part in parents[w_out].children() if Linear.reads(part)] for w_out in ffn}
    outputs = lambda w_out: sum(Linear(part).shape[0] for part in maps[w_out] if part is not w_out)  # noqa: E731
    return [w_out for w_out in ffn if outputs(w_out) == 2 * Linear(w_out).shape[1]]


def _biased(mode: RelevanceMode, module: nn.Module, args: Any, y: Tensor) -> None:
    if is_activation(y):
        mode.account_constant(y, Linear(module).bias, "biases")


def _halved(module: nn.Module, args: tuple) -> None:
    if is_activation(args[0]):
        args[0].register_hook(lambda g: g * 0.5)


def _attention_output(mode: RelevanceMode, module: nn.Module, args: tuple) -> None:
    factor = FACTORS[mode.method.softmax][1]
    if factor != 1 and is_activation(args[0]):
        args[0].register_hook(partial(_scaled, mode, factor, factor, args[0].detach()))


def _scored(
    mode: RelevanceMode, columns: Tensor | None, accounted: bool, module: nn.Module, args: Any, y: Tensor
) -> Tensor | None:
    """columns: those of queries or of keys in y, if it has others; accounted: their relevance is retained."""
    factor: Any = FACTORS[mode.method.softmax][0]
    if not is_activation(y):
        return None
    if columns is None:
        if not factor:
            return y.detach()
        y.register_hook(partial(_scaled, mode, factor, -1 if accounted else 0, y.detach() if accounted else None))
        return None
    of_columns = torch.zeros_like(y[0, 0]).index_fill_(0, columns.to(y.device), 1)
    values = y.detach() * of_columns if accounted else None
    y.register_hook(partial(_scaled, mode, 1 - (1 - factor) * of_columns, -1 if accounted else 0, values))
    return None


def _scaled(mode: RelevanceMode, factor: Any, share: float, x: Tensor | None, g: Tensor) -> Tensor:
    """Return the gradient of x times a factor; the softmax retains `share` of the relevance of x."""
    if x is not None and mode.accounting is not None:
        mode.retain("softmax", share, x * g)
    return g * factor


def _positioned(mode: RelevanceMode, added: list[Tensor], module: nn.Module, args: tuple) -> None:
    positions = added.pop()
    mode.account_constant(args[0], positions, constant_name(positions))

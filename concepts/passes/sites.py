"""Hooks on the neurons and the residual stream of a running model, which read and edit them and are removed on exit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from icebear.errors import InputError, ModelError
from icebear.models.lock import replaced
from icebear.models.model import Model
from icebear.models.modules import modules_of
from icebear.models.parts import experts
from icebear.records import WRITERS, Neuron

Hook = Callable[[str, int, Tensor], Tensor | None]
StreamHook = Callable[[int, Tensor], Tensor | None]


@contextmanager
def hooks(model: Model, site_layers: Iterable[tuple[str, int]], hook: Hook) -> Iterator[None]:
    """Call `hook(site, layer, activations (B, T, N))` whenever the model computes one of `site_layers`.

    The return value of the hook, unless it is None, replaces the activations. Raises `ModelError` if a layer runs
    without calling the module of a site.
    """
    wanted: dict[int, list[str]] = {}
    for site, layer in site_layers:
        wanted.setdefault(layer, []).append(site)
    for site in {site for sites in wanted.values() for site in sites}:
        _check_apart(model, site)
    called: set[tuple[str, int]] = set()
    tokens: dict[int, tuple[int, ...]] = {}  # a running layer -> its B and T; checkpoints run parts again later

    def noted(site: str, layer: int, x: Tensor) -> Tensor | None:
        if layer in tokens and ((site, layer) in called or tokens[layer] != x.shape[:2]):
            raise ModelError(_unfit(model, site, layer, "calling {} for some tokens at a time"))
        called.add((site, layer))
        return hook(site, layer, x)

    with ExitStack() as undo:
        for layer, sites in wanted.items():
            mixed = [site for site in sites if site in ("ffn", "router") and model.family.experts]
            for site in sites:
                if site not in mixed:
                    (_input if site in WRITERS else _output)(model, site, layer, noted, undo)
            if mixed:
                _experts(model, mixed, layer, noted, undo)
            _check_called(model, sites, layer, called, tokens, undo)
        yield


def _check_called(
    model: Model,
    sites: list[str],
    layer: int,
    called: set[tuple[str, int]],
    tokens: dict[int, tuple[int, ...]],
    undo: ExitStack,
) -> None:
    """Raise `ModelError` after each run of a layer that does not call the modules of its sites: a fused kernel, or code
    that takes their weights, computes them out of reach of hooks."""

    def begin(_: Any, args: tuple) -> None:
        called.difference_update((site, layer) for site in sites)
        tokens[layer] = args[0].shape[:2]

    def end(module: nn.Module, *_: Any) -> None:
        del tokens[layer]
        lacking = [site for site in sites if (site, layer) not in called]
        if lacking and not isinstance(vars(module).get("forward"), SkippedForward):
            raise not_called(model, lacking[0], layer)

    undo.callback(model.layer_modules[layer].register_forward_pre_hook(begin).remove)
    undo.callback(model.layer_modules[layer].register_forward_hook(end).remove)


def _check_apart(model: Model, site: str) -> None:
    """Raise `ModelError` if several layers share the module of a site: a hook on it cannot tell them apart."""
    layers: dict[nn.Module, int] = {}
    for layer in model.layers_with(site):
        module = _module(model, site, layer)
        if layers.setdefault(module, layer) != layer:
            raise ModelError(
                f"Layers {layers[module]} and {layer} of {model.name} share one module, so that the neurons of {site} "
                "in either can be neither read nor edited; give each layer a copy of its own."
            )


def _module(model: Model, site: str, layer: int) -> nn.Module:
    mixture = model.experts(layer) if site in ("ffn", "router") and model.family.experts else None
    return mixture if mixture is not None else model.site_module(site, layer)


class SkippedForward:
    """The forward method of a layer that does not run, because its output is known."""

    def __init__(self, output: Any) -> None:
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.output


def not_called(model: Model, site: str, layer: int) -> ModelError:
    """Return the error for a site whose module a pass did not call."""
    return ModelError(_unfit(model, site, layer, "without calling {}"))


def _unfit(model: Model, site: str, layer: int, way: str) -> str:
    module = _module(model, site, layer)
    path = next(name for name, part in model.net.named_modules() if part is module)
    return (
        f"{model.name} ran {way.format(path)}, so that the neurons of {site} in layer {layer} can be neither read nor "
        "edited; load the model without the fused kernel or the option that runs it in this way."
    )


@contextmanager
def stream_hooks(model: Model, layers: Iterable[int], hook: StreamHook) -> Iterator[None]:
    """Call `hook(layer, residual stream after it (B, T, D))` in every forward pass.

    The return value of the hook, unless it is None, replaces the residual stream.
    """

    def visit(layer: int, module: Any, args: Any, output: Any) -> Any:
        rest = output[1:] if isinstance(output, tuple | list) else None
        changed = hook(layer, output if rest is None else output[0])
        return changed if rest is None or changed is None else type(output)((changed, *rest))

    modules = [model.layer_modules[layer] for layer in range(model.layers)]
    with ExitStack() as undo:
        for layer in layers:
            if modules.count(modules[layer]) > 1:
                raise ModelError(
                    f"Layer {layer} of {model.name} is another layer, too, so that its residual stream can be neither "
                    "read nor edited; give each layer a copy of its own."
                )
            undo.callback(modules[layer].register_forward_hook(partial(visit, layer)).remove)
        yield


def check_vector(model: Model, vector: Sequence[float], stream: Tensor) -> None:
    """Raise `InputError` if a vector is not as long as the residual stream (B, T, D)."""
    if len(vector) != stream.shape[-1]:
        raise InputError(
            f"The vector has {len(vector)} numbers, and {model.name} needs {stream.shape[-1]}; use the model that it "
            "was made for."
        )


def by_site_layer(nodes: Iterable[Any]) -> dict[tuple[str, int], list[int]]:
    """Return (site, layer) -> the indices of its nodes in `nodes`, such as neurons."""
    numbers: dict[tuple[str, int], list[int]] = {}
    for number, node in enumerate(nodes):
        numbers.setdefault((node.site, node.layer), []).append(number)
    return numbers


def neuron_site(site: str) -> str:
    """Return the site whose activations a site is made of: ``attn`` for ``head``."""
    return "attn" if site == "head" else site


def neuron_columns(neuron: Neuron, head_dim: int) -> slice:
    """Return the activations of its site (`neuron_site`) that a neuron or a head has."""
    width = head_dim if neuron.site == "head" else 1
    return slice(neuron.index * width, (neuron.index + 1) * width)


def is_hooked(model: Model) -> bool:
    """Return whether hooks may change values. The hooks that transformers leaves after it returned attention weights do
    not."""
    kinds = ((part._forward_hooks, part._forward_pre_hooks) for part in modules_of(model.net))
    installed = (hook for both in kinds for kind in both for hook in kind.values())
    return not all(getattr(hook, "__module__", "").startswith("transformers.") for hook in installed)


def _input(model: Model, site: str, layer: int, hook: Hook, undo: ExitStack) -> None:
    """The site is the input of a linear map."""
    shape = _shape(model, layer, undo)

    def before(_: Any, args: tuple) -> tuple | None:
        if args[0].dim() == 3:
            changed = hook(site, layer, args[0])
            return None if changed is None else (changed, *args[1:])
        x = args[0].unflatten(0, shape)  # some (OPT) run their FFN on (B * T, D); the gradient must pass here
        changed = hook(site, layer, x)
        return ((x if changed is None else changed).flatten(0, 1), *args[1:])

    undo.callback(model.site_module(site, layer).register_forward_pre_hook(before).remove)


def _output(model: Model, site: str, layer: int, hook: Hook, undo: ExitStack) -> None:
    """The site is the output of a linear map, or a part of it."""
    columns = model.columns(site)

    def after(_: Any, args: Any, output: Tensor) -> Tensor | None:
        if columns is None:
            return hook(site, layer, output)
        # A part is taken out and put back, so that its gradient is separate.
        indices = columns.to(output.device)
        x = output.index_select(-1, indices)
        changed = hook(site, layer, x)
        return output.index_copy(-1, indices, x if changed is None else changed)

    undo.callback(model.site_module(site, layer).register_forward_hook(after).remove)


def _experts(model: Model, sites: list[str], layer: int, hook: Hook, undo: ExitStack) -> None:
    """The sites are inside a mixture of experts."""
    mixture = model.experts(layer)
    shape = _shape(model, layer, undo)

    def inside(site: str, neurons: Tensor) -> Tensor:  # (B * T, N)
        x = neurons.unflatten(0, shape)
        changed = hook(site, layer, x)
        return (x if changed is None else changed).flatten(0, 1)

    by_site: dict[str, Callable[[Tensor], Tensor]] = {site: partial(inside, site) for site in sites}
    undo.enter_context(replaced(mixture, "forward", experts.forward_with_hooks(mixture, by_site, mixture.forward)))


def _shape(model: Model, layer: int, undo: ExitStack) -> list[int]:
    """Return a list that always holds B and T of the running forward pass."""
    shape: list[int] = []

    def enter(_: Any, args: tuple) -> None:
        shape[:] = args[0].shape[:2]

    undo.callback(model.layer_modules[layer].register_forward_pre_hook(enter).remove)
    return shape


@contextmanager
def eager(model: Model) -> Iterator[None]:
    """Use eager attention, because fused attention returns no maps."""
    before = model.net.config._attn_implementation
    model.net.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.net.set_attn_implementation(before)
        _stop_capturing(model)


def _stop_capturing(model: Model) -> None:
    """Remove the hooks that transformers leaves after it returned attention weights: a network with them cannot be
    sent to another process."""
    for part in model.net.modules():
        for key, hook in list(part._forward_hooks.items()):
            if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                del part._forward_hooks[key]
        if getattr(part, "_output_capturing_hooks_installed", False):
            part._output_capturing_hooks_installed = False

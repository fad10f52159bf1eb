"""Weight patches: a recipe as a change of W_out and its bias, instead of hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from icebear.errors import RecipeError
from icebear.models.model import Model
from icebear.models.parts.linear import Linear, replaceable
from icebear.paths import write_file
from icebear.recipe import Recipe
from icebear.records import WRITERS
from icebear.steering.apply import steer


def patch(model: Model, recipe: Recipe) -> dict[str, Tensor]:
    """Return the weights and biases, by name, with which the plain model does what the edits of a recipe do.

    For an edit x -> s x + c of a neuron that W_out (or the attention projection) reads, the neuron's column is
    multiplied by s, and c times the column is added to the bias, which is new if the map had none. Raises `RecipeError`
    for edits at some tokens only, with decay, or of q, k, v, experts or routers.
    """
    recipe.check(model)
    maps: dict[str, tuple[Linear, Tensor, Tensor]] = {}
    names = {id(module): name for name, module in model.net.named_modules()}
    for edit in recipe:
        site = "attn" if edit.neuron.site == "head" else edit.neuron.site
        if edit.where != "all" or edit.decay != 1:
            raise RecipeError(f"A weight acts equally at all tokens, but {edit} does not; use @all without decay.")
        if edit.source is not None:
            raise RecipeError(f"{edit} takes its value from a prompt; a weight has none, so leave out this edit.")
        if edit.unit:
            raise RecipeError(f"The value of {edit} is in units of an index (std or max); give a plain number.")
        if site not in WRITERS or (site == "ffn" and model.family.experts):
            raise RecipeError(
                f"No weight can express {edit}, because no single linear map reads its neuron; leave out this edit."
            )
        module = model.site_module(site, edit.neuron.layer)
        if not replaceable(module):
            raise RecipeError(
                f"{edit} changes quantized or offloaded weights; load the model without --bits and --device-map."
            )
        linear = Linear(module)
        ones = torch.ones_like(linear.rows(0, linear.dtype))
        _, scales, constants = maps.setdefault(names[id(module)], (linear, ones, torch.zeros_like(ones)))  # (in,)
        width = model.head_dim if edit.neuron.site == "head" else 1
        columns = slice(edit.neuron.index * width, (edit.neuron.index + 1) * width)
        s, c = {"set": (0.0, edit.value), "scale": (edit.value, 0.0), "add": (1.0, edit.value)}[edit.op]
        scale, constant = 1 + edit.share * (s - 1), edit.share * c
        scales[columns] *= scale
        constants[columns] = scale * constants[columns] + constant
    changed: dict[str, Tensor] = {}
    for name, (linear, scales, constants) in maps.items():
        matrix = linear.rows(dtype=linear.dtype)
        changed[f"{name}.weight"] = linear.in_layout(matrix * scales)
        if constants.any():
            changed[f"{name}.bias"] = matrix @ constants + (0 if linear.bias is None else linear.bias)
    return changed


def new_biases(model: Model, weights: dict[str, Tensor]) -> list[str]:
    """Return the biases of a patch that the model does not have yet."""
    return sorted(set(weights) - set(model.net.state_dict()))


def save_patch(model: Model, weights: dict[str, Tensor], path: str | Path) -> None:
    """Write a safetensors file for `apply_patch`. Raises `RecipeError` if it cannot be written."""
    from safetensors.torch import save

    metadata = {
        "format": "pt",
        "model": model.name,
        "fingerprint": model.fingerprint,
        "new_biases": " ".join(new_biases(model, weights)),
        "load_with": "icebear.apply_patch(net, file); load_state_dict leaves new biases out",
    }
    write_file(path, save({name: value.contiguous() for name, value in weights.items()}, metadata), RecipeError)


def apply_patch(net: Any, file: str | Path) -> None:
    """Load a weight patch into a plain transformers model, permanently.

    A bias that the model lacks is made, which neither `load_state_dict` nor `from_pretrained` does; a model that was
    saved with such a bias needs the file again.

    Parameters
    ----------
    net
        A transformers model.
    file
        A file of `icebear recipe export --patch`.

    Raises
    ------
    RecipeError
        For a file that is not a patch, or is of another model.
    """
    from safetensors.torch import load_file

    try:
        weights = load_file(str(file))
    except Exception as error:  # safetensors has no class for what is no file of its own
        raise RecipeError(f"{file} cannot be read as a patch ({error}); check the path.") from None
    modules = dict(net.named_modules())
    for path, value in weights.items():
        home, _, name = path.rpartition(".")
        module = modules.get(home)
        fits = name in getattr(module, "_parameters", {}) and replaceable(module)  # type: ignore[arg-type]
        old = getattr(module, name) if fits else None
        if not fits or value.shape != ((Linear(module).shape[0],) if old is None else old.shape):  # type: ignore[arg-type]
            raise RecipeError(
                f"The patch {file} does not fit this model (weight {path}); load the model that it was made for."
            )
    for path, value in weights.items():
        _put(net, path, value)


def _put(net: Any, path: str, value: Tensor) -> tuple[Any, str, Any]:
    home, _, name = path.rpartition(".")
    module = net.get_submodule(home)
    old = module._parameters[name]
    weight = module.weight
    module._parameters[name] = torch.nn.Parameter(
        value.to(weight.device, weight.dtype), requires_grad=weight.requires_grad
    )
    return module, name, old


@contextmanager
def patched(model: Model, weights: dict[str, Tensor]) -> Iterator[Model]:
    """Give the model the weights of a patch inside the context, new biases included."""
    with model.lock, ExitStack() as undo:
        for path, value in weights.items():
            module, name, old = _put(model.net, path, value)
            undo.callback(module._parameters.__setitem__, name, old)
        yield model


@torch.no_grad()
def difference(model: Model, recipe: Recipe, weights: dict[str, Tensor], prompt: str) -> float:
    """Return the largest difference of a logit between the patched and the steered model, over the largest logit."""
    inputs = model.inputs(model.encode([prompt]))
    with steer(model, recipe):
        steered = model.net(**inputs).logits
    with patched(model, weights):
        changed = model.net(**inputs).logits
    return ((changed - steered).abs().max() / steered.abs().max()).item()

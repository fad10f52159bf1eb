"""Weights by TransformerLens' names, in its layout and in older ones, as the weights of `Hooked`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from icebear.errors import ModelError
from icebear.models.loading.hooked_model import HookedConfig


def same(x: Tensor) -> Tensor:
    return x


LAYOUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    **{f"W_{name.upper()}": (f"{name}.weight", lambda x: x.transpose(1, 2).flatten(0, 1)) for name in "qkv"},
    **{f"b_{name.upper()}": (f"{name}.bias", torch.flatten) for name in "qkv"},
    "W_O": ("o.weight", lambda x: x.flatten(0, 1).T),
    "b_O": ("o.bias", same),
    "W_gate": ("gate.weight", torch.t),
    "W_in": ("up.weight", torch.t),
    "b_in": ("up.bias", same),
    "W_out": ("out.weight", torch.t),
    "b_out": ("out.bias", same),
    "W_E": ("weight", same),
    "W_pos": ("weight", same),
    "W_U": ("weight", torch.t),
    "b_U": ("bias", same),
    "w": ("weight", same),
    "b": ("bias", same),
}
"""TransformerLens' name of a weight: ours, and the change of its layout."""
OWNERS = {"embed": "W_E", "pos_embed": "W_pos", "unembed": "W_U"}
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
RENAMED = (
    (r"^((_orig_mod|module)\.)+", ""),  # of torch.compile and DataParallel
    (r"^attn_blocks\.", "blocks."),
    (r"^(blocks\.\d+)\.([Wb]_[QKVO])$", r"\1.attn.\2"),
    (r"^(blocks\.\d+)\.([Wb]_(in|out|gate))$", r"\1.mlp.\2"),
    *((rf"^({name}|b_U)$" if name == "W_U" else f"^{name}$", rf"{owner}.\g<0>") for owner, name in OWNERS.items()),
    (r"^norm\.", "ln_final."),  # SoLU models of 2022
    (r"^(blocks\.\d+)\.norm", r"\1.ln"),
    (r"^tok_emb\.", "embed."),  # minGPT, in which Othello-GPT was trained
    (r"^pos_emb$", "pos_embed.W_pos"),
    (r"^ln_f\.", "ln_final."),
    (r"^head\.", "unembed."),
    *((rf"\.attn\.{name}\.", f".attn.{name[0]}.") for name in ("query", "key", "value")),
    (r"\.attn\.proj\.", ".attn.o."),
    (r"\.mlp\.0\.", ".mlp.up."),
    (r"\.mlp\.2\.", ".mlp.out."),
)
"""Patterns of older names, and TransformerLens' (or, for minGPT, our) names."""


def weights_of(state: Mapping[str, Tensor], config: HookedConfig, source: str) -> dict[str, tuple[str, Tensor]]:
    """Return our name of each weight, with its name in the file and its value in our layout. Raises `ModelError`."""
    weights = {}
    for path, (name, value) in _right_facing(_renamed(state, source), config, source).items():
        where, _, last = path.rpartition(".")
        stem, change = LAYOUTS.get(last.lstrip("_"), (last, same))
        inside = f"{where}.{'b_in' if last == 'b_in' and config.gated_mlp else stem}"
        weights[inside if where == "unembed" else f"model.{inside}"] = (name, change(value))
    return weights


def their_name(path: str) -> str:
    """Return TransformerLens' name of a weight of ours."""
    where, _, last = path.removeprefix("model.").rpartition(".")
    block, _, owner = where.rpartition(".")
    inside = next((name for name, (stem, _) in LAYOUTS.items() if stem == f"{owner}.{last}"), None)
    return f"{block}.{inside}" if inside else f"{where}.{OWNERS.get(owner, last[0])}"


Weights = dict[str, tuple[str, Tensor]]
"""TransformerLens' name of a weight, its name in the file, and its value."""


def _renamed(state: Mapping[str, Tensor], source: str) -> Weights:
    """Raises `ModelError` for a weight with two names."""
    weights: Weights = {}
    for name, value in state.items():
        path = name
        for pattern, replacement in RENAMED:
            path = re.sub(pattern, replacement, path)
        if path in weights:
            raise ModelError(f"{source} has {name} and {weights[path][0]} for one weight; remove one of them.")
        if path.rpartition(".")[2] not in BUFFERS:
            weights[path] = (name, value)
    return weights


def _right_facing(weights: Weights, config: HookedConfig, source: str) -> Weights:
    """Return the weights with all matrices as (inputs, outputs). Older files have some as (outputs, inputs), which
    their shapes show; a square one is like the others, or, where all are square, as it is if all names are those of
    TransformerLens. Raises `ModelError`."""
    shapes = _shapes(config)
    shapes = {path: shapes[kind] for path in weights if (kind := path.rpartition(".")[2].lstrip("_")) in shapes}
    ways = {path: _ways(path, weights, shape, source) for path, shape in shapes.items()}
    current = {False} if all(path == name for path, (name, _) in weights.items()) else set()
    is_old_solu = weights.get("ln_final.w", ("",))[0].startswith("norm.")
    facing = dict(weights)
    for path, shape in shapes.items():
        name, value = weights[path]
        if is_old_solu and path == "pos_embed.W_pos":
            way = ways[path] & {config.n_layers <= 8} or ways[path]  # those of eight layers have only this one turned
        else:
            way = ways[path] if len(ways[path]) == 1 else _like_others(path, ways) or current
        if len(way) != 1:
            raise ModelError(
                f"{source} has the square matrix {name}, which may be transposed or not; save the file "
                "with all matrices as (inputs, outputs)."
            )
        facing[path] = (name, (value.mT if True in way else value).reshape(shape))
    return facing


def _shapes(config: HookedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of TransformerLens' matrices, and of the biases that it has by head."""
    width, head, neurons = config.d_model, config.d_head, config.d_mlp or 4 * config.d_model
    groups = config.n_key_value_heads or config.n_heads
    return {
        **{"W_E": (config.d_vocab, width), "W_pos": (config.n_ctx, width), "W_U": (width, config.d_vocab_out)},
        **{"W_Q": (config.n_heads, width, head), "W_K": (groups, width, head), "W_V": (groups, width, head)},
        **{"W_O": (config.n_heads, head, width), "W_out": (neurons, width)},
        **dict.fromkeys(("W_in", "W_gate"), (width, neurons)),
        **{"b_Q": (config.n_heads, head), "b_K": (groups, head), "b_V": (groups, head)},
    }


def _ways(path: str, weights: Weights, shape: tuple[int, ...], source: str) -> set[bool]:
    """Return whether a matrix is transposed: both for a square one. Raises `ModelError` for another shape."""
    name, value = weights[path]
    if path == "pos_embed.W_pos" and value.dim() == 3:
        value = value[0]  # minGPT: (1, positions, width)
    *heads, rows, columns = (shape[0] * shape[1], shape[2]) if value.dim() == 2 and len(shape) == 3 else shape
    sides = [(rows, columns)] + [(columns, rows)] * path.rpartition(".")[2].startswith(("W", "_W"))
    ways = {number == 1 for number, side in enumerate(sides) if value.shape == (*heads, *side)}
    if not ways:
        raise ModelError(
            f"{source} has {name} of the shape {tuple(value.shape)}, where its configuration has {shape}; correct the "
            "configuration, or give the file that belongs to it."
        )
    return ways


def _like_others(path: str, ways: Mapping[str, set[bool]]) -> set[bool]:
    """Return whether a square matrix is transposed: as the others of the blocks, or else as all others are; nothing,
    where all are square."""
    clear = {other: way for other, way in ways.items() if len(way) == 1 and ".b_" not in other}
    near = [way for other, way in clear.items() if other.startswith("blocks.") == path.startswith("blocks.")]
    return set().union(*(near or clear.values()))

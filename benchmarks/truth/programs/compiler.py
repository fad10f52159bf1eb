"""Programs as weights of a transformer in TransformerLens' format: compiled, or trained
(`benchmarks/train_programs.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.truth.programs.program import ONES, Circuitry, Feature, Head, Program, Unit, Vector
from icebear.models.loading import hooked
from icebear.models.loading.hooked_model import HookedConfig
from icebear.models.model import Model
from icebear.models.text.words import Words

LOGIT = 10.0
"""The logit of an answer; all others have 0."""
SCALE: Vector = {("scale", 0): 1.0}
SIZE = 12.0
"""The constant feature in front of LayerNorm; the other features have a norm of about 3."""
FOLDER = Path(__file__).with_name("trained")
SHAPE: dict[str, Any] = {
    **{"d_model": 32, "n_heads": 4, "d_head": 8, "d_mlp": 64},
    **{"act_fn": "gelu", "normalization_type": "LN"},
}


@dataclass(frozen=True)
class Compiled:
    """A model, and what its neurons and heads are for by construction, as far as this is known."""

    model: Model
    neurons: dict[tuple[int, int], Unit] = field(default_factory=dict)
    """By layer and neuron."""
    heads: dict[tuple[int, int], str] = field(default_factory=dict)
    copies: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """A redundant neuron -> the neuron that does the same."""

    @property
    def units(self) -> dict[tuple[int, int], str]:
        """(layer, neuron) -> kind."""
        return {key: unit.kind for key, unit in self.neurons.items()}


def compiled(circuitry: Circuitry, name: str, norm_prompts: Sequence[Sequence[int]] = (), seed: int = 0) -> Compiled:
    """Return the model of a program.

    norm_prompts: if there are any, the residual stream is rotated at random and read through LayerNorm. A constant
    feature keeps the divisor near its mean over these prompts; what it changes is an error of the program.
    """
    norm = bool(norm_prompts)
    basis = Basis(circuitry, norm, seed)
    divisors = [1.0] * (2 * circuitry.layers + 1)
    if norm:
        divisors = measured_divisors(network(circuitry, basis, divisors, None), torch.tensor(norm_prompts))
    net = network(circuitry, basis, divisors, "LNPre" if norm else None)
    words = {word: number for number, word in enumerate(circuitry.words)}
    return Compiled(
        Model(net, Words(words), name),
        basis.units,
        {key: head.kind for key, head in basis.heads.items()},
        _copies(basis.units),
    )


def _copies(units: Mapping[tuple[int, int], Unit]) -> dict[tuple[int, int], tuple[int, int]]:
    originals = {key: unit for key, unit in units.items() if unit.kind != "redundant"}
    return {
        key: next(other for other, original in originals.items() if replace(original, kind=unit.kind) == unit)
        for key, unit in units.items()
        if unit.kind == "redundant"
    }


class Basis:
    """Features as directions of the residual stream, and the places of heads and neurons."""

    def __init__(self, circuitry: Circuitry, norm: bool, seed: int) -> None:
        self.units: dict[tuple[int, int], Unit] = _placed(circuitry.units, circuitry.layers)
        self.heads: dict[tuple[int, int], Head] = _placed(circuitry.heads, circuitry.layers)
        vectors: list[Vector] = [*circuitry.tokens, *circuitry.positions, ONES, *circuitry.answers]
        vectors += [vector for unit in circuitry.units for vector in (unit.read, unit.write)]
        vectors += [v for head in circuitry.heads for pair in (*head.match, *head.copy) for v in pair]
        vectors += [SCALE] * norm
        features: dict[Feature, None] = dict.fromkeys(feature for vector in vectors for feature in vector)
        self.numbers = {feature: number for number, feature in enumerate(features)}
        self.norm, self.directions = norm, torch.eye(len(features))  # (features, d_model)
        if norm:
            self.directions = rotation(len(features), torch.Generator().manual_seed(seed))

    def rows(self, vectors: Sequence[Vector], count: int = 0) -> Tensor:
        """Return vectors as rows (N, d_model), with rows of zeros up to a count."""
        coordinates = torch.zeros(max(count, len(vectors)), len(self.numbers))
        for row, vector in enumerate(vectors):
            for feature, value in vector.items():
                coordinates[row, self.numbers[feature]] = value
        return coordinates @ self.directions


def rotation(size: int, generator: torch.Generator) -> Tensor:
    """Return random orthonormal directions (size, size + 1) with a mean of zero, which LayerNorm keeps."""
    mixed = torch.randn(size + 1, size + 1, generator=generator, dtype=torch.float64)
    mixed[:, 0] = 1
    return torch.linalg.qr(mixed).Q[:, 1:].T.float()


def _placed(parts: Sequence[Any], layers: int) -> dict[tuple[int, int], Any]:
    by_layer = [[part for part in parts if part.layer == layer] for layer in range(layers)]
    return {(layer, number): part for layer, placed in enumerate(by_layer) for number, part in enumerate(placed)}


def network(circuitry: Circuitry, basis: Basis, divisors: Sequence[float], norm: str | None) -> hooked.Hooked:
    """Return the network. divisors: what the norm before each attention, FFN and the unembedding divides by."""
    state = {
        "embed.W_E": basis.rows(
            [{**word, **ONES, **({("scale", 0): SIZE} if basis.norm else {})} for word in circuitry.tokens]
        ),
        "pos_embed.W_pos": basis.rows(circuitry.positions),
        "unembed.W_U": LOGIT * divisors[-1] * basis.rows(circuitry.answers).T,
    }
    head_counts, unit_counts = ([layer for layer, _ in keys] for keys in (basis.heads, basis.units))
    heads, units = (max(map(counts.count, counts), default=0) or 1 for counts in (head_counts, unit_counts))
    width = max((max(len(head.match), len(head.copy)) for head in circuitry.heads), default=1)
    for layer in range(circuitry.layers):
        layer_heads = [basis.heads.get((layer, number), Head(layer, (), ())) for number in range(heads)]
        scale = divisors[2 * layer]
        attention = {
            "W_Q": torch.stack([scale * basis.rows([q for q, _ in head.match], width).T for head in layer_heads]),
            "W_K": torch.stack([scale * basis.rows([k for _, k in head.match], width).T for head in layer_heads]),
            "W_V": torch.stack([scale * basis.rows([v for v, _ in head.copy], width).T for head in layer_heads]),
            "W_O": torch.stack([basis.rows([o for _, o in head.copy], width) for head in layer_heads]),
        }
        state |= {f"blocks.{layer}.attn.{name}": x for name, x in attention.items()}
        layer_units = [basis.units.get((layer, number), Unit(layer, {}, 0.0, {})) for number in range(units)]
        state[f"blocks.{layer}.mlp.W_in"] = divisors[2 * layer + 1] * basis.rows([unit.read for unit in layer_units]).T
        state[f"blocks.{layer}.mlp.b_in"] = torch.tensor([unit.bias for unit in layer_units])
        state[f"blocks.{layer}.mlp.W_out"] = basis.rows([unit.write for unit in layer_units])
    config = HookedConfig(
        n_layers=circuitry.layers,
        d_model=basis.directions.shape[1],
        n_heads=heads,
        d_head=width,
        d_mlp=units,
        n_ctx=circuitry.length,
        d_vocab=len(circuitry.words),
        d_vocab_out=len(circuitry.outputs),
        normalization_type=norm,
        attention_dir="causal" if circuitry.causal else "bidirectional",
        use_attn_scale=False,
    )
    words, outputs = (
        {word: number for number, word in enumerate(names)} for names in (circuitry.words, circuitry.outputs)
    )
    return hooked.network(config, state, words, outputs)


def measured_divisors(net: hooked.Hooked, ids: Tensor) -> list[float]:
    """Return the mean standard deviation of the residual stream at each place of a norm, over prompts (B, T)."""
    names = [f"blocks.{layer}.{norm}" for layer in range(net.config.n_layers) for norm in ("ln1", "ln2")]
    norms = [net.model.get_submodule(name) for name in (*names, "ln_final")]
    seen: list[float] = []
    undo = [
        norm.register_forward_hook(lambda _, args, x: seen.append(x.std(-1, correction=0).mean().item()))
        for norm in norms
    ]
    with torch.no_grad():
        net(ids)
    for handle in undo:
        handle.remove()
    return seen


def config_of(program: Program) -> HookedConfig:
    """Return the shape of a program's trained model; it has as many layers as the compiled one."""
    return HookedConfig(
        n_layers=program.circuitry().layers,
        n_ctx=program.length,
        d_vocab=len(program.words),
        d_vocab_out=len(program.outputs),
        attention_dir="causal" if program.causal else "bidirectional",
        **SHAPE,
    )


def trained(program: Program) -> Compiled:
    """Return the trained model of a program. What its neurons are for is not known by construction."""
    words, outputs = ({word: n for n, word in enumerate(names)} for names in (program.words, program.outputs))
    state = {name: x.float() for name, x in load_file(FOLDER / f"{program.name}.safetensors").items()}
    return Compiled(Model(hooked.network(config_of(program), state, words, outputs), Words(words), program.name))


def names() -> list[str]:
    """Return the programs that have a trained model."""
    return sorted(file.stem for file in FOLDER.glob("*.safetensors"))

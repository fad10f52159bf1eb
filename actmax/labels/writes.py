"""Whether a neuron writes what its label says that it reads: driven on neutral places, beside others of its layer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from icebear.actmax.labels import kinds
from icebear.actmax.labels.label import Label
from icebear.actmax.labels.sample import Codes, Sample
from icebear.cache import cache_folder
from icebear.concepts.calibration import Calibration, calibrate
from icebear.concepts.models.model import Model
from icebear.concepts.passes.sites import visiting
from icebear.records import Neuron, Sentence
from icebear.steering.flipping.last_token import Edits, LastToken
from icebear.steering.side_effects import NEUTRAL, neutral_places

STRENGTHS = (1, 3)
"""Times the furthest that the neuron was seen to go; text is written at the last."""
OTHERS = 10
"""Neurons of the layer, drawn by chance."""
PLACES = 12
"""Neutral places where next tokens are compared."""
TEXTS = 2
"""Of them those where text is written, and"""
TOKENS = 20
"""how many tokens of it."""
ROWS = 64
"""Edits that are run at once."""

Edit = tuple[int, int, float]
"""Layer and index of an FFN neuron, and what it is set to."""


@dataclass(frozen=True)
class Effects:
    """What neurons do on neutral places, each driven by itself."""

    gains: np.ndarray
    """(S, E, V) float16, by strength: change of the next token's log-probability, mean over places."""
    price: np.ndarray
    """(S, E) mean KL divergence from the plain prediction, in nats."""
    written: np.ndarray
    """(E, TEXTS, TOKENS) int32: tokens written greedily under the largest strength."""

    def part(self, rows: slice) -> Effects:
        return Effects(self.gains[:, rows], self.price[:, rows], self.written[rows])


Row = tuple[Neuron, str, dict[str, Label], Sequence[str]]
"""A neuron at a polarity, labels by name, and tokens that it promotes."""


def tested(model: Model, rows: Sequence[Row]) -> list[dict[str, Any] | None]:
    """For each row and label: the neuron's rank (1 is the first of 11) among `OTHERS` of its layer by what the label's
    words gain, at each strength; and by the share of the label's words in the text that it writes. With its price.

    Words that it promotes itself are left out: they would gain whatever the label; their own rank stands beside it, as
    a check of the arithmetic. None where the neuron was not seen to go to this side. FFN neurons only, of a model that
    writes text from left to right.
    """
    found: list[dict[str, Any] | None] = [None] * len(rows)
    if not model.generates or model.task.stacks > 1:
        return found
    seen, vocabulary = calibrate(model), _vocabulary(model)
    able: list[tuple[int, Edit]] = []
    for place, (neuron, polarity, _, _) in enumerate(rows):
        furthest = _furthest(seen, neuron, polarity) if neuron.site == "ffn" else 0.0
        able += [(place, (neuron.layer, neuron.index, furthest))] if furthest else []
    if not able:
        return found
    rest = others(model, seen, {edit[0] for _, edit in able})
    driven = effects(model, [edit for _, edit in able])
    for number, (place, (layer, _, _)) in enumerate(able):
        own, (_, _, labels, promoted) = driven.part(slice(number, number + 1)), rows[place]
        promotes = np.isin(vocabulary.pieces, list(promoted))
        words = {name: _words(label, vocabulary) & ~promotes for name, label in labels.items()}
        found[place] = {
            "of": 1 + rest[layer].gains.shape[1],
            "price": {f"x{strength}": float(nats) for strength, nats in zip(STRENGTHS, own.price[:, 0], strict=True)},
            **{name: _ranked(own, rest[layer], mask) for name, mask in {**words, "promoted": promotes}.items()},
        }
    return found


def _ranked(own: Effects, rest: Effects, words: np.ndarray) -> dict[str, float] | None:
    """None of no words."""
    if not words.any():
        return None
    found: dict[str, float] = {}
    for place, strength in enumerate(STRENGTHS):
        gain = float(own.gains[place, 0, words].astype(float).mean())
        gains = rest.gains[place][:, words].astype(float).mean(1)
        found |= {f"gain x{strength}": gain, f"rank x{strength}": 1 + int((gains >= gain).sum())}
    share, shares = float(words[own.written[0]].mean()), words[rest.written].mean((1, 2))
    # Where others' texts have as many of the words, it is behind half of them.
    return {**found, "text": share, "rank of text": 1 + float((shares > share).sum() + (shares == share).sum() / 2)}


def _furthest(seen: Calibration, neuron: Neuron, polarity: str) -> float:
    return (seen.high if polarity == "+" else seen.low)[neuron.layer, neuron.index].item()


def others(model: Model, seen: Calibration, layers: Iterable[int]) -> dict[int, Effects]:
    """layer -> what neurons of it drawn by chance do, each to the side where it goes furthest; made once a model."""
    folder = cache_folder() / "labels"
    files = {
        layer: folder / f"{model.fingerprint}-{model.dtype_name}-{_texts()}-{layer}.safetensors" for layer in layers
    }
    missing = [layer for layer, file in files.items() if not file.exists()]
    edits = [edit for layer in missing for edit in _drawn(model, seen, layer)]
    made = effects(model, edits) if edits else None
    for layer in missing:
        rows = [row for row, edit in enumerate(edits) if edit[0] == layer]
        assert made is not None
        folder.mkdir(parents=True, exist_ok=True)
        part = files[layer].with_suffix(".part")
        save_file({k: np.ascontiguousarray(v) for k, v in vars(made.part(slice(rows[0], rows[-1] + 1))).items()}, part)
        part.replace(files[layer])
    return {layer: Effects(**load_file(file)) for layer, file in files.items()}


def _drawn(model: Model, seen: Calibration, layer: int) -> list[Edit]:
    draw = np.random.default_rng(layer).permutation(model.width("ffn")).tolist()
    ends = torch.where(seen.high > -seen.low, seen.high, seen.low)[layer].tolist()
    return [(layer, index, ends[index]) for index in draw if ends[index]][:OTHERS]


def _texts() -> str:
    """Other texts or numbers are another file."""
    return hashlib.sha256(f"{NEUTRAL} {STRENGTHS} {OTHERS} {PLACES} {TEXTS} {TOKENS}".encode()).hexdigest()[:8]


def effects(model: Model, edits: Sequence[Edit]) -> Effects:
    """What each edit does by itself, at each strength."""
    groups = [edits[start : start + ROWS] for start in range(0, len(edits), ROWS)]
    found = [_effects(model, group) for group in groups]
    return Effects(
        np.concatenate([one.gains for one in found], 1),
        np.concatenate([one.price for one in found], 1),
        np.concatenate([one.written for one in found]),
    )


def _effects(model: Model, edits: Sequence[Edit]) -> Effects:
    every = neutral_places(model, NEUTRAL)
    places = every[:: max(1, len(every) // PLACES)][:PLACES]
    strong = [[(layer, index, strength * value) for layer, index, value in edits] for strength in STRENGTHS]
    proposals: list[Edits] = [{}, *({(layer, index, 0): value} for rows in strong for layer, index, value in rows)]
    gains, price = torch.zeros(len(proposals) - 1, model.config.vocab_size), torch.zeros(len(proposals) - 1)
    for ids in places:
        before, *edited = LastToken(model, ids).logits(proposals)[:, 0].log_softmax(-1)
        change = torch.stack(edited) - before
        gains += change
        price -= (before.exp() * change).sum(-1)
    written = torch.stack([_written(model, ids, strong[-1]) for ids in places[:: len(places) // TEXTS][:TEXTS]], 1)
    shape = (len(STRENGTHS), len(edits))
    return Effects(
        (gains / len(places)).half().unflatten(0, shape).numpy(),
        (price / len(places)).unflatten(0, shape).numpy(),
        written.to(torch.int32).numpy(),
    )


@torch.no_grad()
def _written(model: Model, ids: Sequence[int], edits: Sequence[Edit]) -> Tensor:
    """(E, TOKENS) what follows greedily when each edit acts at the last token and at all that are written."""
    by_layer: dict[int, list[tuple[int, int, float]]] = {}
    for row, (layer, index, value) in enumerate(edits):
        by_layer.setdefault(layer, []).append((row, index, value))

    def visit(site: str, layer: int, x: Tensor) -> Tensor:
        rows, columns, values = (list(part) for part in zip(*by_layer[layer], strict=True))
        x = x.clone()
        x[rows, -1, columns] = torch.tensor(values, dtype=x.dtype, device=x.device)
        return x

    read = torch.tensor([ids], device=model.device).expand(len(edits), -1)
    cache, found = None, []
    with model.lock, visiting(model, [("ffn", layer) for layer in by_layer], visit):
        for _ in range(TOKENS):
            output = model.net(input_ids=read, past_key_values=cache, use_cache=True)
            cache, read = output.past_key_values, output.logits[:, -1:].argmax(-1)
            found.append(read.cpu())
    return torch.cat(found, 1)


# --- a label's words ------------------------------------------------------------------------------------


def _vocabulary(model: Model) -> Sample:
    """Every token of the vocabulary as a sentence of its own."""
    pieces = [model.text(token) for token in range(model.config.vocab_size)]
    return Sample([(Sentence(i, piece, "", 0, 0, (piece,)), [i], 1) for i, piece in enumerate(pieces)], Codes())


def _words(label: Label, vocabulary: Sample) -> np.ndarray:
    """(V,) bool: the tokens that a label names, wherever it looks for them."""
    if label.kind == "n-gram":
        label = Label.of("tokens", "here", [item[-1] for item in label.items])
    elif label.kind == "topic":
        label = Label.of("words", "sentence", label.texts)
    elif label.kind == "position":
        return np.zeros(len(vocabulary), dtype=bool)
    return kinds.true(replace(label, where="sentence" if label.kind == "words" else "here"), vocabulary)

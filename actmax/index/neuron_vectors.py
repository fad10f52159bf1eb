"""The vector indexes of a store: W_out rows, W_in rows, mean vectors of examples, and the unembedding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from icebear.concepts.vocabulary.lens import MeanLens, mean_lens
from icebear.concepts.vocabulary.weight_rows import direct_rows, typical, unembedding, vocabulary, w_in_rows, w_out_rows
from icebear.db import vectors
from icebear.db.search import DEVIATION, NULL_VECTORS, measure_chance
from icebear.db.store import Store
from icebear.errors import NumericalError, StoreError
from icebear.models.model import Model
from icebear.models.parts.linear import Linear

BLOCK = 4096
"""The number of rows of a block."""


def ensure_vectors(model: Model, store: Store) -> None:
    """Make the missing vector indexes of a store; that of the averaged Jacobian lens if the lens is built. A model of
    images without labels has no vocabulary."""
    lens, words = mean_lens(model), vocabulary(model).shape[0] if model.task.reads_text or model.labels else 0
    makers: dict[str, Callable[[], Iterator[np.ndarray]]] = {
        "w_out": lambda: _rows(model, store, direct_rows),
        "w_in": lambda: _rows(model, store, w_in_rows),
        "examples": lambda: example_vectors(store, model.config.hidden_size),
        **({"lens": lambda: _rows(model, store, partial(_lens_rows, lens))} if lens else {}),
    }
    if words:
        starts = range(0, words, BLOCK)
        makers["tokens"] = lambda: (unembedding(model, slice(i, i + BLOCK)).cpu().numpy() for i in starts)
    neurons = store.count("neurons")
    counts = {"w_out": neurons, "lens": neurons, "w_in": neurons, "examples": 2 * neurons, "tokens": words}
    missing = [name for name in makers if not _usable(store, name, counts[name])]
    for name, make in makers.items():
        if name in missing:
            if name == "examples":
                save_moments(store, model.config.hidden_size)
            norms = store.vectors.save(name, make(), unit=name != "tokens")
            if name == "examples" and store.facts.find("encoder"):
                set_example_null(store, norms)
    ceilings = lens and [measured and measured.ceiling for measured in lens.reliability]
    if ceilings != store.facts.find("ceilings"):
        store.facts.set({"ceilings": ceilings})
    if not store.count("w_out_norms"):
        written = np.concatenate([np.linalg.norm(rows, axis=1) for rows in makers["w_out"]()])
        store.vectors.set_norms(written.tolist(), [typical(model, layer) for layer in range(model.layers)])
    if words and not store.count("tokens"):
        own_outputs = len(model.labels) == words  # a vocabulary other than that of the input
        text, count = (model.answer_text, words) if own_outputs else (model.text, model.config.vocab_size)
        store.refill("tokens", ((token, text(token)) for token in range(count)))
    if missing or store.controls.get("nearest") is None:
        measure_chance(store)


def gated(model: Model) -> bool:
    """Return whether the FFN is gated: whether its activation is a product of two linear maps of the input."""
    if model.family.experts:
        return True
    number = model.layers_with("ffn")[0]
    layer, last = model.layer_modules[number], model.site_module("ffn", number)
    name = next(name for name in model.family_at(number).ffn_in.split() if name in dict(layer.named_modules()))
    beside = layer.get_submodule(name.rpartition(".")[0]).children()
    maps = [Linear(module) for module in beside if Linear.reads(module) and module is not last]
    return sum(linear.shape[0] for linear in maps) > model.width("ffn")


def _usable(store: Store, name: str, count: int) -> bool:
    try:
        index, file = store.vectors.get(name), store.vectors.path(name)
        return index.ntotal == count and vectors.digest(file) == vectors.stored_digest(file)
    except StoreError as error:
        if store.vectors.path(name).exists():
            logging.getLogger("icebear").info("%s", error)
        return False


def _rows(model: Model, store: Store, matrix: Callable[[Model, str, int], Tensor | None]) -> Iterator[np.ndarray]:
    """Yield rows by neuron id; zeros for heads, a site without this matrix, or a layer without the site."""
    for site in store.facts.all()["sites"]:
        for layer in range(model.layers):
            has_rows = site != "head" and layer in model.layers_with(site)
            rows = matrix(model, site, layer) if has_rows else None
            if rows is None:
                rows = torch.zeros(model.width(site), model.config.hidden_size, device=model.device)
            if not torch.isfinite(rows).all():
                raise NumericalError(
                    f"The weights of layer {layer} or of the unembedding are NaN or infinite; try --dtype float32."
                )
            yield rows.cpu().numpy()


def _lens_rows(lens: MeanLens, model: Model, site: str, layer: int) -> Tensor | None:
    """Return W_out rows through the lens that predicts effects in this layer better."""
    rows = w_out_rows(model, site, layer)
    if rows is None or not lens.is_better(layer):
        return direct_rows(model, site, layer)
    return rows @ lens.jacobian(site, layer).to(rows.device).T


def save_moments(store: Store, width: int = 0) -> None:
    """Save the center and the spread that standardize sentence vectors (`VectorFiles.standardized`); for an index
    without sentence vectors 0 and 1, of this width."""
    ids, rows = store.sentence_vectors()  # (S,), (S, D)
    if not len(ids):
        store.facts.set({"center": [0.0] * width, "spread": [1.0] * width})
        return
    ordered = torch.from_numpy(rows[np.argsort(ids)].astype(np.float32))
    center, encoder = ordered.mean(0), store.facts.find("encoder")
    spread = torch.ones_like(center) if encoder else ordered.std(0, correction=0).clamp(min=1e-6)
    moments = {"center": center.tolist(), "spread": spread.tolist()}
    store.facts.set({"encoder": {**encoder, **moments}} if encoder else moments)


def example_vectors(store: Store, width: int = 0) -> Iterator[np.ndarray]:
    """Yield the mean standardized vectors of examples, by 2 * neuron id + (polarity is -), in blocks of rows; zeros of
    this width for an index without sentence vectors. `save_moments` comes before."""
    ids, rows = store.sentence_vectors()
    if not len(ids):
        yield np.zeros((2 * store.count("neurons"), width), dtype=np.float32)
        return
    order = np.argsort(ids)
    weight = torch.from_numpy(store.vectors.standardized(rows[order].astype(np.float32)))
    rows = store.example_tables.columns()
    examples = torch.from_numpy(np.searchsorted(ids[order], rows.sentence))
    starts = torch.from_numpy(np.searchsorted(rows.key, np.arange(2 * store.count("neurons") + 1)))
    for start in range(0, len(starts) - 1, BLOCK):
        bounds = starts[start : start + BLOCK + 1]
        inside = examples[bounds[0] : bounds[-1]]
        yield F.embedding_bag(inside, weight, bounds[:-1] - bounds[0], mode="mean").numpy()


def set_example_null(store: Store, norms: np.ndarray) -> None:
    """Save the null of the index `examples` by an encoder. norms: of its rows, see `VectorFiles.save`."""
    rows = store.vectors.standardized(store.sentence_vectors()[1])
    drawn = np.random.default_rng(0).permutation(rows)[:NULL_VECTORS]
    deviation = float((rows @ vectors.unit(drawn).T).std()) if len(rows) else 1.0
    store.vectors.set_example_null(norms, store.example_tables.totals(len(norms)), deviation)
    store.controls.set({DEVIATION: deviation})

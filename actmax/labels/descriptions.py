"""`describe_neurons`: descriptions by a language model; `score_label`: labels that people write.

Both are scored as other labels are, on sentences that they were not made from.

The score is the AUROC by which the similarity of sentences to the description separates the sentences in which the
neuron is most active from the others. Its null are descriptions of other neurons by the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from icebear.actmax.index.encoder import encoder_of
from icebear.actmax.labels.auto import meaning_of, meanings_of, measure_activations
from icebear.actmax.labels.choice import Chosen, choose_labels, score_parts
from icebear.actmax.labels.kinds import Label
from icebear.actmax.labels.nulls import random_neurons
from icebear.actmax.labels.sample import prepare_samples, read_activations, split_of
from icebear.actmax.labels.sides import Sides, sides
from icebear.actmax.labels.significance import auroc_at, margin
from icebear.actmax.labels.writer import Writer
from icebear.db.store import Store
from icebear.db.terms import words
from icebear.db.vectors import unit
from icebear.errors import DownloadError, InputError, StoreError
from icebear.models.loading.encoder import Encoder
from icebear.models.model import Model
from icebear.records import POLARITIES, AutomaticLabel, Neuron
from icebear.steps import OnProgress, counting, unwatched

OTHERS = 20
"""The descriptions of random neurons that a description is compared with."""
BY = "sentence"


@dataclass(frozen=True)
class OtherDescriptions:
    """The margins of descriptions of other neurons for one side: a `LabelNull`."""

    labels: Sequence[Label]
    margins: np.ndarray

    def percentiles_95(self, layer: int) -> dict[str, float]:
        return {"other_neuron": float(np.quantile(self.margins, 0.95))} if len(self.margins) else {}

    def thresholds(self, by: str, layer: int) -> dict[str, float]:
        return {name: auroc_at(by, top) for name, top in self.percentiles_95(layer).items()}

    def is_significant(self, chosen: Chosen, layer: int) -> bool:
        by_chance = self.percentiles_95(layer).values()  # without other descriptions, nothing passes
        return chosen.margin >= 1 and bool(by_chance) and chosen.margin > max(by_chance)

    def p_value(self, chosen: Chosen, layer: int) -> float:
        return (1 + int((self.margins >= chosen.margin).sum())) / (1 + len(self.margins))

    def others(self, chosen: Chosen, layer: int, share: float) -> Sequence[Label]:
        return self.labels[:1]


def calls_left(store: Store, neurons: Sequence[Neuron], writer: Writer) -> int:
    """Return how many descriptions `describe_neurons` asks for: of sides that have none yet, and of other neurons."""
    known = _known(store, writer)
    wanted = sum(f"{neuron} {polarity}" not in known["sides"] for neuron in neurons for polarity in POLARITIES)
    return wanted + OTHERS - len(known["others"])


def describe_neurons(
    model: Model, store: Store, neurons: Sequence[Neuron], writer: Writer, on_progress: OnProgress = unwatched
) -> list[AutomaticLabel]:
    """Ask a writer for descriptions of neurons at both polarities, and score them.

    One that passes replaces the label of its side, unless that has a larger margin on the validation documents. Each
    description is saved at once, so that an interrupted call is resumed. Returns those of all neurons, with their
    scores.

    Parameters
    ----------
    model, store
        The store has vectors of a sentence encoder.
    neurons : sequence of Neuron
    writer : Writer
    on_progress : callable
        Called with (done, total) descriptions and sentences.

    Raises
    ------
    StoreError
        For an index of another model, without an encoder, or with too few documents.
    ModelError
        If the server does not answer as it should.
    """
    store.check(model.index_fingerprint, model.name, model.dtype_name)
    encoder = _encoder(store)
    parts = prepare_samples(model, store)
    advance = counting(on_progress, calls_left(store, neurons, writer) + sum(len(x.ids) for x in parts.values()))
    known = _known(store, writer)
    for neuron in random_neurons(model, store, 1, heads=False)[: OTHERS - len(known["others"])]:
        known["others"].append(_described(store, neuron, "+", writer))
        _save(store, writer, known)
        advance(1)
    for neuron in neurons:
        for polarity in POLARITIES:
            if (side := f"{neuron} {polarity}") not in known["sides"]:
                known["sides"][side] = _described(store, neuron, polarity, writer)
                _save(store, writer, known)
                advance(1)
    values = {part: read_activations(model, sample, neurons, advance) for part, sample in parts.items()}
    batch = sides(parts, neurons, values)
    texts = {side: [(known["sides"][f"{side[0]} {side[1]}"], str(writer))] for side in batch.names}
    meanings = _scored(batch, texts, known["others"], encoder, store)
    save_better(store, meanings)
    return meanings


def score_descriptions(
    model: Model,
    store: Store,
    texts: Mapping[tuple[Neuron, str], Sequence[tuple[str, str]]],
    others: Sequence[str],
    on_progress: OnProgress = unwatched,
) -> list[AutomaticLabel]:
    """Return descriptions that were written elsewhere with their scores on a store, which is not changed.

    texts: neuron and polarity -> descriptions, each with who wrote it. others: descriptions of other neurons; the first
    `OTHERS` that are not among those of a neuron are its null. Raises `StoreError`.
    """
    store.check(model.index_fingerprint, model.name, model.dtype_name)
    encoder, parts = _encoder(store), prepare_samples(model, store)
    neurons = sorted({neuron for neuron, _ in texts})
    advance = counting(on_progress, sum(len(sample.ids) for sample in parts.values()))
    values = {part: read_activations(model, sample, neurons, advance) for part, sample in parts.items()}
    return _scored(sides(parts, neurons, values), texts, others, encoder, store)


def _encoder(store: Store) -> Encoder:
    encoder = encoder_of(store)
    if encoder is None:
        raise StoreError(f"{store.path} has no vectors of a sentence encoder; run icebear index with --encoder minilm.")
    return encoder


def _name(writer: Writer) -> str:
    return f"descriptions by {writer}"


def _known(store: Store, writer: Writer) -> dict[str, Any]:
    return store.controls.get(_name(writer)) or {"others": [], "sides": {}}


def _save(store: Store, writer: Writer, known: dict[str, Any]) -> None:
    store.controls.set({_name(writer): known})


def _described(store: Store, neuron: Neuron, polarity: str, writer: Writer) -> str:
    """Return a description from examples of documents that do not test it; empty without such examples."""
    examples = [row for row in store.examples(neuron, polarity) if split_of(row.sentence.title) != "test"]
    return writer.describe(examples[: max(1, len(examples) // 2)]) if examples else ""


def _scored(
    batch: Sides,
    texts: Mapping[tuple[Neuron, str], Sequence[tuple[str, str]]],
    others: Sequence[str],
    encoder: Encoder,
    store: Store,
) -> list[AutomaticLabel]:
    """Return the scores of each side's descriptions, each with who wrote it. others: descriptions of other neurons."""
    meanings = []
    for row, side in enumerate(batch.names):
        written = texts.get(side, ())
        null = [text for text in others if text and text not in {text for text, _ in written}][:OTHERS]
        for text, writer in written:
            if not (batch.active[row] and text):
                meanings.append(AutomaticLabel.hardly_active(*side))
                continue
            meaning = score_description(batch, row, text, null, encoder, store)
            meaning.record["writer"] = writer
            meanings.append(meaning)
    return meanings


def score_description(
    batch: Sides, row: int, text: str, others: Sequence[str], encoder: Encoder, store: Store
) -> AutomaticLabel:
    """Return the scores of a description of a side. others: descriptions of other neurons, its null."""
    labels = [Label("description", (other,)) for other in dict.fromkeys(others) if other != text]
    for sample in (top.sample for top in batch.top.values()):
        for items in ((text,), *(label.items for label in labels)):
            if items not in sample.described:
                sample.described[items] = sample.vectors @ _direction(encoder.vector(items[0]), store)
    margins = [score_parts(label, BY, batch.top, row).margin for label in labels]
    chosen = score_parts(Label("description", (text,)), BY, batch.top, row)
    return meaning_of(batch, row, chosen, OtherDescriptions(labels, np.array(margins)))


def _direction(vector: np.ndarray, store: Store) -> np.ndarray:
    return unit((vector - store.vectors.center())[None])[0]


def score_label(
    model: Model, store: Store, neuron: Neuron, text: str, on_progress: OnProgress = unwatched
) -> list[AutomaticLabel]:
    """Score a label that a person wrote, at both polarities: its words, and what it says if the index has a sentence
    encoder that can be loaded.

    Its words are the tokens that the label is true at, with or without a space before them. What it says is scored as a
    description, against labels of other neurons as descriptions. Raises `InputError` for a text without words.
    """
    spelled = words(text.lower())
    if not spelled:
        raise InputError("A label without words cannot be scored; give a label with words.")
    store.check(model.index_fingerprint, model.name, model.dtype_name)
    parts = prepare_samples(model, store)
    advance = counting(on_progress, sum(len(sample.ids) for sample in parts.values()))
    values, nulls = measure_activations(model, store, parts, [neuron], advance)
    both = sides(parts, [neuron], values)
    tokens = Label("tokens", tuple(form for word in spelled for form in (word, f" {word}")))
    of_words = meanings_of(both, choose_labels([tokens], both.top), nulls)
    try:
        encoder = _encoder(store)
    except (StoreError, DownloadError):
        return of_words
    others = [label.text() for label, _ in nulls.nearest(neuron.layer)[:OTHERS]]
    rows = [row for row in range(len(both.names)) if both.active[row]]
    return [*of_words, *(score_description(both, row, text, others, encoder, store) for row in rows)]


def save_better(store: Store, meanings: Sequence[AutomaticLabel]) -> None:
    """Save the descriptions that pass, unless a label that passes has a larger margin on the validation documents."""
    saved = store.labels.automatic([meaning.neuron for meaning in meanings])
    for meaning in meanings:
        before = saved.get((meaning.neuron, meaning.polarity))
        if meaning.significant and not (before and before.significant and _margin(before) > _margin(meaning)):
            store.labels.set_automatic([meaning])


def _margin(meaning: AutomaticLabel) -> float:
    return margin(meaning.by, meaning.record["validation"])

"""An index as dashboards for Neuronpedia, by the schema of its upload."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from icebear.db.search import vocabulary_projections
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.paths import new_folder, write_file
from icebear.points import Source, model_id
from icebear.records import (
    HISTOGRAM_EDGES,
    POLARITIES,
    WRITERS,
    AutomaticLabel,
    Example,
    Neuron,
    NeuronStatistics,
    Projection,
)
from icebear.steps import OnProgress, unwatched

NEURONS_PER_FILE = 128
"""At most this many neurons are in a file."""
LOGITS = 10
SHOWN_TOKENS = 1024
"""Of a longer text, so many tokens around the largest activation."""
LONGEST_LABEL = 512
SAMPLED = 24
"""Neurons whose dashboards are written first, in memory, to estimate the size of all."""


def export_dashboards(
    store: Store,
    folder: str | Path,
    on_progress: OnProgress = unwatched,
    neurons: Sequence[Neuron] | None = None,
) -> dict[str, int]:
    """Write a new folder of files for Neuronpedia's upload, each with at most `NEURONS_PER_FILE` neurons of a source.

    neurons: by default all. A neuron without examples at a polarity is in no file of it. Returns how many neurons,
    sources and files there are. Raises `StoreError` if the scan is not finished or is not by activation, or for a
    neuron that the index lacks, `InputError` for a head, or if the folder is not new.
    """
    name, wanted = model_id(store.facts.get("model")), neurons_of(store, neurons)
    done, sources, files = 0, set(), 0
    with new_folder(folder) as part:
        for batch in _batches(wanted):
            for source, document in _documents(store, name, batch).items():
                write_file(part / f"{source}-{batch[0].index:06}.json", document)
                sources.add(source)
                files += 1
            done += len(batch)
            on_progress(done, len(wanted))
    return {"neurons": len(wanted), "sources": len(sources), "files": files}


def neurons_of(store: Store, neurons: Sequence[Neuron] | None) -> list[Neuron]:
    """Return the neurons to export, in order. Raises what `export_dashboards` raises."""
    store.check_finished()
    store.check_texts("Dashboards of Neuronpedia have sentences")
    for neuron in neurons or ():
        if neuron.site == "head":
            raise InputError(f"{neuron} is a head, which has no dashboard on Neuronpedia; give neurons.")
        store.neurons.id(neuron)
    return store.neurons.all_without_heads() if neurons is None else sorted(set(neurons))


def estimated_size(store: Store, neurons: Sequence[Neuron]) -> int:
    """Return about how many bytes the dashboards of neurons take, from those of `SAMPLED` neurons among them."""
    sample = neurons[:: -(-len(neurons) // SAMPLED)]
    written = (document for batch in _batches(sample) for document in _documents(store, "", batch).values())
    return sum(len(document.encode()) for document in written) * len(neurons) // max(len(sample), 1)


def _batches(neurons: Iterable[Neuron]) -> Iterator[list[Neuron]]:
    """Yield neurons, which are in order, by site and layer, in parts."""
    for _, group in groupby(neurons, lambda neuron: (neuron.layer, neuron.site)):
        rows = list(group)
        yield from (rows[start : start + NEURONS_PER_FILE] for start in range(0, len(rows), NEURONS_PER_FILE))


def _documents(store: Store, model: str, neurons: Sequence[Neuron]) -> dict[Source, str]:
    """Return the body of an upload for each source of neurons of a site and layer, as JSON."""
    return {
        source: json.dumps({"modelId": model, "source": str(source), "features": features}, allow_nan=False)
        for source, features in _dashboards(store, neurons).items()
    }


def _dashboards(store: Store, neurons: Sequence[Neuron]) -> dict[Source, list[dict[str, Any]]]:
    """Return the dashboards of neurons of a site and layer, by source."""
    features: dict[Source, list[dict[str, Any]]] = {}
    writes = neurons[0].site in WRITERS
    words = vocabulary_projections(store, neurons, LOGITS) if writes else [None] * len(neurons)
    for neuron, projection in zip(neurons, words, strict=True):
        for polarity, feature in dashboards(store, neuron, projection).items():
            features.setdefault(Source(neuron.layer, neuron.site, polarity), []).append(feature)
    return features


def dashboards(store: Store, neuron: Neuron, words: Projection | None) -> dict[str, dict[str, Any]]:
    """Return polarity -> a neuron as the schema has it, for the polarities that it has examples of."""
    statistics = store.neurons.statistics(neuron)
    features: dict[str, dict[str, Any]] = {}
    for polarity in POLARITIES:
        source = Source(neuron.layer, neuron.site, polarity)
        examples = [row for row in store.examples(neuron, polarity) if source.sign * row.activation > 0]
        if examples:
            features[polarity] = {
                "index": neuron.index,
                "density": density(statistics, polarity),
                "topLogits": _logits(words, polarity, "promoted"),
                "bottomLogits": _logits(words, polarity, "suppressed"),
                "explanations": _explanations(store, neuron, polarity),
                "activations": [_activation(row, source, statistics) for row in examples],
            }
    return features


def density(statistics: NeuronStatistics, polarity: str) -> float:
    """Return the share of tokens where a neuron has a polarity; of the negative one by the histogram."""
    if polarity == "+":
        return statistics.positive
    below = HISTOGRAM_EDGES.index(0.0) + 1
    return sum(statistics.histogram[:below]) / max(sum(statistics.histogram), 1)


def quantile(statistics: NeuronStatistics, value: float) -> tuple[float, float, float]:
    """Return the limits of the histogram's bin around a value, and the bin's share of the tokens that were drawn."""
    number = bisect_right(HISTOGRAM_EDGES, value)
    limits = (min(statistics.min, HISTOGRAM_EDGES[0]), *HISTOGRAM_EDGES, max(statistics.max, HISTOGRAM_EDGES[-1]))
    total = max(sum(statistics.histogram), 1)
    return limits[number], limits[number + 1], statistics.histogram[number] / total


def _logits(words: Projection | None, polarity: str, side: str) -> list[dict[str, Any]] | None:
    """Return tokens with logits; None if there are none, or if they stand out no more than those of random weights."""
    if words is None or not words.has_logits or not words.has_words:
        return None
    return [{"token": token.text, "value": token.logit} for token in getattr(words.at(polarity), side)]


def _explanations(store: Store, neuron: Neuron, polarity: str) -> list[dict[str, Any]]:
    """Return the label that a person wrote, and the significant automatic one, with scores compared with chance."""
    text, scores = store.labels.manual(neuron)
    rows = [(text, "written by a person", scores.get(polarity))] if text else []
    meaning: AutomaticLabel | None = store.labels.automatic([neuron]).get((neuron, polarity))
    if meaning and meaning.significant:
        rows.append((meaning.text, f"{meaning.kind} label", vars(meaning)))
    return [
        {"text": label[:LONGEST_LABEL], "methodName": f"icebear, {method}{_score(score)}"}
        for label, method, score in rows
    ]


def _score(score: dict[str, Any] | None) -> str:
    return f", AUROC {score['score']:.2f} by {score['by']} (chance 0.50)" if score else ""


def _activation(example: Example, source: Source, statistics: NeuronStatistics) -> dict[str, Any]:
    """Return a sentence with the activation at its token: an index does not have those of other tokens."""
    start = max(0, min(example.token - SHOWN_TOKENS // 2, len(example.sentence.tokens) - SHOWN_TOKENS))
    tokens = example.sentence.tokens[start : start + SHOWN_TOKENS]
    values = [0.0] * len(tokens)
    values[example.token - start] = source.sign * example.activation
    low, high, share = quantile(statistics, example.activation)
    limits = sorted((source.sign * low, source.sign * high))
    return {
        "tokens": list(tokens),
        "values": values,
        "quantileMin": limits[0],
        "quantileMax": limits[1],
        "quantileFraction": share,
    }

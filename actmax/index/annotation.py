"""`annotate`: why a neuron fired in its examples, token by token, stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from icebear.concepts.attribution.neurons import attribute_neurons
from icebear.concepts.methods.lrp import ATTNLRP, AttnLRP
from icebear.concepts.methods.registry import name_of
from icebear.concepts.models.model import Model
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.records import Example, Neuron
from icebear.values import several, shown, whole

BATCH = 8
"""Rows: more of them are padded more than they save."""
LAYERS = 5


def annotate(
    model: Model,
    store: Store,
    neurons: Neuron | str | Iterable[Neuron | str],
    k: int = 8,
    method: AttnLRP = ATTNLRP,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Attribute the k furthest examples of both signs of each neuron; those with an attribution are passed over.

    Commits after each batch. on_progress(done, total) counts examples. Returns how many were attributed. Raises
    `StoreError` for an index by relevance, whose examples are no extremes of the activation.
    """
    k = whole(k, "The number of examples")
    if not isinstance(method, AttnLRP):
        raise InputError(f"{shown(method)} does not explain a neuron; use AttnLRP(...) or CP_LRP.")
    named = [model.check(neuron) for neuron in several(neurons)]
    store.check_activations(model.fingerprint, model.name, model.dtype_name)
    limit = store.facts.get("max_tokens")
    wanted: list[tuple[Neuron, str, Example]] = [
        (neuron, polarity, example)
        for neuron in named
        for polarity in "+-"
        for example in store.examples(neuron, polarity, k, name_of(method))
        if example.relevance is None
    ]
    # Neurons of about the same depth, and extremes at about the same place, share a batch.
    wanted.sort(key=lambda row: (row[0].layer // LAYERS, row[2].token, row[0].layer, row[2].sentence.id))
    for start in range(0, len(wanted), BATCH):
        on_progress(start, len(wanted))
        rows = wanted[start : start + BATCH]
        results = attribute_neurons(
            model,
            [model.token_ids(example.sentence.text, limit) for _, _, example in rows],
            [neuron for neuron, _, _ in rows],
            [example.token for _, _, example in rows],
            method,
        )
        store.example_tables.add_attributions(
            name_of(method),
            [
                (neuron, polarity, example.sentence.id, result.tokens.tolist(), result.sums.to_dict())
                for (neuron, polarity, example), result in zip(rows, results, strict=True)
            ],
        )
    on_progress(len(wanted), len(wanted))
    return len(wanted)

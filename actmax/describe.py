"""`describe`: the card of a neuron, with everything that a store knows about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from icebear import values
from icebear.actmax.card import CROPS, Card, ExamplesBeside
from icebear.actmax.head_attention import HeadAttention, attended_piece, of_each_attended
from icebear.actmax.page import Crop
from icebear.actmax.shipped.index_choice import store_name
from icebear.db.store import Store
from icebear.errors import StoreError
from icebear.records import (
    EFFECT_SENTENCES,
    POLARITIES,
    WRITERS,
    AutomaticLabel,
    Example,
    Neuron,
    Projection,
    Writes,
    as_neuron,
    sign_of,
)
from icebear.values import typed

if TYPE_CHECKING:
    from icebear.models.model import Model

LARGE = 1 << 30
"""The size of a vector index in bytes that a card no longer reads (16 GB for an 8B model)."""


@typed
def describe(
    store: Store,
    neuron: Neuron | str,
    model: Model | None = None,
    k: int = 10,
    search_vectors: bool | None = None,
    effect_sentences: int = EFFECT_SENTENCES,
    beside: Store | None = None,
    crop: str | None = "patch",
) -> Card:
    """Describe a neuron or an attention head of an index.

    Parameters
    ----------
    store : Store
    neuron : Neuron or str
        Or a head, such as ``L23.head.4``.
    model : Model, optional
        With a model there are the direct vocabulary projection, exact (see `Store.vocabulary`), the one through the
        averaged Jacobian, and, if the model predicts next tokens, the measured effects on them. The examples of a head
        get the tokens that it attends to, which are then in the store.
    k : int
        The number of examples and tokens. Of the examples of a head that attend to the same token only the strongest
        is there, once that is measured.
    search_vectors : bool, optional
        Without a model, search the vector index for the vocabulary. Default: if it is smaller than 1 GiB.
    effect_sentences : int
        The number of examples of each polarity where effects are measured; 0 leaves them out.
    beside : Store, optional
        Another index of the same model, whose examples are shown too.
    crop : str, optional
        Of an index of images, with a model: which part of an image is shown, ``patch`` or ``relevance``
        (`icebear.actmax.crops.CROPS`); the relevance is that of `annotate`. None cuts no crops.

    Returns
    -------
    Card

    Raises
    ------
    InputError
        If the index has no such neuron.
    StoreError
        If the index is of another model.

    References
    ----------
    Gur-Arieh et al. 2025, "Enhancing Automated Interpretability with Output-Centric Feature Descriptions" (mean effects
    of a neuron on the next token).
    """
    neuron, k = as_neuron(neuron), values.check_int(k, "The number of examples")
    effect_sentences = values.check_int(effect_sentences, "The number of sentences with effects", 0)
    search_vectors = store.vectors.size() < LARGE if search_vectors is None else search_vectors
    statistics = store.neurons.statistics(neuron)
    meanings = {polarity: meaning for (_, polarity), meaning in store.labels.automatic([neuron]).items()}
    polarities: Sequence[str] = POLARITIES if neuron.site != "head" else POLARITIES[:1]
    examples = {polarity: store.examples(neuron, polarity) for polarity in polarities}
    attends_to: Counter[str] = Counter()
    if neuron.site == "head":
        rows = _checked_examples(model, store, neuron) if model else examples["+"]
        if not store.is_of_images:  # patches of different images have the same names
            attends_to.update(filter(None, map(attended_piece, rows)))
        examples["+"] = rows if store.is_of_images else of_each_attended(rows)
    vocabulary, effects = _of_model(model, store, neuron, k, examples, effect_sentences) if model else ([], {})
    if search_vectors and not model and neuron.site in WRITERS and store.count("tokens"):
        vocabulary = [store.vocabulary(neuron, k)]
    made_with, shown = store.made_with(), {polarity: rows[:k] for polarity, rows in examples.items()}
    projection, other = (*(replace(words, std=statistics.std) for words in vocabulary), None, None)[:2]
    label, label_scores = store.labels.manual(neuron)
    return Card(
        neuron,
        projection,
        other,
        writes=effects,
        examples=shown,
        statistics=statistics,
        meanings=meanings,
        held_out={polarity: held_out_examples(store, meaning) for polarity, meaning in meanings.items()},
        label=label,
        label_scores=label_scores,
        left_out=not search_vectors,
        made_with={**made_with, "index": {**made_with["index"], "file": store.path.name}},
        attention=HeadAttention.of(store, neuron) if neuron.site == "head" else None,
        attends_to=dict(attends_to.most_common()),
        beside=_beside(beside, neuron, k) if beside else (),
        crops=_crops(model, store, shown, crop) if model and crop is not None and store.is_of_images else {},
        crop=values.one_of("patch" if crop is None else crop, "crop", CROPS),
    )


def _beside(store: Store, neuron: Neuron, k: int) -> tuple[ExamplesBeside, ...]:
    """Return the examples of another index, if it has the neuron."""
    examples: dict[str, list[Example]]
    try:
        examples = {polarity: rows for polarity in POLARITIES if (rows := store.examples(neuron, polarity, k))}
    except StoreError:
        return ()
    return (ExamplesBeside(store_name(store), examples),) if examples else ()


def _crops(model: Model, store: Store, examples: dict[str, list[Example]], kind: str) -> dict[str, list[Crop]]:
    from icebear.actmax.crops import crops_of

    return {polarity: crops_of(model, store, rows, kind) for polarity, rows in examples.items()}


def _checked_examples(model: Model, store: Store, head: Neuron) -> list[Example]:
    from icebear.actmax.measure_heads import add_attention

    store.check(model.index_fingerprint, model.name)
    return add_attention(model, store, head)


def _of_model(
    model: Model, store: Store, neuron: Neuron, k: int, examples: dict[str, list[Example]], effect_sentences: int
) -> tuple[list[Projection], dict[str, Writes]]:
    """Return the projections and the measured effects."""
    from icebear.actmax.writes import writes
    from icebear.concepts.vocabulary.projection import both_projections

    vocabulary = both_projections(model, neuron, k) if neuron.site in WRITERS else []
    return vocabulary, writes(model, store, neuron, examples, effect_sentences) if effect_sentences else {}


def held_out_examples(store: Store, meaning: AutomaticLabel) -> dict[str, list[Example]]:
    """Return the groups of sentences from documents that a label was not made from."""
    groups = meaning.record.get("examples", {})
    sentences = store.sentences.of([row["sentence"] for rows in groups.values() for row in rows])
    sign = sign_of(meaning.polarity)
    return {
        name: [Example(sign * row["value"], row["token"], sentences[row["sentence"]]) for row in rows]
        for name, rows in groups.items()
    }

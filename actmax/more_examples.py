"""More sentences of one neuron or head than an index keeps: read now, from the corpus of the index.

An index keeps the strongest sentences of the documents that were scanned. This reads the documents after them, then the
scanned ones again, and skips the sentences that the index has for this neuron.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from icebear.actmax.card import ExamplesBeside
from icebear.actmax.index.corpus import Corpus, Document, read_corpus
from icebear.actmax.index.head_norms import HeadNorms, head_means
from icebear.actmax.reading import TEXTS_PER_PASS, counted_length
from icebear.concepts.passes.sites import hooks, neuron_site
from icebear.db.store import Store
from icebear.errors import StoreError
from icebear.models.model import Model
from icebear.records import POLARITIES, Example, InNotebooks, Neuron, Sentence, as_neuron, sign_of
from icebear.steps import OnProgress, unwatched
from icebear.values import check_int, typed

READ_AT_ONCE = 200
"""Sentences that are read at once."""


@dataclass(frozen=True, repr=False)
class MoreExamples(InNotebooks):
    """The strongest sentences of those that were read beside an index."""

    examples: dict[str, list[Example]]
    """By polarity, the strongest one first."""
    sentences: int
    """How many were read."""
    corpus: str

    @property
    def beside(self) -> ExamplesBeside:
        """The examples with what was read, for a card."""
        return ExamplesBeside(f"{self.sentences:,} more sentences of {self.corpus}, read now", self.examples)


@typed
def more_examples(
    model: Model,
    store: Store,
    neuron: Neuron | str,
    sentences: int = READ_AT_ONCE,
    k: int = 10,
    begin: MoreExamples | None = None,
    on_progress: OnProgress = unwatched,
) -> MoreExamples:
    """Read more sentences of the corpus of an index for one neuron, and return the strongest ones.

    Parameters
    ----------
    model : Model
        The model of the index.
    store : Store
        The index. Nothing is written to it.
    neuron : Neuron or str
        Or an attention head.
    sentences : int
        How many are read; fewer where the corpus has no more.
    k : int
        How many of each polarity are returned.
    begin : MoreExamples, optional
        What was read before: reading goes on behind it, and its examples stay among the strongest.
    on_progress : callable
        Called with (done, total) sentences.

    Returns
    -------
    MoreExamples

    Raises
    ------
    StoreError
        If the index is of another model or of images, or its corpus is not at hand any more.
    InputError
        If the index has no such neuron.
    """
    neuron, corpus = as_neuron(neuron), store.facts.all()["corpus"]
    begun = begin or MoreExamples({}, 0, corpus)
    check_int(k, "The number of examples")
    store.check(model.index_fingerprint, model.name)
    store.check_texts("More sentences are read from a corpus of texts")
    store.neurons.id(neuron)
    polarities = POLARITIES[:1] if neuron.site == "head" else POLARITIES
    stop = begun.sentences + check_int(sentences, "The number of sentences")
    read = list(itertools.islice(_unseen(store, neuron), begun.sentences, stop))
    strongest = {polarity: list(begun.examples.get(polarity, ())) for polarity in polarities}
    for values, sentence in _activations(model, neuron, read, store.facts.all()["max_tokens"], on_progress):
        for polarity in polarities:
            token = 1 + int((sign_of(polarity) * values)[1:].argmax())
            strongest[polarity].append(Example(values[token].item(), token, sentence))
    largest: dict[str, list[Example]] = {
        side: _largest(rows, side, neuron.site == "head")[:k] for side, rows in strongest.items()
    }
    return MoreExamples(largest, begun.sentences + len(read), corpus)


def _largest(rows: Sequence[Example], polarity: str, of_head: bool) -> list[Example]:
    """Return the active examples, the strongest one first; of a head one for each token, as in an index."""
    sign = sign_of(polarity)
    active = [row for row in rows if sign * row.activation > 0]
    ordered = sorted(active, key=lambda row: -sign * row.activation)
    of_tokens: dict[str, Example] = {}
    for row in ordered:
        of_tokens.setdefault(row.token_text, row)
    return list(of_tokens.values()) if of_head else ordered


def _unseen(store: Store, neuron: Neuron) -> Iterator[Sentence]:
    """Yield the sentences of the corpus that the index does not have for a neuron: those of documents that were not
    scanned, then the others."""
    shown = {row.sentence.id for side in POLARITIES for row in store.examples(neuron, side)}
    return (sentence for sentence in _corpus(store).sentences() if sentence.id not in shown)


def _corpus(store: Store) -> Corpus:
    """Return the corpus of an index, from the documents on that were not scanned. Raises `StoreError` if it changed."""
    facts = store.facts.all()
    if facts.get("from") == "neuronpedia":
        raise StoreError(
            f"The sentences of {store.path} come from dashboards, not from a corpus; choose an index of a corpus."
        )
    limit, named = facts.get("limit"), [facts[name] for name in ("language", "column", "config", "split", "revision")]
    scanned = read_corpus(facts["corpus"], limit, *named)
    if scanned.facts["content"] != facts["content"]:
        raise StoreError(f"{facts['corpus']} has changed since it was indexed; build the index anew.")
    if limit is None:
        return scanned
    larger = replace(scanned, limit=sys.maxsize)  # in the order of a sample, so it begins with the same documents

    def documents() -> Iterator[Document]:
        yield from itertools.islice(larger.documents(), limit, None)
        yield from scanned.documents()

    return replace(scanned, limit=None, source=documents)


@torch.no_grad()
def _activations(
    model: Model, neuron: Neuron, sentences: Sequence[Sentence], max_tokens: int, on_progress: OnProgress
) -> Iterator[tuple[Tensor, Sentence]]:
    """Yield the activations (T,) of a neuron at the tokens that count, and the sentence with its tokens."""
    special = model.special_ids()
    all_rows = [(sentence, model.token_ids(sentence.text, max_tokens)) for sentence in sentences]
    rows = [(*row, length) for row in all_rows if (length := counted_length(row[1], special)) > 1]
    site, of_neuron, done = neuron_site(neuron.site), _reading(model, neuron), 0
    for batch in model.batches_by_length([ids for _, ids, _ in rows], TEXTS_PER_PASS):
        seen: list[Tensor] = []
        with model.lock, hooks(model, [(site, neuron.layer)], lambda site, layer, x: seen.append(of_neuron(x))):  # noqa: B023
            model.final_stream(model.read([rows[number][1] for number in batch]))
        for row, number in enumerate(batch):
            sentence, ids, length = rows[number]
            yield seen[0][row, :length], replace(sentence, tokens=tuple(model.pieces(ids)))
        done += len(batch)
        on_progress(done, len(rows))


def _reading(model: Model, neuron: Neuron) -> Callable[[Any], Tensor]:
    """Return what reads the activations (B, T) of a neuron or head from those of its layer (B, T, N)."""
    if neuron.site != "head":
        return lambda x: x[..., neuron.index].float().cpu()
    norms = HeadNorms.of(model, head_means(model))
    return lambda z: norms(neuron.layer, z)[..., neuron.index].cpu()

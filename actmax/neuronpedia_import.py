"""Dashboards of Neuronpedia's upload, read back: their texts as a corpus, their labels scored, their activations
compared with measured ones."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from icebear.actmax.index.corpus import Corpus, Document, sentence_id
from icebear.actmax.labels.descriptions import score_descriptions
from icebear.actmax.neuronpedia import Source
from icebear.cache import sha256
from icebear.converters import checked
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.paths import local, read_text
from icebear.records import Meaning, Neuron
from icebear.steps import OnProgress, unwatched

CLOSE = 0.01
"""The share by which a measured activation may differ from an exported one, which may have fewer digits."""


class Agreement(NamedTuple):
    """How many exported activations are examples of a store, and how many of these were measured equal."""

    exported: int
    matched: int
    equal: int

    def __str__(self) -> str:
        text = (
            f"{self.matched:,} of {self.exported:,} exported activations are examples here; {self.equal:,} of them "
            f"were measured again within {CLOSE:.0%}."
        )
        return text if self.equal or not self.exported else f"{text} Check that the export is of this model."


@dataclass(frozen=True)
class Dashboards:
    """A folder of files of Neuronpedia's upload."""

    folder: Path
    special: frozenset[str]
    """The texts of the model's special tokens, which are no part of a text here."""

    @classmethod
    def of(cls, model: Model, folder: str | Path) -> Dashboards:
        """Return the dashboards of a folder, whose neurons the model must have. Raises `InputError`."""
        dashboards = cls(local(folder), frozenset(model.text(token) for token in model.special_ids()))
        if not dashboards.files:
            raise InputError(f"{folder} has no .json file; give the folder that icebear export neuronpedia wrote.")
        for source, feature in dashboards.features():
            model.check(_neuron(source, feature))
        return dashboards

    @cached_property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"))

    @cached_property
    def content(self) -> str:
        """The hash of all files."""
        return hashlib.sha256("".join(map(sha256, self.files)).encode()).hexdigest()

    def features(self) -> Iterator[tuple[Source, dict[str, Any]]]:
        """Yield each neuron at a polarity. Raises `InputError` for a file of another shape."""
        for path in self.files:
            try:
                document = json.loads(read_text(path))
                source = Source.parse(checked(document["source"], isinstance(document["source"], str), str))
                for feature in document["features"]:
                    yield source, _checked(feature)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                raise InputError(
                    f"{path} is not a file of Neuronpedia's upload; remove it, or export the dashboards again."
                ) from None

    def corpus(self) -> Corpus:
        """Return the texts as a corpus, each once and a document by itself."""
        facts = {"corpus": str(self.folder), "language": "en", "column": "text", "content": self.content}
        return Corpus({**facts, "order": "as read", "from": "neuronpedia"}, None, self._texts, is_split=True)

    def _texts(self) -> Iterator[Document]:
        seen: set[int] = set()
        for _, feature in self.features():
            for activation in feature["activations"]:
                text, identity = self._text(activation), sentence_id(self._text(activation))
                if text and identity not in seen:
                    seen.add(identity)
                    yield f"{self.folder.name} {len(seen)}", text

    def _text(self, activation: dict[str, Any]) -> str:
        return "".join(token for token in activation["tokens"] if token not in self.special).strip()

    def labels(self) -> dict[tuple[Neuron, str], list[tuple[str, str]]]:
        """Return neuron and polarity -> the labels of the files, each with where it comes from; none without text."""
        labels: dict[tuple[Neuron, str], list[tuple[str, str]]] = {}
        for source, feature in self.features():
            for row in feature.get("explanations") or ():
                if not row["text"].strip():
                    continue
                method = ", ".join(row[name] for name in ("methodName", "modelName") if row.get(name))
                written = f"{self.folder.name}{f' ({method})' * bool(method)}"
                labels.setdefault((_neuron(source, feature), source.polarity), []).append((row["text"], written))
        return labels

    def agreement(self, store: Store) -> Agreement:
        """Return how the exported activations compare with those of a store's examples."""
        exported = matched = equal = 0
        for source, feature in self.features():
            examples = store.examples(_neuron(source, feature), source.polarity)
            measured = {row.sentence.text: source.sign * row.activation for row in examples}
            for activation in feature["activations"]:
                exported += 1
                value, again = max(activation["values"]), measured.get(self._text(activation))
                matched += again is not None
                equal += again is not None and abs(again - value) <= CLOSE * abs(value)
        return Agreement(exported, matched, equal)


def _neuron(source: Source, feature: dict[str, Any]) -> Neuron:
    return Neuron(source.layer, source.site, feature["index"])


def _checked(feature: Any) -> dict[str, Any]:
    """Return a neuron with the types that are read here. Raises `TypeError`, `KeyError`, `ValueError` or, for a number
    that is too large, `OverflowError`."""
    checked(feature["index"], type(feature["index"]) is int, int)
    for activation in _list(feature["activations"]):
        tokens, values = _list(activation["tokens"]), _list(activation["values"])
        if not (len(tokens) == len(values) > 0):
            raise ValueError("an activation has as many tokens as values")
        for token, value in zip(tokens, values, strict=True):
            checked(token, isinstance(token, str), str)
            checked(value, type(value) in (int, float) and math.isfinite(value), float)
    for row in _list(feature.get("explanations") or []):
        checked(row, isinstance(row, dict), dict)
        for name in ("text", "methodName", "modelName"):
            text = row.get(name)
            checked(text, isinstance(text, str) or (text is None and name != "text"), str)
    return feature


def _list(value: Any) -> list[Any]:
    """Raises `TypeError` for anything else."""
    return checked(value, isinstance(value, list), list)


def score_labels(
    model: Model, store: Store, dashboards: Dashboards, on_progress: OnProgress = unwatched
) -> list[Meaning]:
    """Score the labels of dashboards on sentences of a store, and save those that pass. The null are labels of other
    neurons: of the dashboards, then of the store.

    Returns all labels with their scores. Raises `StoreError` for a store of another model, without vectors of a
    sentence encoder, or with too few sentences.
    """
    labels = dashboards.labels()
    if not labels:
        return []
    texts = [text for rows in labels.values() for text, _ in rows]
    others = list(dict.fromkeys([*texts, *store.labels.sides().values()]))
    return score_descriptions(model, store, labels, others, on_progress)


def is_of(store: Store, dashboards: Dashboards) -> bool:
    """Return whether a store is, or was begun as, the index of these dashboards' texts."""
    return store.facts.all().get("content") == dashboards.content

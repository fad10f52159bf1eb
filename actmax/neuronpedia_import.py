"""Dashboards of Neuronpedia's upload, read back: their texts as a corpus, their labels scored, their activations
compared with measured ones."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from icebear.actmax.index.corpus import Corpus, Document, sentence_id
from icebear.actmax.labels.descriptions import save_better, score_descriptions
from icebear.actmax.shipped.index_choice import store_name
from icebear.cache import sha256
from icebear.converters import checked
from icebear.db.store import Store
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.paths import local, opened, read_text
from icebear.points import Source
from icebear.records import AutomaticLabel, Neuron
from icebear.steps import OnProgress, unwatched

LINES = (".jsonl", ".jsonl.gz")
"""The endings of files with a row in each line."""
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
            raise InputError(
                f"{folder} has no .json, .jsonl or .jsonl.gz file; give the folder that icebear export neuronpedia "
                "wrote, or one of Neuronpedia's exports."
            )
        for source, feature in dashboards.features():
            model.check(_neuron(source, feature))
        return dashboards

    @cached_property
    def files(self) -> list[Path]:
        """The uploads of the folder, and the lines of Neuronpedia's exports in it and in its folders."""
        uploads = self.folder.glob("*.json")
        return sorted((*uploads, *(path for ending in LINES for path in self.folder.rglob(f"*{ending}"))))

    @cached_property
    def content(self) -> str:
        """The hash of all files."""
        return hashlib.sha256("".join(map(sha256, self.files)).encode()).hexdigest()

    @cached_property
    def sides(self) -> frozenset[tuple[Neuron, str]]:
        """The neurons at polarities that there are."""
        return frozenset((_neuron(source, feature), source.polarity) for source, feature in self.features())

    def features(self) -> Iterator[tuple[Source, dict[str, Any]]]:
        """Yield each neuron at a polarity, of an export in parts. Raises `InputError` for a file of another shape."""
        for path in self.files:
            try:
                for source, feature in _exported(path) if path.name.endswith(LINES) else _uploaded(path):
                    yield Source.parse(checked(source, isinstance(source, str), str)), _checked(feature)
            except (OSError, EOFError, zlib.error) as error:
                raise InputError(f"{path} cannot be read ({error}); export it again.") from None
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                raise InputError(
                    f"{path} is not a file of Neuronpedia's upload or export; remove it, or export the dashboards "
                    "again."
                ) from None

    def corpus(self) -> Corpus:
        """Return the texts as a corpus, each once and a document by itself."""
        facts = {"corpus": str(self.folder), "language": "en", "column": "text", "content": self.content}
        facts |= {"order": "as read", "from": "neuronpedia"}
        return Corpus(facts, None, self._texts, is_split=True, sides=self.sides)

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

        @lru_cache(64)  # an export has a line for each activation
        def measured(source: Source, neuron: Neuron) -> dict[str, float]:
            examples = store.examples(neuron, source.polarity)
            return {row.sentence.text: source.sign * row.activation for row in examples}

        for source, feature in self.features():
            examples = measured(source, _neuron(source, feature)) if feature["activations"] else {}
            for activation in feature["activations"]:
                exported += 1
                value, again = max(activation["values"]), examples.get(self._text(activation))
                matched += again is not None
                equal += again is not None and abs(again - value) <= CLOSE * abs(value)
        return Agreement(exported, matched, equal)


def _uploaded(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the source and each neuron of a file of the upload."""
    document = json.loads(read_text(path))
    for feature in document["features"]:
        yield document["source"], feature


def _exported(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the source and a neuron, as an upload has it, for each activation and explanation of Neuronpedia's exports,
    which have one in a line; lines of other tables are passed over."""
    with opened(path) as file:
        for line in filter(str.strip, file):
            row = json.loads(line)
            checked(row, isinstance(row, dict), dict)
            if not (row.keys() >= {"layer", "index"} and row.keys() & {"tokens", "description"}):
                continue
            feature: dict[str, Any] = {"index": int(row["index"]), "activations": [], "explanations": []}
            if "tokens" in row:
                feature["activations"].append({"tokens": row["tokens"], "values": row["values"]})
            else:
                names = {"text": "description", "methodName": "typeName", "modelName": "explanationModelName"}
                feature["explanations"].append({ours: row.get(theirs) for ours, theirs in names.items()})
            yield row["layer"], feature


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
    model: Model,
    store: Store,
    dashboards: Dashboards,
    on_progress: OnProgress = unwatched,
    scored_on: Store | None = None,
) -> list[AutomaticLabel]:
    """Score the labels of dashboards on sentences of a store, and save those that pass. The null are labels of other
    neurons: of the dashboards, then of the store.

    scored_on: another index of the model, on whose sentences labels are scored, and whose labels are the null, too.

    Returns all labels with their scores. Raises `StoreError` for a store of another model, without vectors of a
    sentence encoder, or with too few sentences.
    """
    labels = dashboards.labels()
    if not labels:
        return []
    texts, scored_on = [text for rows in labels.values() for text, _ in rows], scored_on or store
    others = list(dict.fromkeys([*texts, *scored_on.labels.by_side().values()]))
    meanings = score_descriptions(model, scored_on, labels, others, on_progress)
    for meaning in meanings:
        save_better(store, [meaning if scored_on is store else _without_sentences(meaning, store_name(scored_on))])
    return meanings


def _without_sentences(meaning: AutomaticLabel, scored_on: str) -> AutomaticLabel:
    """Return a label for a store that lacks the sentences of the one that it was scored on."""
    if not meaning.record:
        return meaning
    writer = f"{meaning.record['writer']}, scored on {scored_on}"
    return replace(meaning, record={**meaning.record, "examples": {}, "writer": writer})


def is_of(store: Store, dashboards: Dashboards) -> bool:
    """Return whether a store is, or was begun as, the index of these dashboards' texts."""
    return store.facts.find("content") == dashboards.content

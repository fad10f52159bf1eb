"""Labels of neurons: written by people, or made by `icebear.actmax.labels`, with scores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from icebear.db.neuron_tables import NeuronTables
from icebear.db.sqlite import SqliteFile, json_list, reads, with_types
from icebear.records import POLARITIES, AutomaticLabel, Neuron, as_neuron
from icebear.values import one_of, several, shown, text_of


class LabelTables:
    """The tables `labels` (written by people) and `meanings` (automatic)."""

    def __init__(self, file: SqliteFile, neurons: NeuronTables) -> None:
        self.file, self.neurons = file, neurons

    @reads
    def manual(self, neuron: Neuron | str) -> tuple[str | None, dict[str, dict[str, Any]]]:
        """Return the label that a person wrote, and polarity -> its scores, if it was scored."""
        query = "SELECT text, scores FROM labels WHERE neuron = ?"
        row = self.file.database.execute(query, (self.neurons.id(neuron),)).fetchone()
        if row is None:
            return None, {}
        text, scores = with_types(row, str, str)
        rows = json_list(scores, dict)
        for score in rows:
            with_types((score["score"], score["by"]), float, str)
        best_last = sorted(rows, key=lambda row: (row.get("significant", False), row["score"]))
        return text, {score["polarity"]: score for score in best_last}

    def set_manual(self, neuron: Neuron | str, text: str, scores: Sequence[AutomaticLabel] = ()) -> None:
        """Save a label with its scores; an empty text removes the label."""
        identity, text = self.neurons.id(neuron), text_of(text).strip()
        with self.file.writing():
            self.file.database.execute("DELETE FROM labels WHERE neuron = ?", (identity,))
            if text:
                self.file.insert("labels", [(identity, text, json.dumps([meaning.to_dict() for meaning in scores]))])

    def set_automatic(self, meanings: Iterable[AutomaticLabel]) -> None:
        """Save automatic labels; they replace those of the same neurons and polarities."""
        rows = (
            (
                *(m.neuron.layer, m.neuron.site, m.neuron.index, POLARITIES.index(m.polarity)),
                *(m.kind, m.text, m.by, m.score, m.p, m.significant, json.dumps(m.record, ensure_ascii=False)),
            )
            for m in meanings
        )
        self.file.insert("meanings", rows)

    @reads
    def automatic(self, neurons: Neuron | str | Iterable[Neuron | str]) -> dict[tuple[Neuron, str], AutomaticLabel]:
        """Return (neuron, polarity) -> automatic label; neurons without label are absent."""
        query = "SELECT * FROM meanings WHERE layer = ? AND site = ? AND idx = ? ORDER BY polarity"
        rows = (
            row
            for n in map(as_neuron, several(neurons))
            for row in self.file.database.execute(query, (n.layer, n.site, n.index))
        )
        return {(meaning.neuron, meaning.polarity): meaning for meaning in map(_meaning, rows)}

    @reads
    def all_automatic(self) -> list[AutomaticLabel]:
        """Return all automatic labels, without their records."""
        query = "SELECT layer, site, idx, polarity, kind, text, by, score, p, significant, '{}' FROM meanings"
        return list(map(_meaning, self.file.database.execute(query)))

    @reads
    def significant(self) -> list[tuple[int, str, str, float, float]]:
        """Return neuron id, polarity, text, score and p of the significant automatic labels, best first."""
        query = "SELECT id, polarity, text, score, p FROM meanings JOIN neurons USING (layer, site, idx)"
        rows = self.file.database.execute(f"{query} WHERE significant ORDER BY score DESC, id, polarity")
        checked = (with_types(row, int, int, str, float, float) for row in rows)
        return [(number, POLARITIES[polarity], *rest) for number, polarity, *rest in checked]

    @reads
    def by_side(self) -> dict[str, str]:
        """Return every side with a label, such as ``L1.ffn.3 +`` -> the label that a person wrote, or else the
        significant automatic one."""
        query = (
            "SELECT name, polarity, text FROM meanings JOIN neuron_names USING (layer, site, idx) WHERE significant "
            "UNION ALL SELECT name, column1, text FROM labels JOIN neuron_names ON neuron = id, (VALUES (0), (1))"
        )
        rows = (with_types(row, str, int, str) for row in self.file.database.execute(query))
        return {f"{name} {POLARITIES[polarity]}": text for name, polarity, text in rows}

    @reads
    def shown(self, neuron: Neuron | str, polarity: str) -> str | None:
        """Return the label that a person wrote, or else the significant automatic label with its score, or None."""
        neuron, polarity = as_neuron(neuron), one_of(polarity, "polarity", (*POLARITIES, ""))
        row = self.file.database.execute(
            "SELECT text FROM labels JOIN neurons ON neuron = id WHERE layer = ? AND site = ? AND idx = ?",
            (neuron.layer, neuron.site, neuron.index),
        ).fetchone()
        if row:
            return row[0]
        meaning = self.automatic([neuron]).get((neuron, polarity))
        return meaning.badge if meaning and meaning.significant else None


def _meaning(row: tuple) -> AutomaticLabel:
    layer, site, idx, polarity, kind, text, by, score, p, significant, record = row
    with_types((kind, text, by, score, p), str, str, str, float, float)
    if by not in ("token", "sentence", "pattern"):
        raise ValueError(f"{shown(by)} is not a unit")
    neuron = Neuron(layer, site, idx)
    return AutomaticLabel(
        neuron, POLARITIES[polarity], kind, text, by, score, p, bool(significant), _checked(json.loads(record))
    )


def _checked(record: Any) -> dict[str, Any]:
    """Return the record of a label: empty, or with what a card shows of it. Raises `KeyError` and `TypeError`."""
    (record,) = with_types([record], dict)
    if record:
        thresholds, examples, _ = with_types(
            (record[name] for name in ("thresholds", "examples", "label")), dict, dict, dict
        )
        known = [record[name] for name in ("other_neuron", "train") if record[name] is not None]
        numbers = [*known, record["token_mean"], record["auroc"]["token"], *thresholds.values()]
        with_types(numbers, *[float | int] * len(numbers))
        with_types([record["sentences"]["test"]], int)
        for row in (row for rows in examples.values() for row in rows):
            with_types((row["sentence"], row["token"], row["value"]), int, int, float | int)
    return record

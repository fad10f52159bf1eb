"""The neurons and attention heads of an index: ids and statistics."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

from icebear.db.sqlite import SqliteFile, json_list, reads, with_types
from icebear.errors import StoreError
from icebear.records import Neuron, NeuronStatistics, as_neuron
from icebear.values import one_of


class NeuronTables:
    """The table `neurons`, which a scan fills."""

    def __init__(self, file: SqliteFile) -> None:
        self.file = file

    @reads
    def id(self, neuron: Neuron | str) -> int:
        """Return the id of a neuron. Raises `StoreError` if the index does not have it."""
        neuron = as_neuron(neuron)
        query = "SELECT id FROM neurons WHERE layer = ? AND site = ? AND idx = ?"
        row = self.file.database.execute(query, (neuron.layer, neuron.site, neuron.index)).fetchone()
        if row is None:
            raise StoreError(f"This index has no {neuron}: {self.why_not(neuron)}.")
        return row[0]

    def why_not(self, neuron: Neuron) -> str:
        """Say what the index has instead of a neuron that it lacks."""
        sizes = self.sizes()
        if neuron.site in sizes:
            layers, width = sizes[neuron.site]
            return f"its layers are 0 to {layers - 1}, their {neuron.site} neurons 0 to {width - 1}"
        lacks = f"it has {', '.join(sizes)}, not {neuron.site!r}" if sizes else "its scan is not finished"
        return f"{lacks}; run icebear index --store {self.file.path}"

    @reads
    def of(self, ids: Iterable[int]) -> dict[int, Neuron]:
        query = "SELECT layer, site, idx FROM neurons WHERE id = ?"
        return {identity: Neuron(*self.file.database.execute(query, (identity,)).fetchone()) for identity in ids}

    @reads
    def count_without_heads(self) -> int:
        """Return the number of neurons; the ids of heads follow theirs."""
        return self.file.database.execute("SELECT COUNT(*) FROM neurons WHERE site != 'head'").fetchone()[0]

    @reads
    def all_without_heads(self) -> list[Neuron]:
        """Return all neurons, without heads, in order of layer, site and index."""
        query = "SELECT layer, site, idx FROM neurons WHERE site != 'head' ORDER BY layer, site, idx"
        rows = self.file.database.execute(query)
        return [Neuron(*row) for row in rows]

    @reads
    def all_with_heads(self) -> list[Neuron]:
        """Return all neurons and heads, in order of id."""
        rows = self.file.database.execute("SELECT layer, site, idx FROM neurons ORDER BY id")
        return [Neuron(*row) for row in rows]

    @reads
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return site -> the number of layers, and of neurons in each."""
        rows = self.file.database.execute("SELECT site, MAX(layer) + 1, MAX(idx) + 1 FROM neurons GROUP BY site")
        return {site: (layers, width) for site, layers, width in rows}

    @reads
    def statistics(self, neuron: Neuron | str) -> NeuronStatistics:
        """Return the statistics of a neuron. Raises `StoreError` if the index does not have it."""
        (row,) = self.file.database.query("SELECT * FROM neurons WHERE id = ?", (self.id(neuron),))
        numbers = {name: value for name, value in row.items() if name not in ("id", "layer", "site", "idx")}
        histogram = json_list(numbers.pop("histogram"), int)
        with_types(numbers.values(), *[Real] * len(numbers))
        known = {name: numbers.pop(name) for name in ("mean", "std", "min", "max", "positive")}
        return NeuronStatistics(as_neuron(neuron), **known, histogram=histogram, more=numbers)

    @reads
    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of the table, in order of id."""
        rows = list(self.file.database.query("SELECT * FROM neurons ORDER BY id"))
        return {name: [row[name] for row in rows] for name in rows[0]}

    @reads
    def statistic(self, neuron: Neuron | str, unit: str) -> float:
        """Return the ``max`` (largest magnitude) or ``std`` of a neuron, for edits in these units."""
        statistics = self.statistics(neuron)
        known = {"max": max(abs(statistics.max), abs(statistics.min)), "std": statistics.std}
        return known[one_of(unit, "statistic of a neuron", known)]

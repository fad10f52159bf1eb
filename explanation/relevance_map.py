"""Relevance by layer, and the neurons of two prompts, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas

from icebear.concepts.results.result import Relevance
from icebear.render import visible


def relevance_map(relevance: Relevance, site: str) -> pandas.DataFrame:
    """Return the relevance of each layer (rows) by token, for the site ``heads`` by head, without attention sinks."""
    positions = [position for position in range(len(relevance.tokens)) if position not in relevance.prompt.sinks]
    if site == "heads":
        return pandas.DataFrame(relevance.heads()[:, positions].sum(1).numpy())
    names = [f"{position} {visible(relevance.prompt.strings[position])}" for position in positions]
    return pandas.DataFrame(relevance.layers(site)[:, positions].numpy(), columns=names)


def shared_neurons(sides: Mapping[str, Relevance], site: str | None, count: int) -> pandas.DataFrame:
    """Return the top neurons of two prompts at the last token, with their relevance in each; shared ones first.

    sides: a name for each prompt, and its relevance.
    """
    left, right = sides
    top = {name: {row.neuron: row.polarity for row in side.top(count, site)} for name, side in sides.items()}
    rows: list[dict[str, Any]] = [
        {
            "neuron": str(neuron),
            "sign": sign,
            "in": left if neuron not in top[right] else right if neuron not in top[left] else "both",
            **{name: side.of_neuron(neuron) for name, side in sides.items()},
        }
        for neuron, sign in (top[right] | top[left]).items()
    ]
    rows.sort(key=lambda row: (row["in"] != "both", -max(row[left], row[right])))
    return pandas.DataFrame(rows)

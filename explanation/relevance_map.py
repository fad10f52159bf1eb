"""Relevance by layer, as a table."""

from __future__ import annotations

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

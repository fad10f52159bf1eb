"""What the strongest neurons and heads of an explanation mean: their labels that passed."""

from __future__ import annotations

from typing import NamedTuple

from icebear.concepts.results.result import Relevance
from icebear.db.store import Store
from icebear.records import AutomaticLabel, Ranked

STRONGEST = 20
"""Neurons and heads whose labels are looked up."""


class NodeMeaning(NamedTuple):
    """A neuron or head at the predicting token, with its label."""

    node: Ranked
    share: float
    """Its relevance, divided by the number that is explained."""
    meaning: AutomaticLabel


def node_meanings(relevance: Relevance, store: Store, k: int = STRONGEST) -> list[NodeMeaning]:
    """Return those of the strongest nodes at the predicting token whose label is significant, the strongest first.

    Parameters
    ----------
    relevance : Relevance
        With neurons at the predicting token.
    store : Store
        The index with the labels. A head has its label where its activation, a norm, is large.
    k : int
        The number of FFN neurons and heads together with the largest positive relevance that are looked at.

    Returns
    -------
    list of NodeMeaning
        At most k. Empty if the explained number is not positive, of which there are no shares.
    """
    total = relevance.sums.target
    if total <= 0:
        return []
    sites = [site for site, recorded in (("ffn", "ffn"), ("head", "attn")) if recorded in relevance.sites]
    rows = [row for site in sites for row in relevance.top(k, site=site)]
    rows = sorted(rows, key=lambda row: -row.relevance)[:k]
    known = store.labels.automatic(dict.fromkeys(row.neuron for row in rows))
    labels = ((row, known.get((row.neuron, row.polarity or "+"))) for row in rows)
    return [NodeMeaning(row, row.relevance / total, label) for row, label in labels if label and label.significant]

"""The effects of nodes on likely next words as a picture: a row for each node, a column for each word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from markupsafe import Markup
from torch import Tensor

from icebear.concepts.results.effect_words import SHOWN, effect_words, is_word
from icebear.explanation.sentences import effect_text
from icebear.records import Ranked
from icebear.render import NEGATIVE, POSITIVE, hexadecimal, render

if TYPE_CHECKING:
    from icebear.explanation.record import ExplainedPrediction

MAP_NODES = 24
"""The largest number of rows of the picture."""
GROUP_NODES = 6
"""The largest number of rows of a group, so that its other groups and nodes have rows too."""
MAP_WORDS = 30
"""The largest number of columns."""
FULL = 0.95
"""The quantile of sizes of effects that has the full color, so that one strong node does not make all others pale."""


@dataclass(frozen=True, eq=False)
class EffectMap:
    """Effects of N nodes on K words."""

    nodes: tuple[Ranked, ...]
    labels: tuple[str, ...]
    """(N,) the nodes with their tokens."""
    groups: tuple[int, ...]
    """(N,) the group of each node, from 1; 0 for nodes of no group that is shown."""
    words: tuple[str, ...]
    """(K,) the word that all these nodes together raise most first."""
    matrix: Tensor
    """(N, K) in logits, relative to the other likely tokens."""

    @property
    def full(self) -> float:
        """The size of the effects that have the full color."""
        return self.matrix.abs().quantile(FULL).item() or 1.0

    @property
    def shares(self) -> list[list[float]]:
        """(N, K) the strength of the colors, -1 to 1."""
        return (self.matrix / self.full).clamp(-1, 1).tolist()

    def __str__(self) -> str:
        """The picture in words."""
        rows = zip(self.labels, self.matrix, strict=True)
        return ". ".join(f"{label}: {effect_text(*effect_words(self.words, row, 3))}" for label, row in rows)

    def to_svg(self) -> Markup:
        """Return the picture, in the colors of its page."""
        return render(
            "icebear.explanation/effect_map.svg",
            effects=self,
            rows=list(zip(self.labels, self.groups, self.matrix.tolist(), self.shares, strict=True)),
            positive=hexadecimal(POSITIVE),
            negative=hexadecimal(NEGATIVE),
        )


def effect_map(explanation: ExplainedPrediction) -> EffectMap | None:
    """Return the effects of the first nodes of each group, then of ranked nodes of no group, on the words with the
    largest effects. None where effects were not measured, or where no likely token is a word."""
    effects = explanation.effects
    if effects is None:
        return None
    rows: dict[Ranked, tuple[int, Tensor]] = {}
    for number, explained in enumerate(explanation.groups, 1):
        nodes = explained.group.nodes[:GROUP_NODES]
        rows |= {node: (number, effect) for node, effect in zip(nodes, explained.group.each, strict=False)}
    grouped = {node for explained in explanation.groups for node in explained.group.nodes}
    measured = zip(effects.nodes, effects.matrix, strict=True)
    alone = [(node, (0, effect)) for node, effect in measured if node not in grouped]
    rows |= alone[: MAP_NODES - len(rows)]
    matrix = torch.stack([row for _, row in rows.values()])
    columns = _columns(effects.tokens, matrix)
    if not columns:
        return None
    strings = explanation.relevance.prompt.strings
    return EffectMap(
        tuple(rows),
        tuple(f"{node.neuron}@{node.position} {strings[node.position]!r}" for node in rows),
        tuple(number for number, _ in rows.values()),
        tuple(effects.tokens[column].strip() for column in columns),
        matrix[:, columns],
    )


def _columns(tokens: tuple[str, ...], matrix: Tensor) -> list[int]:
    """Return the columns of the words with the largest effects, the most raised first."""
    words: dict[str, int] = {}
    for column, text in enumerate(tokens[:SHOWN]):
        if is_word(text.strip()):
            words.setdefault(text.strip().casefold(), column)
    size, total = matrix.norm(dim=0).tolist(), matrix.sum(0).tolist()
    largest = sorted(words.values(), key=lambda column: -size[column])[:MAP_WORDS]
    return sorted(largest, key=lambda column: -total[column])

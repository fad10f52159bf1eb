"""Where an attention head looks: the shares of its attention, and its kinds, each with its control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icebear.records import Example

if TYPE_CHECKING:
    from icebear.db.store import Store
    from icebear.records import Neuron

MEASURED = "heads"
"""The name of the measurement of all heads among the controls of a store."""
MOST = 0.5
SHARES = {"first": "the first token", "previous": "the token before", "itself": "itself"}
KINDS = {
    "induction": (
        "induction: after the repetition of a token, it attends to the token that followed before",
        "of any head where nothing repeats",
    ),
    "duplicate": (
        "duplicate token: it attends to the same token earlier in the text",
        "of any head where nothing repeats",
    ),
    "previous": ("previous token: it attends to the token before", "of any head to a token 2 to 20 before"),
    "itself": ("current token: it attends to its own token", "of any head to a token 2 to 20 before"),
    "first": ("first token: it attends to the start of the text", "of any head to one of the tokens 2 to 20"),
}
"""Kind -> what such a head does, and the attention that is its null."""


def attended_token(example: Example) -> int | None:
    """Return the position of the token that a head attends to most; None if its attention is not measured."""
    weights = example.relevance
    return weights.index(max(weights)) if weights else None


def attended_piece(example: Example) -> str | None:
    """Return the text of the token that a head attends to most; None if its attention is not measured."""
    token = attended_token(example)
    if token is None:
        return None
    # An empty piece is part of a character that a later token completes.
    return next(filter(None, example.sentence.tokens[token:]))


def of_each_attended(examples: Sequence[Example]) -> list[Example]:
    """Return the strongest example for each token that a head attends to; all those without measured attention.

    examples: strongest first.
    """
    pieces: dict[str | int, Example] = {}
    for number, example in enumerate(examples):
        piece = attended_piece(example)
        pieces.setdefault(number if piece is None else piece, example)
    return list(pieces.values())


@dataclass(frozen=True)
class HeadAttention:
    """Means of the attention of a head, with their controls."""

    shares: dict[str, tuple[float, float]]
    """Where to (`SHARES`) -> the share of its attention in the calibration texts, and that of even attention."""
    kinds: dict[str, tuple[float, float]]
    """Kind (`KINDS`) -> the share of its attention on random tokens, and the null: the largest share that any head of
    the model has by chance."""

    @classmethod
    def of(cls, store: Store, head: Neuron) -> HeadAttention | None:
        """Return what an index has of a head; None without a measurement, as for models of several stacks."""
        measured = store.controls.get(MEASURED)
        if not measured:
            return None

        def pairs(part: str) -> dict[str, tuple[float, float]]:
            rows = measured[part].items()
            return {name: (row["heads"][head.layer][head.index], row["control"]) for name, row in rows}

        return cls(pairs("shares"), pairs("kinds"))

    @property
    def named(self) -> list[str]:
        """The kinds whose share is above the null, the largest share first; the first token last, and only with most of
        the attention: nearly all heads attend to it where they have nothing to do."""
        above = [kind for kind, (share, null) in self.kinds.items() if share > null]
        above = [kind for kind in above if kind != "first" or self.kinds[kind][0] > MOST]
        return sorted(above, key=lambda kind: (kind == "first", -self.kinds[kind][0]))

    @property
    def lines(self) -> list[str]:
        """The attention and the kinds, in words."""
        parts = [f"{share:.0%} to {SHARES[name]} [{even:.0%}]" for name, (share, even) in self.shares.items()]
        lines = [f"Attention in the calibration texts [if it were even]: {', '.join(parts)}"]
        for kind in self.named:
            (share, null), (does, control) = self.kinds[kind], KINDS[kind]
            lines.append(f"Kind: {does} ({share:.0%} of its attention on random tokens; {control} at most {null:.0%})")
        return lines if self.named else [*lines, "Kind: none is above its null"]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "shares": {name: {"share": share, "even": even} for name, (share, even) in self.shares.items()},
            "kinds": {
                kind: {"share": share, "null": null, "named": kind in self.named}
                for kind, (share, null) in self.kinds.items()
            },
        }

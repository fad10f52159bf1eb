"""What an index knows about where an attention head looks: the shares of its attention, each with its control. It needs
no model."""

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
SHARES = {"first": "the first token", "previous": "the token before", "itself": "itself"}


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


def attended_text(example: Example) -> str:
    """Return the token that a head attends to most, with its share of the attention."""
    return f"{attended_piece(example)!r} {max(example.relevance):.2f}" if example.relevance else ""


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
    induction: tuple[float, float]
    """The share of its attention on random tokens that goes to the token after the earlier occurrence, and the null:
    the largest share that any head of the model has by chance."""

    @classmethod
    def of(cls, store: Store, head: Neuron) -> HeadAttention | None:
        """Return what an index has of a head; None without a measurement, as for models of several stacks."""
        measured = store.controls.get(MEASURED)
        if not measured:
            return None

        def pairs(part: str) -> dict[str, tuple[float, float]]:
            rows = measured[part].items()
            return {name: (row["heads"][head.layer][head.index], row["control"]) for name, row in rows}

        return cls(pairs("shares"), pairs("kinds")["induction"])

    @property
    def lines(self) -> list[str]:
        """The attention in words, with its controls."""
        parts = [f"{share:.0%} to {SHARES[name]} [{even:.0%}]" for name, (share, even) in self.shares.items()]
        share, null = self.induction
        return [
            f"Attention in the calibration texts [if it were even]: {', '.join(parts)}",
            f"{'Induction head' if share > null else 'Not an induction head'}: after the repetition of a random token, "
            f"{share:.0%} of its attention is on the token that followed before (of any head where nothing repeats at "
            f"most {null:.0%})",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "shares": {name: {"share": share, "even": even} for name, (share, even) in self.shares.items()},
            "induction": dict(zip(("share", "null"), self.induction, strict=True)),
        }

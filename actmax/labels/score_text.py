"""A label's score in words: what it was measured on, and what chance gives."""

from __future__ import annotations

from icebear.actmax.labels.scores import BARS
from icebear.records import Meaning

NOT_SCORED = "not labelled yet (icebear label --auto)"
HELD_OUT = {
    "hits": "Where it fires furthest, and the label is true",
    "misses": "Where it fires furthest, and the label is not true",
    "false_alarms": "Where the label is true, and it does least",
}
"""Of documents that the label was not made from."""
FURTHEST = {"token": "the 1 % of tokens", "sentence": "the 5 % of sentences"}


def title(meaning: Meaning | None) -> str:
    """The label and its score, or that there is none and what came nearest."""
    if meaning is None:
        return NOT_SCORED
    if not meaning.kind:
        return meaning.text
    score = f"{meaning.score:.2f} by {meaning.by}"
    if meaning.significant:
        return f"{meaning.text} ({score})"
    return f"no clear meaning (nearest: {meaning.text}, {score})"


def measured(meaning: Meaning) -> list[str]:
    """What the score is, and what it is to be compared with."""
    record, by = meaning.record, meaning.by
    if not record:
        return []
    bars = record["bars"]
    chance = ", ".join(
        f"{name} under {bars[key]:.2f}"
        for key, name in (("shifted", "labels of shifted activations"), ("other", "other neurons' labels"))
        if key in bars
    )
    return [
        f"Tells {FURTHEST[by]} that drive it furthest at AUROC {meaning.score:.2f} (chance 0.5, bar {BARS[by]:.2f}), "
        f"on {record['sentences']['test']} sentences of documents that it was not made from; 95 % of {chance}; p "
        f"{meaning.p:.3f}.",
        f"The activation tells where the label is true at {_number(record['responsiveness'])}, with average precision "
        f"{_number(record['purity'])}; it is true of {record['share']:.1%} of the {by}s.",
        f"Against the likest sentences that do not drive it {_number(record['hard'])}; another neuron's label of the "
        f"kind {_number(record['other'])}; on the documents it was made from {_number(record['train'])}. By token the "
        f"label tells {record['detection']['token']:.2f}, and a table of the neuron's mean at every token "
        f"{record['table']:.2f}.",
    ]


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}"

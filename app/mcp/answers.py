"""What tools answer: short records, of which schemas are made. Rows and controls are what the library's `to_dict` says.
What is causal has its control in it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

ROWS = 8
"""Of a list, in an answer; a handle has all."""
Row = dict[str, Any]


def short(value: Any) -> Any:
    """The same with five digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [short(part) for part in value]
    if isinstance(value, dict):
        return {key: short(part) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: short(getattr(value, field.name)) for field in fields(value)})
    return value


@dataclass(frozen=True)
class Predicted:
    next: list[Row]
    continuation: str


@dataclass(frozen=True)
class Suggested:
    counterfactuals: list[Row]


@dataclass(frozen=True)
class Attributed:
    explained: str
    compared: str
    account: str
    tokens: list[Row]
    """The largest by size."""
    control: Row
    handle: str


@dataclass(frozen=True)
class RankedNeurons:
    explained: str
    compared: str
    neurons: list[Row]
    """`promotes` is on the direct path to the vocabulary; of early layers it says little. `label`, where it is
    significant, says what the neuron reads."""
    control: Row
    """These neurons switched off (set to 0), each at its token, beside as many others."""
    ablation: list[Row]
    """Of a comparison with another prompt: so many pairs exchanged; what makes the difference between both."""
    handle: str


@dataclass(frozen=True)
class CircuitTold:
    summary: str
    groups: list[Row]
    """With `share`: what is left of the difference when the group takes the other prompt's activations; `matched`: the
    same with as many others."""
    ablation: Row
    faithfulness: Row
    """`share` of the difference comes along its edges alone, `matched` along as many random ones."""
    handle: str


@dataclass(frozen=True)
class NeuronTold:
    neuron: str
    meaning: list[str]
    """Labels with their scores, or that there is no clear meaning."""
    promotes: list[str]
    suppresses: list[str]
    examples: list[Row]
    note: str
    handle: str


@dataclass(frozen=True)
class Found:
    neurons: list[Row]
    note: str
    """A likeness of words and texts, no cause."""


@dataclass(frozen=True)
class Steered:
    plain: str
    steered: str
    next_plain: list[Row]
    next_steered: list[Row]
    control: Row
    """The same edits of other neurons."""
    price: str
    """What else changes."""
    kl: float


@dataclass(frozen=True)
class Flipped:
    edits: list[str]
    plain: str
    steered: str
    next_steered: list[Row]
    control: Row
    price: str
    kl: float
    warnings: list[str]
    handle: str


@dataclass(frozen=True)
class ConceptTold:
    name: str
    neurons: list[Row]
    about: str
    auroc: float
    """On texts that nothing was chosen on; chance is 0.5."""
    error: float
    handle: str


@dataclass(frozen=True)
class ConceptMeasured:
    value: float
    """Standard deviations over the texts without it; 0 is their mean."""
    tokens: list[Row]


@dataclass(frozen=True)
class ConceptTurned:
    plain: str
    steered: str
    edits: list[str]
    measured_plain: float
    measured_steered: float
    control: Row
    """The same measure of texts with the same edits of other neurons of the same layers."""
    as_asked: bool
    """Whether it went up, or with `suppress` down."""
    price: str
    kl: float


@dataclass(frozen=True)
class More:
    handle: str
    part: str
    start: int
    total: int
    rows: list[Row]
    parts: list[str]
    """That this handle has."""


@dataclass(frozen=True)
class Saved:
    file: str
    bytes: int

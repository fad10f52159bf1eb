"""What tools answer: short records, of which schemas are made. What is causal has its control in it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from icebear.concepts.attribution.controls import Ablation
from icebear.concepts.attribution.random_controls import BesideChance
from icebear.records import TokenScore

ROWS = 8
"""Of a list, in an answer; a handle has all."""


def short(told: Any) -> Any:
    """The same with five digits of each number."""
    if isinstance(told, float):
        return float(f"{told:.5g}")
    if isinstance(told, list):
        return [short(part) for part in told]
    if isinstance(told, dict):
        return {key: short(part) for key, part in told.items()}
    if is_dataclass(told) and not isinstance(told, type):
        return replace(told, **{field.name: short(getattr(told, field.name)) for field in fields(told)})
    return told


@dataclass(frozen=True)
class Next:
    """A token that may come next."""

    text: str
    probability: float | None
    logit: float

    @classmethod
    def of(cls, token: TokenScore) -> Next:
        return cls(token.text, token.probability, token.logit)


@dataclass(frozen=True)
class Control:
    """A change beside the same change made elsewhere, at random. Quote it with any claim."""

    verdict: str
    beyond_chance: bool | None
    """True: in less than one case of twenty by chance. False: no evidence, whatever else the answer shows. None: more
    than any of the others, which are too few to say."""
    change: float
    largest_by_chance: float
    draws: int
    p: float

    @classmethod
    def of(cls, found: BesideChance) -> Control:
        return cls(str(found), found.beyond, found.change, found.largest, len(found.drawn), found.p)


@dataclass(frozen=True)
class Exchange:
    """What is left of the difference when (neuron, token) pairs take the other prompt's activations; 1 is all of it.
    Those of the largest relevance by size, for or against; as many others of the same layers and tokens; those that
    change most."""

    pairs: int
    left: float
    left_without_random_others: float
    left_without_most_changed: float

    @classmethod
    def of(cls, found: Ablation) -> Exchange:
        return cls(found.nodes, found.left, found.matched_left, found.changed_left)


@dataclass(frozen=True)
class Predicted:
    next: list[Next]
    continuation: str


@dataclass(frozen=True)
class TokenRow:
    position: int
    text: str
    relevance: float
    note: str
    """``sink``: collects attention in every text; ``template``: written by a chat's template."""


@dataclass(frozen=True)
class Attributed:
    explained: str
    compared: str
    account: str
    tokens: list[TokenRow]
    """The largest by size."""
    control: Control
    handle: str


@dataclass(frozen=True)
class NeuronRow:
    neuron: str
    position: int
    token: str
    activation: float | None
    """None of a head, which has many."""
    activation_there: float | None
    relevance: float
    promotes: str
    """On the direct path to the vocabulary; of early layers it says little."""
    label: str | None
    """What it reads, with a score on texts that the label was not made from; of an index that has labels."""


@dataclass(frozen=True)
class RankedNeurons:
    explained: str
    compared: str
    neurons: list[NeuronRow]
    control: Control
    """These neurons switched off (set to 0), each at its token, beside as many others."""
    exchange: list[Exchange]
    """Of a comparison with another prompt: so many pairs exchanged; what makes the difference between both."""
    handle: str


@dataclass(frozen=True)
class GroupRow:
    name: str
    nodes: list[str]
    """neuron@position, the first of them; the handle has all."""
    score: float
    left: float
    """Of the difference, when the group takes the other prompt's activations; the control beside it:"""
    left_without_random_others: float
    next: str
    """What is most probable then."""


@dataclass(frozen=True)
class CircuitTold:
    summary: str
    groups: list[GroupRow]
    exchange: Exchange
    along_its_edges: float
    """The share of the difference that comes along its edges alone; the control beside it:"""
    along_random_edges: float
    handle: str


@dataclass(frozen=True)
class ExampleRow:
    polarity: str
    activation: float
    token: str
    text: str


@dataclass(frozen=True)
class NeuronTold:
    neuron: str
    meaning: list[str]
    """Labels with their scores, or that there is no clear meaning."""
    promotes: list[str]
    suppresses: list[str]
    examples: list[ExampleRow]
    note: str
    handle: str


@dataclass(frozen=True)
class HitRow:
    neuron: str
    polarity: str
    score: float
    why: list[str]
    label: str | None


@dataclass(frozen=True)
class Found:
    neurons: list[HitRow]
    note: str
    """A likeness of words and texts, no cause."""


@dataclass(frozen=True)
class Steered:
    plain: str
    steered: str
    next_plain: list[Next]
    next_steered: list[Next]
    control: Control
    """The same edits of other neurons."""
    price: str
    """What else changes."""
    kl: float


@dataclass(frozen=True)
class Flipped:
    edits: list[str]
    plain: str
    steered: str
    next_steered: list[Next]
    control: Control
    price: str
    kl: float
    warnings: list[str]
    handle: str


@dataclass(frozen=True)
class ConceptTold:
    name: str
    neurons: list[dict[str, Any]]
    about: str
    auroc: float
    """On texts that nothing was chosen on; chance is 0.5."""
    error: float
    handle: str


@dataclass(frozen=True)
class ConceptMeasured:
    value: float
    """Standard deviations over the texts without it; 0 is their mean."""
    tokens: list[TokenRow]


@dataclass(frozen=True)
class ConceptTurned:
    plain: str
    steered: str
    edits: list[str]
    measured_plain: float
    measured_steered: float
    control: Control
    """The same measure of texts with the same edits of other neurons of the same layers."""
    as_asked: bool
    """Whether it went up, or with `away` down."""
    price: str
    kl: float


@dataclass(frozen=True)
class More:
    handle: str
    part: str
    start: int
    total: int
    rows: list[dict[str, Any]]
    parts: list[str]
    """That this handle has."""


@dataclass(frozen=True)
class Saved:
    file: str
    bytes: int

"""The record of stages: every number is an intervention, and its control stands with it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from icebear.convert import Tabled, converter
from icebear.records import InNotebooks, Neuron, Ranked, TokenScore
from icebear.result_files import SavedResult

if TYPE_CHECKING:
    import pandas

StageKind = Literal["alone", "cut", "last token"]
"""What is measured. ``alone``: all else is held, from the first difference on. ``cut``, of prompts of different
lengths: only the other heads of the last token are held. ``last token``: the last tokens differ; nothing is moved."""


@dataclass(frozen=True)
class WholePart:
    """Attention or the FFN of all layers at some tokens, which is recomputed and not searched."""

    kind: Literal["attn", "ffn"]
    where: Literal["differing", "between", "last"]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class WholePartChange:
    """What recomputing another whole part, too, would add to the share of the difference."""

    part: WholePart
    change: float


@dataclass(frozen=True)
class Trace:
    """A causal trace: the share of the difference that one token brings back when, in the counterfactual, its residual
    stream after a layer is that of the prompt."""

    positions: tuple[int, ...]
    layers: tuple[int, ...]
    """In an encoder-decoder, layers of the token's own stack."""
    shares: tuple[tuple[float, ...], ...]
    """For each position, one for each layer."""


@dataclass(frozen=True)
class Swap:
    """What one head does: alone with the neurons and whole parts, and when only it has its counterfactual value."""

    neuron: Neuron
    alone: float
    before: tuple[float | None, ...]
    """The probabilities of the target and the contrast in the prompt; None for a model without probabilities."""
    after: tuple[float | None, ...]


@dataclass(frozen=True)
class RandomSwap:
    """What a random head that is not among those of the stages does when only it has its counterfactual value."""

    neuron: Neuron
    after: tuple[float | None, ...]


@dataclass(frozen=True)
class Source:
    """The share of the difference when, of the earlier tokens, only one is the prompt's, and at the last token only the
    heads and neurons are recomputed."""

    position: int
    share: float


@dataclass(frozen=True)
class WordEffect:
    """What the neurons together do to a likely word: its logit minus that without them, less the mean of all."""

    token_id: int
    text: str
    effect: float


@dataclass(frozen=True, repr=False)
class Control:
    """The median share of random sets, and the sets."""

    median: float
    shares: tuple[float, ...]
    sets: tuple[tuple[Neuron, ...], ...]

    def __repr__(self) -> str:
        return f"{self.median:z.0%} of the difference, the median of {len(self.shares)} random sets"


@dataclass(frozen=True)
class Answers:
    """What one of the prompts answers."""

    tokens: tuple[str, ...]
    number: float
    """Target minus contrast, in logits."""
    target: float | None
    """Its probability; None for a model without probabilities."""
    contrast: float | None
    likeliest: TokenScore


@dataclass(frozen=True, eq=False, repr=False)
class StageShares(SavedResult, InNotebooks):
    """Heads and neurons of the last token of a pair of prompts, and the share of the difference that they give."""

    kind: StageKind
    heads: tuple[Ranked, ...]
    neurons: tuple[Ranked, ...]
    whole: tuple[WholePart, ...]
    """The whole parts that are recomputed as well; never at the last token."""
    alone: float | None
    """The share of the difference that these parts give while the others are held, see `StageKind`."""
    without: float | None
    """The share that is lost when only the heads and neurons take their counterfactual values."""
    random: float | None
    """The median share of as many random heads and neurons."""
    prompt: Answers
    counterfactual: Answers

    def __str__(self) -> str:
        numbers = "" if self.alone is None else f": {self.alone:.0%} alone [random {self.random:.0%}]"
        lost = "" if self.without is None else f", {self.without:.0%} lost without them"
        return f"{len(self.heads)} heads and {len(self.neurons)} FFN neurons{numbers}{lost}"

    @property
    def difference(self) -> float:
        """In logits."""
        return self.prompt.number - self.counterfactual.number

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        nodes = ("heads", "neurons")
        left_out = (*nodes, "made_with", "model", "pairs")
        fields = {name: value for name, value in vars(self).items() if name not in left_out}
        result: dict[str, Any] = {**converter().unstructure(fields), "difference": self.difference}
        return result | {name: [node.to_dict() for node in getattr(self, name)] for name in nodes}


ENOUGH = 0.8
"""The share of the difference at which the search of a set stops."""
OVERSHOOT = 1.25
"""Shares above this one are said to overshoot."""
SMALL = 1.0
"""Of a smaller difference, in logits, shares mean little."""


@dataclass(frozen=True, eq=False, repr=False)
class StageRecord(StageShares, Tabled):
    """How an answer is computed: where the prompts differ, what is moved to the last token, and what is written there.

    Every number is an intervention, see `icebear.concepts.stages.stages.stages`.
    """

    target: TokenScore
    contrast: TokenScore | None
    position: int
    """The last token: the one whose output is explained."""
    differing: tuple[int, ...]
    trace: Trace
    reached: bool
    """Whether the heads and neurons give between `ENOUGH` and `OVERSHOOT` of the difference."""
    random_sets: Control | None
    most_changed: float | None
    """The share of as many other heads that change most between the prompts, with the same neurons."""
    moved: float | None
    """The share of the heads, without the neurons."""
    moved_random: Control | None
    written_random: Control | None
    """The heads with random neurons; None without neurons."""
    everything: float | None
    """The share when everything at the last token is recomputed."""
    swaps: tuple[Swap, ...]
    sources: tuple[Source, ...]
    words: tuple[WordEffect, ...]
    """The words that the neurons together raise and lower, the largest effect first, and target and contrast."""
    left_out: tuple[WholePartChange, ...]
    """Whole parts that are held although recomputing them would change the share by more than a quarter."""
    made_with: dict[str, Any] = field(default_factory=dict)
    random_swaps: tuple[RandomSwap, ...] = ()
    """The control of `swaps`."""

    @property
    def says_little(self) -> bool:
        """Whether shares mean little: the difference is small, or the target is not the likeliest token."""
        return abs(self.difference) < SMALL or self.prompt.likeliest.id != self.target.id

    def to_dict(self) -> dict[str, Any]:
        return {**self.made_with, **super().to_dict()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)

    def to_frame(self) -> pandas.DataFrame:
        """Return the parts as a pandas table. `to_arrow` returns an Arrow table."""
        import pandas

        swaps = {swap.neuron: (swap.alone, *swap.after) for swap in self.swaps}
        rows = [
            (stage, str(node.neuron), node.position, node.relevance, *swaps.get(node.neuron, (None,) * 3))
            for stage, nodes in (("moved", self.heads), ("written", self.neurons))
            for node in nodes
        ]
        columns = ["stage", "neuron", "position", "relevance", "alone", "target_after_swap", "contrast_after_swap"]
        return pandas.DataFrame(rows, columns=columns)

"""The records of a circuit: tokens, nodes, remainders, the answer, edges and groups."""

from __future__ import annotations

from dataclasses import dataclass

from icebear.records import Neuron, TokenScore


@dataclass(frozen=True)
class CircuitToken:
    """A token of the prompt, with the token at its position in the counterfactual prompt."""

    position: int
    text: str
    counterfactual: str
    height = -1.0

    @property
    def id(self) -> str:
        return f"token.{self.position}"

    def __str__(self) -> str:
        return repr(self.text) if self.text == self.counterfactual else f"{self.text!r} ({self.counterfactual!r})"


@dataclass(frozen=True)
class HeadOrNeuron:
    """A neuron (or an attention head) at a token."""

    neuron: Neuron
    position: int

    @property
    def id(self) -> str:
        return f"{self.neuron}@{self.position}"

    @property
    def height(self) -> float:
        """The layer; the FFN is half a layer above attention."""
        return self.neuron.layer + 0.5 * (self.neuron.site == "ffn")

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True)
class Node(HeadOrNeuron):
    """A head or neuron of a circuit."""

    score: float
    """Its relevance, compared with the counterfactual prompt."""
    activation: float
    """For a head: its output times the multipliers of the answer."""
    counterfactual: float
    """The activation in the counterfactual prompt."""
    raises: tuple[str, ...] = ()
    """The likely next words that it raises most, in the first pair of prompts (`Relevance.effects`)."""
    lowers: tuple[str, ...] = ()

    @property
    def polarity(self) -> str:
        """The polarity of its activation minus that in the counterfactual prompt."""
        return "+" if self.activation >= self.counterfactual else "-"


@dataclass(frozen=True)
class Remainder:
    """All neurons (and heads, if heads are nodes) of a layer at a token that are not nodes of the graph."""

    layer: int
    position: int

    @property
    def id(self) -> str:
        return f"remainder.{self.layer}@{self.position}"

    def __str__(self) -> str:
        return f"remainder of L{self.layer}@{self.position}"


@dataclass(frozen=True)
class AnswerNode:
    """The number explained."""

    position: int
    text: str
    contrast: str | None
    id = "answer"
    height = float("inf")

    def __str__(self) -> str:
        return repr(self.text) + (f" against {self.contrast!r}" if self.contrast is not None else "")


EdgeSource = CircuitToken | Node | Remainder
EdgeTarget = Node | AnswerNode


def below(source: CircuitToken | HeadOrNeuron, target: EdgeTarget, is_causal: bool) -> bool:
    """Return whether a source can have an effect on a target."""
    return source.height < target.height and (source.position <= target.position or not is_causal)


@dataclass(frozen=True)
class Edge:
    """The direct effect of a source on a target, through no other neuron."""

    source: CircuitToken | Node
    target: EdgeTarget
    effect: float
    """Measured: the target's value in the prompt minus its value when the source alone has its counterfactual value."""
    estimate: float
    """Gradient at the prompt x difference of the source: the effect to first order."""
    random_effect: float | None
    """The 95th percentile of the absolute effects of random sources on the target; None with fewer than ten of them."""
    effect_share: float | None
    """The effect divided by the difference of the target; None where the target hardly differs."""
    contribution: float
    """By difference rules; the contributions to a target sum to the difference of the target."""
    contribution_share: float | None
    """The contribution divided by the difference of the target; None where the target hardly differs."""
    influence: float
    """On the answer along all paths, as a share of the influence of all edges (circuit-tracer's definition, with
    contributions)."""

    @property
    def is_like_random(self) -> bool:
        """Whether random sources have effects as large."""
        return self.random_effect is not None and abs(self.effect) <= self.random_effect


@dataclass(frozen=True)
class Group:
    """Similar nodes of a graph."""

    name: str
    nodes: tuple[Node, ...]
    raises: tuple[str, ...] = ()
    """The likely next words that its nodes raise most together, in the first pair of prompts."""
    lowers: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        return sum(node.score for node in self.nodes)


@dataclass(frozen=True)
class EdgeFaithfulness:
    """The share of the difference between both prompts that edges alone recover."""

    edges: int
    """The number of edges from tokens and nodes."""
    total: int
    """The number of such edges in the graph that have an influence on the answer."""
    sufficiency: float
    random_sufficiency: float
    """The same for as many random edges of the graph, drawn from the `total`: the mean of five draws."""
    all_edges: float
    """The same for all edges between the tokens and nodes of the graph."""
    matched_sufficiency: float | None = None
    """The same for as many random edges into the same targets from the same layers, and not from the graph's own edges
    while there are enough others, if it was measured. In a small graph these are nearly its own edges."""


@dataclass(frozen=True)
class GroupAblation:
    """The answer when the nodes of a group take their counterfactual values."""

    necessity: float
    """1 minus the share of the difference that remains."""
    random_necessity: float
    """The same for as many random nodes of the same layers and tokens."""
    predictions: tuple[TokenScore, ...]
    """The most probable answers."""

"""What a circuit is made of: tokens, nodes, what is not shown, the answer; edges and groups."""

from __future__ import annotations

from dataclasses import dataclass

from icebear.records import Neuron, TokenScore


@dataclass(frozen=True)
class Token:
    """A token of the prompt, and what stands there in the other one."""

    position: int
    text: str
    counterfactual: str

    @property
    def id(self) -> str:
        return f"token.{self.position}"

    @property
    def height(self) -> float:
        return -1

    def __str__(self) -> str:
        return repr(self.text) if self.text == self.counterfactual else f"{self.text!r} ({self.counterfactual!r})"


@dataclass(frozen=True)
class Node:
    """A neuron (or a head) at a token."""

    neuron: Neuron
    position: int
    score: float
    """Its relevance compared with the other prompt."""
    activation: float
    """Of a head the part of its output that speaks for the answer: output times coefficient."""
    counterfactual: float
    """The same in the other prompt."""
    words: tuple[str, ...] = ()
    """What its difference writes, strongest first."""

    @property
    def id(self) -> str:
        return f"{self.neuron}@{self.position}"

    @property
    def height(self) -> float:
        """In layers; attention comes before the FFN."""
        return self.neuron.layer + 0.5 * (self.neuron.site == "ffn")

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True)
class Rest:
    """All neurons (and heads, where they are nodes) of a layer at a token that are not shown."""

    layer: int
    position: int

    @property
    def id(self) -> str:
        return f"rest.{self.layer}@{self.position}"

    def __str__(self) -> str:
        return f"rest of L{self.layer}@{self.position}"


@dataclass(frozen=True)
class AnswerNode:
    """The number explained."""

    position: int
    text: str
    contrast: str | None

    @property
    def id(self) -> str:
        return "answer"

    @property
    def height(self) -> float:
        return float("inf")

    def __str__(self) -> str:
        return repr(self.text) + (f" against {self.contrast!r}" if self.contrast is not None else "")


Source = Token | Node | Rest
Target = Node | AnswerNode


@dataclass(frozen=True)
class Edge:
    """What a source gives a target directly, past no other neuron."""

    source: Source
    target: Target
    effect: float
    """Gradient at the prompt x the source's difference: by how much more the target is than if the source alone takes
    its value of the other prompt."""
    patterns: float
    """What of the effect goes through attention patterns (queries and keys), the rest through values."""
    contribution: float
    """By difference rules; those to a target sum to its own difference."""
    share: float
    """The contribution over the target's own difference."""
    influence: float
    """On the answer, along all paths, as a share of all edges' (circuit-tracer's definition)."""


@dataclass(frozen=True)
class Group:
    """Nodes of a graph that belong together."""

    name: str
    nodes: tuple[Node, ...]

    @property
    def score(self) -> float:
        return sum(node.score for node in self.nodes)


@dataclass(frozen=True)
class EdgeFaithfulness:
    """How much of the difference between both prompts comes about along edges alone."""

    edges: int
    """From tokens and nodes."""
    share: float
    matched: float
    """Of as many edges into the same targets from the same layers, drawn among the graph's nodes and tokens with an
    effect, where there are enough not those kept; the mean of five draws."""
    nodes: float
    """Of all edges between the graph's nodes and tokens."""


@dataclass(frozen=True)
class Without:
    """The answer when some nodes take the other prompt's activations."""

    share: float
    """Of the difference that all nodes' exchange makes, what is there (F)."""
    predictions: tuple[TokenScore, ...]
    """The most probable answers then."""
    matched: float
    """The share with as many nodes at the same layers and tokens instead, drawn from all neurons."""

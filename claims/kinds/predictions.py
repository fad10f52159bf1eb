"""Claims about a prediction: the answer, the relevance and effects of nodes, their sufficiency, edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch

from icebear.claims.kind import (
    Draft,
    Explained,
    Kind,
    Measured,
    NodeId,
    PromptText,
    check_node,
    mask_of,
    most_relevant,
    others_of,
    scores_of,
    site_of,
    subject,
)
from icebear.concepts.circuits.circuit import contribution_shares
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.nodes import node_sites
from icebear.concepts.circuits.records import Node
from icebear.concepts.nodes.controls import Ablation, ablate, nodes_of
from icebear.concepts.results.effects import Patched
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Ranked
from icebear.steering.flipping.phrases import wanted_ids
from icebear.steering.side_effects import HeldOutContexts

if TYPE_CHECKING:
    from icebear.explanation.explanation import Explanation
    from icebear.explanation.record import ExplainedNode

CONTEXTS = 16
"""Held-out contexts after which the answer's probability is measured."""
TOKENS, NODES, EDGES, WORDS = 2, 3, 3, 4
"""How many tokens, nodes and edges are claimed of a result, and words of each side of a node."""


@dataclass(frozen=True)
class AnswerClaim(Kind):
    """The model answers this prompt so: the probability of a token, phrase or label. The control is its mean
    probability after held-out contexts."""

    prompt: PromptText
    answer: str
    kind = "answer"
    value_is = "probability of the answer"
    control_is = "its mean probability after held-out contexts"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        phrase = wanted_ids(model, self.answer, self.prompt)
        contexts = HeldOutContexts(model).contexts
        some = contexts[:: max(1, len(contexts) // CONTEXTS)]
        return Measured(
            _probability(model, model.ids(self.prompt), phrase),
            fmean(_probability(model, context, phrase) for context in some),
        )

    @classmethod
    def of(cls, relevance: Relevance, about: dict[str, Any]) -> list[Draft]:
        """Return the claim of a predicted answer that was explained; none of another target."""
        predicted = relevance.target and relevance.target == relevance.predictions[0]
        return [(cls(about["prompt"], relevance.target.text), None)] if relevance.target and predicted else []

    def __str__(self) -> str:
        return f"{self.answer!r} after {self.prompt!r}"


def _probability(model: Model, prompt: list[int], phrase: Sequence[int]) -> float:
    if not model.task.generates:
        return model.next_logits(prompt).softmax(-1)[phrase[0]].item()
    logs = model.continuation_logits(prompt, phrase).log_softmax(-1)
    return logs[range(len(phrase)), list(phrase)].sum().exp().item()


@dataclass(frozen=True, kw_only=True)
class RelevanceClaim(Explained):
    """A token (by its position, with its text) or a node has this share of the explained number. The control of a token
    is an equal part of all tokens that have relevance; of a node, the mean absolute share of random other neurons of
    its layer and token."""

    token: int | None = None
    text: str | None = None
    node: NodeId | None = None
    kind = "relevance"
    value_is = "share of the explained number"
    control_is = "the mean share of other tokens or neurons"

    def __post_init__(self) -> None:
        if (self.token is None) is (self.node is None):
            raise InputError("A claim of relevance is about a token or a node; give one of them.")

    def measure(self, model: Model, seed: int = 0) -> Measured:
        relevance = self.relevance(model, *([self.node.neuron.site] if self.node else []))
        total = relevance.conservation().target
        if not total:
            raise InputError("The explained number is 0, so shares of it cannot be measured; claim another prediction.")
        if self.node is None:
            assert self.token is not None
            strings = relevance.prompt.strings
            if strings[self.token : self.token + 1] != (self.text,):
                raise InputError(
                    f"Token {self.token} of the prompt is not {self.text!r} in {model.name}; correct the claim."
                )
            shares = (relevance.tokens / total).tolist()
            able = [share for share in shares if abs(share) > 1e-6]
            return Measured(shares[self.token], 1 / max(1, len(able)))
        check_node(model, relevance, self.node)
        neuron = self.node.neuron
        row = scores_of(relevance, neuron.site)[neuron.layer, self.node.position] / total
        others = others_of(model, neuron, seed)
        return Measured(row[neuron.index].item(), fmean(abs(row[one.index].item()) for one in others))

    @classmethod
    def of_tokens(cls, relevance: Relevance, about: dict[str, Any]) -> list[Draft]:
        """Return the claims of the tokens with the largest relevance."""
        excluded = {*relevance.prompt.sinks, *relevance.prompt.template}
        scores = {place: score for place, score in enumerate(relevance.tokens.tolist()) if place not in excluded}
        first = sorted((place for place in scores if scores[place] > 1e-6), key=lambda place: -scores[place])[:TOKENS]
        return [(cls(**about, token=place, text=relevance.prompt.strings[place]), None) for place in first]

    def __str__(self) -> str:
        what = repr(self.text) if self.node is None else str(self.node)
        return f"{what} for {self.target!r} after {self.prompt!r}"


@dataclass(frozen=True, kw_only=True)
class NodesClaim(Explained):
    """A claim about a list of nodes."""

    nodes: tuple[NodeId, ...]

    def ablation(self, model: Model, seed: int) -> Ablation:
        site = site_of(self.nodes)
        relevance = self.relevance(model, site)
        nodes = nodes_of(model, relevance, site)
        return ablate(nodes, mask_of(model, relevance, self.nodes), torch.Generator().manual_seed(seed))

    def __str__(self) -> str:
        count = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        return f"{count} for {self.target!r}, not {self.contrast!r}, after {self.prompt!r}"


@dataclass(frozen=True, kw_only=True)
class SufficiencyClaim(NodesClaim):
    """These nodes alone recover this share of the difference (docs/compare.md). The control is as many random nodes."""

    kind = "sufficiency"
    value_is = "sufficiency"
    control_is = "that of random nodes (docs/compare.md)"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        measured = self.ablation(model, seed)
        return Measured(measured.sufficiency, measured.random_sufficiency)


@dataclass(frozen=True, kw_only=True)
class NecessityClaim(NodesClaim):
    """Without these nodes this share of the difference is lost. The control is that of `sufficiency`."""

    kind = "necessity"
    value_is = "necessity"
    control_is = "that of random nodes (docs/compare.md)"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        measured = self.ablation(model, seed)
        return Measured(measured.necessity, measured.random_necessity)


@dataclass(frozen=True, kw_only=True)
class SimilarClaim(NodesClaim):
    """This share of a model's nodes is among as many most relevant nodes in the model that is checked. The control is
    the share of random nodes of the same layers and tokens."""

    kind = "similar"
    value_is = "share of the nodes that both models have"
    control_is = "that of random nodes of the same layers and tokens"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        site = site_of(self.nodes)
        relevance = self.relevance(model, site)
        listed = mask_of(model, relevance, self.nodes)
        best = mask_of(model, relevance, most_relevant(relevance, site, len(self.nodes)))
        by_chance = (listed.sum(-1) * best.sum(-1) / listed.shape[-1]).sum().item()
        return Measured(int((listed & best).sum()) / len(self.nodes), by_chance / len(self.nodes))


@dataclass(frozen=True, kw_only=True)
class EdgeClaim(Explained):
    """The source contributes this share of the target's difference between both prompts, through no other neuron. The
    control is the mean absolute share of random other neurons of the source's layer and token."""

    source: NodeId
    into: NodeId | Literal["answer"] = "answer"
    """The target of the edge."""
    kind = "edge"
    value_is = "share of the difference of the edge's target"
    control_is = "the mean share of other neurons of the source's layer"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        if self.counterfactual is None:
            raise InputError("A claim of an edge needs a counterfactual; give one.")
        ends = [self.source] + ([self.into] if isinstance(self.into, NodeId) else [])
        relevance = self.relevance(model, *node_sites(model, any(node.neuron.site == "head" for node in ends)))
        for node in ends:
            check_node(model, relevance, node)
        others = others_of(model, self.source.neuron, seed)
        places = [
            *((node.neuron, node.position) for node in ends),
            *((other, self.source.position) for other in others),
        ]
        row = contribution_shares(model, relevance, places)[1 if len(ends) == 2 else len(places)]
        shares = row[len(relevance.tokens) :].tolist()
        return Measured(shares[0], fmean(map(abs, shares[len(ends) : len(places)])))

    @classmethod
    def of(cls, graph: Graph, about: dict[str, Any]) -> list[Draft]:
        """Return the claims of the first edges between nodes."""
        rows = [edge for edge in graph.edges if edge.contribution_share > 0]
        ends = [(edge.source, edge.target) for edge in rows if isinstance(edge.source, Node)][:EDGES]
        return [
            (cls(**about, source=NodeId.of(source), into=NodeId.of(into) if isinstance(into, Node) else "answer"), None)
            for source, into in ends
        ]

    def __str__(self) -> str:
        return f"{self.source} to {self.into} after {self.prompt!r}"


@dataclass(frozen=True, kw_only=True)
class EffectClaim(Explained):
    """A node raises the logits of some tokens and lowers those of others: its mean effect on the raised ones (in
    logits, relative to the likely next tokens) minus that on the lowered ones. The control is the mean absolute effect
    of random other neurons of its layer and token."""

    node: NodeId
    raises: tuple[str, ...] = ()
    lowers: tuple[str, ...] = ()
    kind = "effect"
    value_is = "effect on the raised less the lowered tokens, in logits"
    control_is = "the mean effect of other neurons of its layer"

    def measure(self, model: Model, seed: int = 0) -> Measured:
        raised, lowered = ([model.answer_id(word, "word") for word in words] for words in (self.raises, self.lowers))
        if not raised + lowered:
            raise InputError("A claim of an effect needs tokens that are raised or lowered; give some.")
        relevance = self.relevance(model, self.node.neuron.site)
        check_node(model, relevance, self.node)
        patched = Patched(model, relevance)
        likely = patched.token_ids
        neurons = [self.node.neuron, *others_of(model, self.node.neuron, seed)]
        patched.token_ids = ids = list(dict.fromkeys([*likely, *raised, *lowered]))
        matrix, *_ = patched.effects([[Ranked(neuron, self.node.position, None, 0.0)] for neuron in neurons])
        matrix = matrix - matrix[:, : len(likely)].mean(1, keepdim=True)
        values = matrix.new_zeros(len(neurons))
        for words, sign in ((raised, 1), (lowered, -1)):
            if words:
                values += sign * matrix[:, [ids.index(word) for word in words]].mean(1)
        own, *random = values.tolist()
        return Measured(own, fmean(map(abs, random)))

    @classmethod
    def of(cls, model: Model, node: ExplainedNode, about: dict[str, Any]) -> list[Draft]:
        """Return the claim of the words of a node; none if no word is a token."""
        raises, lowers = (_readable(model, words) for words in (node.raises, node.lowers))
        about = {**about, "node": NodeId(node.ranked.neuron, node.ranked.position)}
        return [(cls(**about, raises=raises, lowers=lowers), None)] if raises or lowers else []

    def __str__(self) -> str:
        raised, lowered = ", ".join(map(repr, self.raises)), ", ".join(map(repr, self.lowers))
        return f"{self.node} raises {raised or 'nothing'}, lowers {lowered or 'nothing'} after {self.prompt!r}"


def of_explanation(model: Model, explanation: Explanation) -> list[Draft]:
    """Return claims of the answer, the tokens and the first node of an explanation."""
    relevance = explanation.relevance
    about = subject(model, relevance)
    drafts = [*AnswerClaim.of(relevance, about), *RelevanceClaim.of_tokens(relevance, about)]
    return [*drafts, *_of_nodes(model, explanation.nodes[:1], about)]


def of_ranking(model: Model, explanation: Explanation) -> list[Draft]:
    """Return claims of the first nodes of a ranking, and of the sufficiency and necessity that were measured."""
    relevance = explanation.relevance
    about, by = subject(model, relevance), explanation.ranking.by
    drafts = _of_nodes(model, explanation.nodes[:NODES], about)
    for one in explanation.ablations:
        drafts += _of_ablation(one, most_relevant(relevance, one.site, one.nodes, by), about)
    return drafts


def of_graph(model: Model, graph: Graph, ablation: Ablation | None) -> list[Draft]:
    """Return claims of the first edges of a circuit, and of all of its nodes if their ablation was measured."""
    about = subject(model, graph.relevances[0])
    measured = _of_ablation(ablation, tuple(map(NodeId.of, graph.nodes)), about) if ablation else []
    return [*EdgeClaim.of(graph, about), *measured]


def _of_nodes(model: Model, nodes: Sequence[ExplainedNode], about: dict[str, Any]) -> list[Draft]:
    drafts: list[Draft] = []
    for one in nodes:
        if one.ranked.relevance > 0:
            drafts.append((RelevanceClaim(**about, node=NodeId(one.ranked.neuron, one.ranked.position)), None))
        drafts += EffectClaim.of(model, one, about)
    return drafts


def _readable(model: Model, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that are one token, with the space before them where they have one."""
    tokens = []
    for word in words[:WORDS]:
        for text in (f" {word}", word) if not model.labels else (word,):
            try:
                model.answer_id(text)
            except InputError:
                continue
            tokens.append(text)
            break
    return tuple(tokens)


def _of_ablation(one: Ablation, nodes: tuple[NodeId, ...], about: dict[str, Any]) -> list[Draft]:
    return [
        (SufficiencyClaim(**about, nodes=nodes), Measured(one.sufficiency, one.random_sufficiency)),
        (NecessityClaim(**about, nodes=nodes), Measured(one.necessity, one.random_necessity)),
    ]

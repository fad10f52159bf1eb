"""Claims about a prediction: the answer, the relevance and effects of nodes, their sufficiency, edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from icebear.claims.kind import Draft, Kind, Measured, NodeId, PromptText, claimed_prompt, others_of
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.request import at_first_difference
from icebear.concepts.circuits.circuit import check_comparable, contribution_shares
from icebear.concepts.circuits.circuit_records import Node
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.measured_edges import effect_shares
from icebear.concepts.circuits.nodes import node_sites
from icebear.concepts.circuits.stages_set import named_parts
from icebear.concepts.methods.registry import name_of
from icebear.concepts.nodes.controls import Ablation, ablate, nodes_of
from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.results.effects import NodeEffects
from icebear.concepts.results.ranking import By
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.stage_parts import WHOLE_KINDS, WholeKinds
from icebear.concepts.stages.stage_records import RandomSwap, Swap, WholePart
from icebear.concepts.stages.stages import Stages, patched_prompts, set_shares, swap_changes
from icebear.concepts.stages.task_records import TaskRecord
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Neuron, TokenScore
from icebear.steering.flipping.phrases import phrase_probability, wanted_ids
from icebear.steering.side_effects import HeldOutContexts
from icebear.values import plural

if TYPE_CHECKING:
    from icebear.explanation.explanation import Explanation
    from icebear.explanation.record import ExplainedNode

CONTEXTS = 16
"""Held-out contexts after which the answer's probability is measured."""
CLAIMED_TOKENS = 2
"""Tokens of a relevance that are claimed, the most relevant ones."""
CLAIMED_NODES = 3
"""Nodes of a ranking or circuit that are claimed."""
CLAIMED_EDGES = 3
"""Edges of a circuit that are claimed."""
CLAIMED_WORDS = 4
"""Words that a node raises, and that it lowers, that are claimed."""


@dataclass(frozen=True, kw_only=True)
class Explained(Kind):
    """A claim about the relevance of what is predicted after a prompt."""

    prompt: PromptText
    target: str | int | None = None
    contrast: str | int | None = None
    counterfactual: PromptText | None = None
    method: str | None = None
    number: Literal["log-odds", "logit"] | None = None

    def relevance(self, model: Model, *sites: str) -> Relevance:
        """Compute the relevance of the tokens and of these sites, of answers as they are written: without a space that
        `attribute` would add."""
        prompt, *answers, other = at_first_difference(
            model, self.prompt, self.target, self.contrast, self.counterfactual
        )
        if model.task.is_causal:
            answers = [model.answer_id(answer, after=prompt) if answer is not None else None for answer in answers]
        how: Any = {"counterfactual": other, "method": self.method, "number": self.number}
        wanted = tuple(dict.fromkeys(map(neuron_site, sites)))
        return attribute(model, prompt, *answers, **how, sites=wanted)


def most_relevant(relevance: Relevance, site: str, count: int, by: By = "positive") -> tuple[NodeId, ...]:
    """Return the nodes that `Relevance.top` ranks first at all tokens."""
    ranked = relevance.top(count, site, position="all", by=by)
    return tuple(map(NodeId.of, ranked))


def check_node(model: Model, relevance: Relevance, node: NodeId) -> None:
    """Raise `InputError` unless the model has the neuron and the prompt has the token."""
    model.check(node.neuron)
    if node.position >= len(relevance.tokens):
        raise InputError(
            f"{node} is past the end of the prompt, which has {len(relevance.tokens)} tokens in {model.name}; name a "
            f"token from 0 to {len(relevance.tokens) - 1}."
        )


def control_contexts(model: Model) -> list[list[int]]:
    """Return the token ids of the held-out contexts after which an answer's probability is measured."""
    contexts = HeldOutContexts(model).contexts
    return contexts[:: max(1, len(contexts) // CONTEXTS)]


@dataclass(frozen=True)
class AnswerClaim(Kind):
    """The model answers this prompt so: the probability of a token, phrase or label. The control is its mean
    probability after held-out contexts."""

    prompt: PromptText
    answer: str
    kind = "answer"
    value_is = "probability of the answer"
    control_is = "its mean probability after held-out contexts"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        phrase = wanted_ids(model, self.answer, self.prompt)
        control = fmean(phrase_probability(model, [], context, phrase) for context in control_contexts(model))
        return Measured(phrase_probability(model, [], self.prompt, phrase), control)

    @classmethod
    def of(cls, relevance: Relevance, about: dict[str, Any]) -> list[Draft]:
        """Return the claim of a predicted answer that was explained; none of another target."""
        predicted = relevance.target and relevance.target == relevance.predictions[0]
        return [(cls(about["prompt"], relevance.target.text), None)] if relevance.target and predicted else []

    def __str__(self) -> str:
        return f"{self.answer!r} after {self.prompt!r}"


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
    control_is = "an equal share for each token, or the mean share of other neurons"

    def __post_init__(self) -> None:
        if (self.token is None) is (self.node is None):
            raise InputError("A claim of relevance is about a token or a node; give one of them.")

    def measured(self, model: Model, seed: int = 0) -> Measured:
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
        neurons = [self.node.neuron, *others_of(model, self.node.neuron, seed)]
        share, *others = (relevance.of_neuron(neuron, self.node.position) / total for neuron in neurons)
        return Measured(share, fmean(map(abs, others)))

    @classmethod
    def of_tokens(cls, relevance: Relevance, about: dict[str, Any]) -> list[Draft]:
        """Return the claims of the tokens with the largest relevance."""
        excluded = {*relevance.prompt.sinks, *relevance.prompt.template}
        scores = {at: score for at, score in enumerate(relevance.tokens.tolist()) if at not in excluded}
        largest = sorted((at for at in scores if scores[at] > 1e-6), key=lambda at: -scores[at])[:CLAIMED_TOKENS]
        return [(cls(**about, token=at, text=relevance.prompt.strings[at]), None) for at in largest]

    def __str__(self) -> str:
        what = repr(self.text) if self.node is None else str(self.node)
        return f"{what} for {self.target!r} after {self.prompt!r}"


@dataclass(frozen=True, kw_only=True)
class NodesClaim(Explained):
    """A claim about a list of nodes; by default about a share of their ablation, whose name is that of the kind."""

    nodes: tuple[NodeId, ...]

    def recorded(self, model: Model) -> tuple[list[str], Relevance, Tensor]:
        """Return the sites of the nodes, their relevance, and the nodes as a mask (L, T, W). Raises `InputError` for
        sites that are not measured together, and for a node that the model does not have."""
        sites = sorted({node.neuron.site for node in self.nodes})
        if len(sites) != 1 and sites != ["ffn", "head"]:
            raise InputError(
                f"The nodes of a claim must be of one site, or FFN neurons and heads, not of "
                f"{', '.join(sites) or 'none'}; write a claim for each site."
            )
        relevance = self.relevance(model, *sites)
        for node in self.nodes:
            check_node(model, relevance, node)
        of_site = ([node.ranked for node in self.nodes if node.neuron.site == site] for site in sites)
        masks = (relevance.mask(rows, site) for rows, site in zip(of_site, sites, strict=True))
        return sites, relevance, torch.cat(list(masks), -1)

    def measured(self, model: Model, seed: int = 0) -> Measured:
        sites, relevance, chosen = self.recorded(model)
        ablation = ablate(nodes_of(model, relevance, *sites), chosen, torch.Generator().manual_seed(seed))
        return self.of_ablation(ablation)

    @classmethod
    def of_ablation(cls, ablation: Ablation) -> Measured:
        """Return the number of this kind, and that of random nodes."""
        return Measured(getattr(ablation, cls.kind), getattr(ablation, f"random_{cls.kind}"))

    def __str__(self) -> str:
        count = plural(len(self.nodes), "node")
        return f"{count} for {self.target!r}, not {self.contrast!r}, after {self.prompt!r}"


@dataclass(frozen=True, kw_only=True)
class SufficiencyClaim(NodesClaim):
    """These nodes alone recover this share of the difference (docs/compare.md). The control is as many random nodes."""

    kind = "sufficiency"
    value_is = "sufficiency"
    control_is = "the sufficiency of random nodes (docs/compare.md)"


@dataclass(frozen=True, kw_only=True)
class NecessityClaim(NodesClaim):
    """Without these nodes this share of the difference is lost. The control is that of `sufficiency`."""

    kind = "necessity"
    value_is = "necessity"
    control_is = "the necessity of random nodes (docs/compare.md)"


@dataclass(frozen=True, kw_only=True)
class StagesClaim(Explained):
    """These heads and neurons of the last token, with whole parts of earlier tokens (such as ``ffn:differing``), give
    this share of the difference while all others hold their counterfactual values. The control is the median of
    random sets of as many heads and neurons."""

    nodes: tuple[Neuron, ...]
    parts: tuple[str, ...] = ()
    kind = "stages"
    value_is = "share of the difference that they give alone"
    control_is = "the share that random heads and neurons give"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        if not self.counterfactual:
            raise InputError("A claim of stages needs a counterfactual; give one.")
        named = _named(self.parts)
        pair = patched_prompts(model, self.prompt, self.counterfactual, self.target, self.contrast)
        alone, _, random = set_shares(model, pair, self.nodes, named, seed)
        return Measured(alone, random)

    @classmethod
    def of(cls, stages: Stages, about: dict[str, Any]) -> list[Draft]:
        """Return the claim of a set that was reached."""
        if not stages.reached or stages.kind != "alone" or stages.alone is None or stages.random is None:
            return []
        nodes = tuple(node.neuron for node in (*stages.heads, *stages.neurons))
        parts = part_names(stages.whole)
        return [(cls(**about, nodes=nodes, parts=parts), Measured(stages.alone, stages.random))]

    def __str__(self) -> str:
        return f"{len(self.nodes)} heads and neurons bring back the answer after {self.prompt!r}"


@dataclass(frozen=True, kw_only=True)
class SwapClaim(Explained):
    """When only this head takes its counterfactual value at the last token, the probability of the target falls by
    this much. The control is the largest fall by one of 20 random other heads, one at a time."""

    head: Neuron
    kind = "swap"
    value_is = "fall of the target's probability"
    control_is = "the largest fall by one of 20 random other heads"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        if not self.counterfactual:
            raise InputError("A claim of a swap needs a counterfactual; give one.")
        pair = patched_prompts(model, self.prompt, self.counterfactual, self.target, self.contrast)
        fall, random = swap_changes(model, pair, self.head, seed)
        return Measured(fall, max(random, default=1.0))

    @classmethod
    def of(cls, stages: Stages, about: dict[str, Any]) -> list[Draft]:
        """Return the claim of the head whose swap lowers the target most, if it does so more than random heads do."""
        falls = {swap.neuron: _fall(stages, swap) for swap in stages.swaps}
        head = max(falls, key=falls.__getitem__, default=None)
        random = max((_fall(stages, swap) for swap in stages.random_swaps), default=1.0)
        return [(cls(**about, head=head), None)] if head and falls[head] > random else []

    def __str__(self) -> str:
        return f"{self.head} carries {self.target!r} after {self.prompt!r}"


def _fall(stages: Stages, swap: Swap | RandomSwap) -> float:
    return (stages.prompt.target or 0.0) - (swap.after[0] or 0.0)


@dataclass(frozen=True, kw_only=True)
class ClaimedPair:
    """A pair of prompts of a task, and the whole parts of earlier tokens that are recomputed on it."""

    prompt: PromptText
    counterfactual: PromptText
    target: str | int
    contrast: str | int | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskClaim(Kind):
    """These heads and neurons of the last token give this share of the difference of each of these pairs, a mean, as
    in a claim of stages. They were chosen on other pairs of the task. The control is the mean over pairs of its
    control."""

    nodes: tuple[Neuron, ...]
    pairs: tuple[ClaimedPair, ...]
    kind = "task"
    value_is = "mean share of the difference that they give alone"
    control_is = "the share that random heads and neurons give"

    def __post_init__(self) -> None:
        if not self.pairs:
            raise InputError("A claim of a task has pairs of prompts; give some.")

    def measured(self, model: Model, seed: int = 0) -> Measured:
        each = [StagesClaim(**vars(pair), nodes=self.nodes).measured(model, seed) for pair in self.pairs]
        return self.of_shares([row.value for row in each], [row.control for row in each])

    @staticmethod
    def of_shares(shares: Sequence[float], random: Sequence[float]) -> Measured:
        error = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
        return Measured(fmean(shares), fmean(random), error)

    @classmethod
    def of(cls, model: Model, task: TaskRecord) -> list[Draft]:
        """Return the claim of the shared set, on the pairs that did not choose it. Raises `InputError`."""
        pairs = tuple(
            ClaimedPair(
                prompt=claimed_prompt(pair.prompt),
                counterfactual=claimed_prompt(pair.counterfactual),
                target=_token(model, pair.target, pair.prompt),
                contrast=_token(model, pair.contrast, pair.prompt) if pair.contrast else None,
                parts=pair.whole_parts,
            )
            for pair in task.measured
        )
        measured = cls.of_shares(*([getattr(pair, name) for pair in task.measured] for name in ("share", "random")))
        return [(cls(nodes=(*task.heads, *task.neurons), pairs=pairs), measured)]

    def __str__(self) -> str:
        return f"{len(self.nodes)} heads and neurons carry {len(self.pairs)} pairs, such as {self.pairs[0].prompt!r}"


@dataclass(frozen=True, kw_only=True)
class EdgeClaim(Explained):
    """The source has this share of the target's difference between both prompts, through no other neuron: its measured
    effect, or its contribution by difference rules. The control is the mean absolute share of random other neurons of
    the source's layer and token."""

    source: NodeId
    into: NodeId | Literal["answer"] = "answer"
    """The target of the edge."""
    parts: tuple[str, ...] = ()
    """Whole parts of earlier tokens through which the edge may pass, such as ``ffn:differing``."""
    heads: bool = False
    """Whether no edge passes through a head, because heads may be nodes; so also if an end is a head."""
    measure: Literal["contribution", "effect"] = "contribution"
    """``effect``: the target changes by this share if the source alone has its counterfactual value. ``contribution``:
    difference rules assign this share to the source."""
    kind = "edge"
    value_is = "share of the difference of the edge's target"
    control_is = "the mean share of other neurons of the source's layer"

    def measured(self, model: Model, seed: int = 0) -> Measured:
        if self.counterfactual is None:
            raise InputError("A claim of an edge needs a counterfactual; give one.")
        ends = [self.source] + ([self.into] if isinstance(self.into, NodeId) else [])
        heads = self.heads or bool(self.parts) or any(node.neuron.site == "head" for node in ends)
        relevance = self.relevance(model, *node_sites(model, heads))
        check_comparable(relevance)
        for node in ends:
            check_node(model, relevance, node)
        others = others_of(model, self.source.neuron, seed)
        sources = [(neuron, self.source.position) for neuron in (self.source.neuron, *others)]
        target = (self.into.neuron, self.into.position) if isinstance(self.into, NodeId) else None
        parts = named_parts(model, relevance, _named(self.parts))
        if self.measure == "effect":
            share, *random = effect_shares(model, relevance, sources, target, parts)
        else:
            nodes = [*sources, target] if target else sources
            row = contribution_shares(model, relevance, nodes, parts)[-2 if target else -1]
            share, *random = row[len(relevance.tokens) :].tolist()[: len(sources)]
        return Measured(share, fmean(map(abs, random)))

    @classmethod
    def of(cls, graph: Graph, about: dict[str, Any]) -> list[Draft]:
        """Return the claims of the first edges between nodes."""
        rows = [edge for edge in graph.edges if (edge.effect_share or 0) > 0 and not edge.is_like_random]
        ends = [(edge.source, edge.target) for edge in rows if isinstance(edge.source, Node)][:CLAIMED_EDGES]
        about = {**about, "parts": part_names(graph.whole_parts), "heads": graph.heads, "measure": "effect"}
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

    def measured(self, model: Model, seed: int = 0) -> Measured:
        raised, lowered = ([model.answer_id(word, "word") for word in words] for words in (self.raises, self.lowers))
        if not raised + lowered:
            raise InputError("A claim of an effect needs tokens that are raised or lowered; give some.")
        relevance = self.relevance(model, self.node.neuron.site)
        check_node(model, relevance, self.node)
        node_effects = NodeEffects(model, relevance)
        likely = node_effects.token_ids
        neurons = [self.node.neuron, *others_of(model, self.node.neuron, seed)]
        node_effects.token_ids = ids = list(dict.fromkeys([*likely, *raised, *lowered]))
        matrix, *_ = node_effects.effects([[NodeId(neuron, self.node.position).ranked] for neuron in neurons])
        matrix = matrix - matrix[:, : len(likely)].mean(1, keepdim=True)
        values = matrix.new_zeros(len(neurons))
        for words, sign in ((raised, 1), (lowered, -1)):
            if words:
                values += sign * matrix[:, [ids.index(word) for word in words]].mean(1)
        value, *random = values.tolist()
        return Measured(value, fmean(map(abs, random)))

    @classmethod
    def of(cls, model: Model, node: ExplainedNode, about: dict[str, Any]) -> list[Draft]:
        """Return the claim of the words of a node; none if no word is a token."""
        raises, lowers = (_readable(model, words) for words in (node.raises, node.lowers))
        about = {**about, "node": NodeId.of(node.ranked)}
        return [(cls(**about, raises=raises, lowers=lowers), None)] if raises or lowers else []

    def __str__(self) -> str:
        raised, lowered = ", ".join(map(repr, self.raises)), ", ".join(map(repr, self.lowers))
        return f"{self.node} raises {raised or 'nothing'}, lowers {lowered or 'nothing'} after {self.prompt!r}"


def subject(model: Model, relevance: Relevance) -> dict[str, Any]:
    """Return the fields that a claim of a relevance has (`Explained`). Raises `InputError` for what claims lack."""
    other, request = relevance.counterfactual, relevance.run.request
    special = relevance.image or relevance.target is None or (other and (other.model or len(other.pairs) != 1))
    if (
        not request
        or special
        or relevance.prompt.answer_start is not None
        or relevance.predicted_at != len(relevance.prompt.ids) - 1
    ):
        raise InputError(
            "A claim is about the next token of a text or a chat, compared with at most one counterfactual prompt; "
            "leave out --claim."
        )
    prompt, others = request.prompt, request.counterfactuals
    text = relevance.contrast.text if relevance.contrast else None
    contrast = _token(model, relevance.contrast, prompt) if text else (other.contrasts[0] if other else None)
    return {
        "prompt": claimed_prompt(prompt),
        "target": _token(model, relevance.target, prompt),
        "contrast": contrast or None,
        "counterfactual": claimed_prompt(others[0]) if others else None,
        "method": name_of(relevance.method),
        "number": relevance.prediction.objective if relevance.prediction.objective in ("log-odds", "logit") else None,
    }


def _token(model: Model, token: TokenScore | None, prompt: Any) -> str | int:
    """Return the text of a token, or its id if the text is not read as that token."""
    assert token is not None
    try:
        same = model.answer_id(token.text, after=prompt) == token.id
    except InputError:
        same = False
    return token.text if same else token.id


def of_explanation(model: Model, explanation: Explanation) -> list[Draft]:
    """Return claims of the answer, the tokens and the first node of an explanation."""
    relevance = explanation.relevance
    about = subject(model, relevance)
    drafts = [*AnswerClaim.of(relevance, about), *RelevanceClaim.of_tokens(relevance, about)]
    if stages := explanation.stages:
        drafts += [*StagesClaim.of(stages, about), *(SwapClaim.of(stages, about) if stages.kind == "alone" else [])]
    return [*drafts, *_of_nodes(model, explanation.nodes[:1], about)]


def of_ranking(model: Model, explanation: Explanation) -> list[Draft]:
    """Return claims of the first nodes of a ranking, and of the sufficiency and necessity that were measured."""
    relevance = explanation.relevance
    about, by = subject(model, relevance), explanation.ranking.by
    drafts = _of_nodes(model, explanation.nodes[:CLAIMED_NODES], about)
    for measured in explanation.ablations:
        drafts += _of_ablation(measured, most_relevant(relevance, measured.site, measured.nodes, by), about)
    return drafts


def of_graph(model: Model, graph: Graph, ablation: Ablation | None) -> list[Draft]:
    """Return claims of the first edges of a circuit, and of all of its nodes if their ablation was measured, or if they
    are those of the stages."""
    about = subject(model, graph.relevance)
    measured = _of_ablation(ablation, tuple(map(NodeId.of, graph.nodes)), about) if ablation else []
    if graph.whole_parts:  # the sufficiency beside whole parts is what a claim of stages measures
        nodes = tuple(node.neuron for node in graph.nodes)
        stages = StagesClaim(**about, nodes=nodes, parts=part_names(graph.whole_parts))
        measured = [(stages, None), *(draft for draft in measured if isinstance(draft[0], NecessityClaim))]
    return [*EdgeClaim.of(graph, about), *measured]


def part_names(parts: Sequence[WholePart]) -> tuple[str, ...]:
    """Return the names of whole parts in claims, such as ``ffn:differing``."""
    return tuple(f"{part.kind}:{part.where}" for part in parts)


def _named(parts: Sequence[str]) -> WholeKinds:
    """Return whole parts by their names. Raises `InputError`."""
    named = {":".join(part): part for part in WHOLE_KINDS}
    if unknown := set(parts) - set(named):
        raise InputError(f"{', '.join(sorted(unknown))} are no whole parts; take {', '.join(sorted(named))}.")
    return frozenset(named[part] for part in parts)


def _of_nodes(model: Model, nodes: Sequence[ExplainedNode], about: dict[str, Any]) -> list[Draft]:
    drafts: list[Draft] = []
    for node in nodes:
        if node.ranked.relevance > 0:
            drafts.append((RelevanceClaim(**about, node=NodeId.of(node.ranked)), None))
        drafts += EffectClaim.of(model, node, about)
    return drafts


def _readable(model: Model, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that are one token, with the space before them where they have one."""
    tokens = []
    for word in words[:CLAIMED_WORDS]:
        for text in (f" {word}", word) if not model.labels else (word,):
            try:
                model.answer_id(text)
            except InputError:
                continue
            tokens.append(text)
            break
    return tuple(tokens)


def _of_ablation(measured: Ablation, nodes: tuple[NodeId, ...], about: dict[str, Any]) -> list[Draft]:
    kinds: tuple[type[NodesClaim], ...] = (SufficiencyClaim, NecessityClaim)
    return [(kind(**about, nodes=nodes), kind.of_ablation(measured)) for kind in kinds]

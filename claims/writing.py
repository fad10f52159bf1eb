"""Claims from results: what `--claim` of explain, rank, circuit, flip, label and concept writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from icebear.actmax.labels.kinds import Label
from icebear.claims.claim import Claim
from icebear.claims.files import append_claims
from icebear.claims.kind import Kind, Measured, NodeId, most_relevant
from icebear.claims.kinds.answer import AnswerClaim
from icebear.claims.kinds.concept import ConceptClaim
from icebear.claims.kinds.edge import EdgeClaim
from icebear.claims.kinds.effect import EffectClaim
from icebear.claims.kinds.flip import FlipClaim
from icebear.claims.kinds.label import LabelClaim
from icebear.claims.kinds.nodes import NecessityClaim, SufficiencyClaim
from icebear.claims.kinds.relevance import RelevanceClaim
from icebear.concepts.circuits.graph import Graph
from icebear.concepts.circuits.records import AnswerNode, Node
from icebear.concepts.methods.registry import name_of
from icebear.concepts.nodes.controls import Ablation
from icebear.concepts.results.result import Relevance
from icebear.convert import CONVERTER
from icebear.errors import InputError
from icebear.explanation.explanation import ExplainedNode, Explanation
from icebear.models.model import Model
from icebear.models.text.chat import Chat
from icebear.models.text.prompts import prompt_json
from icebear.recipe import Recipe
from icebear.records import Meaning, TokenScore
from icebear.steering.concept.concept import Concept
from icebear.steering.concept.finding import prepared
from icebear.steering.records import FlipRecord, SideEffects

TOKENS, NODES, EDGES, WORDS = 2, 3, 3, 4
Draft = tuple[Kind, Measured | None]
"""What is claimed, and what it measures if that is known."""


def append(model: Model, path: str | Path, drafts: Iterable[Draft], seed: int = 0) -> tuple[list[Claim], list[str]]:
    """Append claims to a file.

    Returns
    -------
    claims, refused
        What was written, and a sentence for each claim that was not, such as one that cannot fail.

    Raises
    ------
    InputError
        If there is nothing to write, or the file cannot be written.
    """
    claims: list[Claim] = []
    refused: list[str] = []
    for what, measured in drafts:
        try:
            claims.append(Claim.of(model, what, seed, measured))
        except InputError as error:
            refused.append(f"{what.kind}: {what}. {error}")
    if not claims:
        reason = refused[0] if refused else "nothing was measured that a claim can be made of"
        raise InputError(f"No claim was written ({reason.rstrip('.')}).")
    append_claims(path, claims)
    return claims, refused


def of_explanation(model: Model, explanation: Explanation, prompt: Any, counterfactual: Any) -> list[Draft]:
    """Return claims of the answer, the tokens and the first node of an explanation."""
    relevance = explanation.relevance
    about = subject(model, relevance, prompt, counterfactual)
    drafts: list[Kind] = []
    if relevance.target and relevance.target == relevance.predictions[0]:
        drafts.append(AnswerClaim(about["prompt"], relevance.target.text))
    excluded = {*relevance.prompt.sinks, *relevance.prompt.template}
    places = [place for place in range(len(relevance.tokens)) if place not in excluded]
    able = [place for place in places if relevance.tokens[place] > 1e-6]
    first = sorted(able, key=lambda place: -relevance.tokens[place].item())[:TOKENS]
    drafts += [RelevanceClaim(**about, token=place, text=relevance.prompt.strings[place]) for place in first]
    return [(what, None) for what in (*drafts, *_of_nodes(model, explanation.nodes[:1], about))]


def of_ranking(model: Model, explanation: Explanation, prompt: Any, counterfactual: Any) -> list[Draft]:
    """Return claims of the first nodes of a ranking, and of the sufficiency and necessity that were measured."""
    relevance = explanation.relevance
    about, by = subject(model, relevance, prompt, counterfactual), explanation.ranking.by
    drafts: list[Draft] = [(what, None) for what in _of_nodes(model, explanation.nodes[:NODES], about)]
    for one in explanation.ablations:
        drafts += _of_ablation(one, most_relevant(relevance, one.site, one.nodes, by), about)
    return drafts


def of_graph(model: Model, graph: Graph, ablation: Ablation | None, prompt: Any, counterfactual: Any) -> list[Draft]:
    """Return claims of the first edges of a circuit, and of all of its nodes if their ablation was measured."""
    about = subject(model, graph.relevances[0], prompt, counterfactual)
    drafts: list[Draft] = []
    for edge in graph.edges:
        if isinstance(edge.source, Node) and edge.contribution_share > 0 and len(drafts) < EDGES:
            into: Any = "answer" if isinstance(edge.target, AnswerNode) else _node(edge.target)
            drafts.append((EdgeClaim(**about, source=_node(edge.source), into=into), None))
    return [*drafts, *(_of_ablation(ablation, tuple(map(_node, graph.nodes)), about) if ablation else [])]


def of_recipe(recipe: Recipe, effects: SideEffects) -> list[Draft]:
    """Return the claim of a flip: its edits, at no more than its side effects."""
    record = FlipRecord.of(recipe)
    if record is None or record.top_k is not None:
        raise InputError("A claim is about a flip to a token or phrase; give --to.")
    if not recipe.edits:
        raise InputError(
            "A claim of a flip needs edits, and the model gives this answer without any; leave out --claim."
        )
    most = 1.05 * effects.off_target_kl + 1e-3
    return [(FlipClaim(_prompt(record.prompt), record.text, recipe.edits, round(most, 6)), None)]


def of_labels(path: str, meanings: Iterable[Meaning]) -> list[Draft]:
    """Return claims of labels with a score."""
    return [
        (LabelClaim(path, one.neuron, one.polarity, one.text, _label(one), one.by), None)  # type: ignore[arg-type]
        for one in meanings
        if one.record and one.score > 0.5
    ]


def of_concept(concept: Concept, examples: Sequence[str], others: Sequence[str], seed: int) -> list[Draft]:
    """Return the claim of a concept on the texts that test it."""
    texts, positive, part = prepared(examples, others, seed)
    tests = [(text, own) for text, own, number in zip(texts, positive, part, strict=True) if number == 2]
    with_it, without = (tuple(text for text, own in tests if bool(own) is kind) for kind in (True, False))
    return [(ConceptClaim(concept.name, concept.parts, with_it, without), None)]


def subject(model: Model, relevance: Relevance, prompt: Any, counterfactual: Any) -> dict[str, Any]:
    """Return the fields that a claim of a relevance has (`Explained`). Raises `InputError` for what claims lack."""
    other = relevance.counterfactual
    special = relevance.image or relevance.target is None or (other and (other.model or len(other.pairs) != 1))
    if special or relevance.prompt.answer_start is not None or relevance.predicted_at != len(relevance.prompt.ids) - 1:
        raise InputError(
            "A claim is about the next token of a text or a chat, compared with at most one counterfactual prompt; "
            "leave out --claim."
        )
    own = relevance.contrast.text if relevance.contrast else None
    contrast = _token(model, relevance.contrast, prompt) if own else (other.contrasts[0] if other else None)
    return {
        "prompt": _prompt(prompt),
        "target": _token(model, relevance.target, prompt),
        "contrast": contrast or None,
        "counterfactual": _prompt(counterfactual) if counterfactual is not None else None,
        "method": name_of(relevance.method),
        "number": relevance.prediction.objective if relevance.prediction.objective in ("log-odds", "logit") else None,
    }


def _prompt(prompt: Any) -> Any:
    plain = prompt_json(prompt)
    if isinstance(plain, str):
        return plain
    if isinstance(prompt, Chat) or (plain and isinstance(plain[0], dict)):
        return tuple({key: str(value) for key, value in message.items()} for message in plain)
    raise InputError("A claim is about a text or a chat, not about token ids; leave out --claim.")


def _token(model: Model, token: TokenScore | None, prompt: Any) -> str | int:
    """Return the text of a token, or its id if the text is not read as that token."""
    assert token is not None
    try:
        same = model.answer_id(token.text, after=prompt) == token.id
    except InputError:
        same = False
    return token.text if same else token.id


def _of_nodes(model: Model, nodes: Sequence[ExplainedNode], about: dict[str, Any]) -> list[Kind]:
    drafts: list[Kind] = []
    for one in nodes:
        node = NodeId(one.ranked.neuron, one.ranked.position)
        if one.ranked.relevance > 0:
            drafts.append(RelevanceClaim(**about, node=node))
        raises, lowers = (_readable(model, words) for words in (one.raises, one.lowers))
        if raises or lowers:
            drafts.append(EffectClaim(**about, node=node, raises=raises, lowers=lowers))
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


def _node(node: Node) -> NodeId:
    return NodeId(node.neuron, node.position)


def _label(meaning: Meaning) -> Label:
    return CONVERTER.structure(meaning.record["label"], Label)

"""Explanations as plain values: the tokens at once, the groups when they are measured."""

from __future__ import annotations

from dataclasses import replace

from icebear.concepts.results.effects import Patched
from icebear.concepts.results.result import Relevance
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.edits import Edit
from icebear.explanation import sentences
from icebear.explanation.explanation import Explanation, edited_at
from icebear.explanation.record import ExplainedGroup, ExplainedNode
from icebear.explanation.saved import SavedExplanation, SavedGroup, SavedNode
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike, prompt_json


def saved_tokens(
    relevance: Relevance, prompt: PromptLike, counterfactual: PromptLike | None = None
) -> SavedExplanation:
    """Return what the relevance of tokens says. prompt, counterfactual: what it was computed for."""
    compared = relevance.counterfactual
    return SavedExplanation(
        prompt_json(prompt),
        None if counterfactual is None else prompt_json(counterfactual),
        relevance.target_text,
        relevance.contrast_text or None,
        relevance.predictions,
        compared.predictions if compared else (),
        relevance.prompt.strings,
        tuple(relevance.tokens.tolist()),
        relevance.prompt.sinks,
        relevance.prompt.template,
        "" if relevance.image else sentences.tokens_sentence(relevance),
        sentences.margins_sentence(relevance),
        relevance.made_with,
    )


def saved_groups(begun: SavedExplanation, model: Model, explanation: Explanation) -> SavedExplanation:
    """Return the explanation of the same relevance with its groups, and what they say together."""
    patched = Patched(model, explanation.relevance)
    return replace(
        begun,
        together_sentence=sentences.together_sentence(explanation),
        reach_sentence=sentences.reach_sentence(explanation),
        groups=tuple(_group(patched, group) for group in explanation.groups),
    )


def _group(patched: Patched, explained: ExplainedGroup) -> SavedGroup:
    nodes = explained.group.nodes
    heads = any(row.neuron.site == "head" for row in nodes)
    raises, lowers = explained.group.words()
    prompt = patched.relevance.prompt
    edits = [
        Edit(row.neuron, "set", patched.node(row).value.item(), where=edited_at(prompt, row))
        for row in (() if heads else nodes)
    ]
    return SavedGroup(
        tuple(raises),
        tuple(lowers),
        sentences.group_text(explained),
        tuple(edits),
        tuple(_node(patched, node) for node in explained.strongest),
    )


def _node(patched: Patched, node: ExplainedNode) -> SavedNode:
    row, neuron = node.ranked, node.ranked.neuron
    named = SavedNode(row, node.token, node.raises, node.lowers, node.label)
    if row.activation is None:
        return named
    baseline = patched.node(row).value.item()
    ends = [row.activation, baseline]
    if neuron.site == "ffn":
        seen = calibrate(patched.model)
        ends += [seen.low[neuron.layer, neuron.index].item(), seen.high[neuron.layer, neuron.index].item()]
    return replace(named, baseline=baseline, low=min(ends), high=max(ends))

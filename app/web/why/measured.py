"""Measure what the first view shows of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from icebear.app.web.why.finding import Finding, Group, Strong
from icebear.concepts.results.effects import Patched
from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.edits import Edit
from icebear.explanation.explanation import ExplainedGroup, ExplainedNode, Explanation, Grouped
from icebear.explanation.sentences import group_text, reach_sentence, together_sentence, tokens_sentence
from icebear.models.model import Model
from icebear.records import Ranked, TokenScore

SHOWN = 10
"""The number of probable tokens that are offered as answers."""


def finding(relevance: Relevance, prompt: str, counterfactual: str | None) -> Finding:
    """Return a finding without its groups, which take seconds (`with_groups`)."""
    there = relevance.counterfactual
    return Finding(
        prompt,
        counterfactual,
        relevance.target_text,
        relevance.contrast_text or None,
        listed(relevance.predictions),
        listed(there.predictions if there else ()),
        tuple(relevance.prompt.strings),
        tuple(relevance.tokens.tolist()),
        tuple(relevance.prompt.sinks),
        tuple(relevance.prompt.template),
        "" if relevance.image else tokens_sentence(relevance),
        _margins(relevance),
        relevance.conservation_text(),
    )


def with_groups(model: Model, finding: Finding, relevance: Relevance, site: str, grouped: Grouped) -> Finding:
    """Return the finding with the groups of a site, as of `explain_groups`, and what they say together."""
    together, explained = grouped
    explanation = Explanation(relevance, Ranking(site=site), (), together=together, groups=explained)
    patched = Patched(model, relevance)
    groups = tuple(_group(patched, group) for group in explained)
    sentence, reach = together_sentence(explanation), reach_sentence(explanation)
    return replace(finding, together=sentence, reach=reach, groups=groups)


def listed(tokens: Sequence[TokenScore]) -> tuple[tuple[str, str], ...]:
    return tuple((token.text, token.number) for token in tokens[:SHOWN])


def _margins(relevance: Relevance) -> str:
    """Return by how much the target leads the contrast, in the prompt and in the counterfactual, as a sentence."""
    if not relevance.counterfactual or not relevance.contrast_text:
        return ""
    there = fmean(relevance.counterfactual.numbers)
    here = relevance.sums.target + there
    by = [f"{'leads' if margin > 0 else 'trails'} by {abs(margin):.1f} logits" for margin in (here, there)]
    target, contrast = relevance.target_text, relevance.contrast_text
    return f"Against {contrast!r}, {target!r} {by[0]} here and {by[1]} in the counterfactual."


def _group(patched: Patched, explained: ExplainedGroup) -> Group:
    nodes = explained.group.nodes
    heads = any(row.neuron.site == "head" for row in nodes)
    raises, lowers = explained.group.words()
    return Group(
        tuple(raises),
        tuple(lowers),
        group_text(explained),
        () if heads else tuple(str(_edit(patched, row)) for row in nodes),
        tuple(_strong(patched, node) for node in explained.strongest),
    )


def _edit(patched: Patched, row: Ranked) -> Edit:
    """Return the edit that sets a neuron to the value that its effect is measured against."""
    position = row.position - patched.read if row.position >= patched.read else row.position  # anew in the decoder
    return Edit(row.neuron, "set", patched.node(row).value.item(), where=f"position:{position}")


def _strong(patched: Patched, node: ExplainedNode) -> Strong:
    row, neuron = node.ranked, node.ranked.neuron
    named = Strong(str(neuron), row.polarity, node.token, node.raises, node.lowers, node.label)
    if row.activation is None:
        return named
    here, there = row.activation, patched.node(row).value.item()
    ends = [here, there]
    if neuron.site == "ffn":
        seen = calibrate(patched.model)
        ends += [seen.low[neuron.layer, neuron.index].item(), seen.high[neuron.layer, neuron.index].item()]
    return replace(named, here=here, there=there, low=min(ends), high=max(ends))

"""`circuit`: the nodes that make the difference between two prompts, and the direct edges between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.controls import largest
from icebear.concepts.attribution.result import Relevance
from icebear.concepts.circuits import edges
from icebear.concepts.circuits import nodes as choosing
from icebear.concepts.circuits.edges import Place
from icebear.concepts.circuits.graph import KEPT, Graph
from icebear.concepts.circuits.records import Node
from icebear.concepts.methods.lrp import DIFFERENCE
from icebear.concepts.models.answer import Span
from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import Token
from icebear.concepts.models.prompts import PromptLike, Prompts
from icebear.concepts.vocabulary import projections
from icebear.errors import InputError
from icebear.records import Neuron
from icebear.values import POSITIVE, real, whole

WORDS = 6


def circuit(
    model: Model,
    prompt: PromptLike | Prompts,
    target: Token | Sequence[Token] | None = None,
    contrast: Token | Sequence[Token] | None = None,
    *,
    counterfactual: PromptLike | Prompts,
    span: Span | None = None,
    nodes: int = 60,
    faithfulness: float | None = None,
    heads: bool = False,
    kept: float = KEPT,
    on_progress: Callable[[int, int], None] | None = None,
) -> Graph:
    """The circuit of what the model predicts after `prompt`, compared with another prompt of as many tokens.

    prompt, target, contrast, counterfactual, span: as of `attribute`. A list of prompts with a list of others gives
        one circuit of them all: scores are averaged token by token, so all must be of one length.
    nodes: how many (neuron, token) pairs, those of the largest |relevance| by difference rules.
    faithfulness: instead, the smallest number that carries so much of the difference (`Graph.ablation`), by bisection.
    heads: attention heads are nodes too (not of attention to an encoder); edges then stop at them as well.
    kept: the share of influence by the edges that are kept.
    on_progress: is told how many of the backward passes' targets are done, of how many.

    Edges are direct, past no other neuron: `effect` is gradient x difference, `contribution` by difference rules.
    Source: of effects Marks et al. 2025, of contributions `icebear.concepts.lrp.differences`. Raises
    `InputError`.
    """
    whole(nodes, "The number of nodes", 1, choosing.MOST)
    for what, share in (("faithfulness", faithfulness), ("share of influence that is kept", kept)):
        if share is not None or what != "faithfulness":
            real(share, f"The {what}", POSITIVE, 1)
    found = _compared(model, prompt, target, contrast, counterfactual, span, heads)
    scores = torch.stack([choosing.scored(relevance, heads) for relevance in found]).mean(0)
    if faithfulness is not None:
        nodes = choosing.fewest(model, found, scores, faithfulness, heads)
    places = choosing.places(model, largest(scores, nodes))
    nodes = len(places)
    differences = [choosing.own_and_other(relevance, places) for relevance in found]
    done, total = 0, 3 * len(found) * (nodes + 1)

    def told(targets: int) -> None:
        nonlocal done
        done = min(total, done + targets)
        if on_progress:
            on_progress(done, total)

    parts = [_edges(model, relevance, places, heads, told) for relevance in found]
    effect, patterns, contribution = (torch.stack(matrices).mean(0) for matrices in zip(*parts, strict=True))
    own, other = (torch.stack(numbers).mean(0) for numbers in zip(*differences, strict=True))
    return Graph(
        model,
        tuple(found),
        _nodes(model, places, scores, own, other),
        effect,
        patterns,
        contribution,
        own - other,
        kept,
        heads,
        {**model.made_with, "asked": {"nodes": nodes, "faithfulness": faithfulness, "heads": heads, "kept": kept}},
    )


def _compared(
    model: Model, prompt: PromptLike | Prompts, target: Any, contrast: Any, counterfactual: Any, span: Any, heads: bool
) -> list[Relevance]:
    sites = ("ffn", "attn") if heads else ("ffn",)
    one_or_more: Any = attribute(model, prompt, target, contrast, counterfactual=counterfactual, span=span, sites=sites)  # type: ignore[arg-type]
    found: list[Relevance] = one_or_more if isinstance(one_or_more, list) else [one_or_more]
    for relevance in found:
        told = relevance.counterfactual
        if told is None:
            raise InputError("A circuit explains the difference to another prompt; give counterfactual.")
        if relevance.rather:
            raise InputError("A circuit explains a phrase against one token at most; leave the contrast out.")
        if len(told.prompts) != 1:
            raise InputError("A circuit compares with one other prompt; give one.")
        counts = len(relevance.tokens), len(told.prompts[0])
        if told.at != "both":
            raise InputError(
                f"A circuit compares token by token, but the prompt has {counts[0]} tokens and the other {counts[1]}; "
                f"give another prompt of {counts[0]}."
            )
        if not relevance.conservation().target:
            raise InputError("Both prompts give the explained number alike, so there is nothing to explain.")
    lengths = dict.fromkeys(len(relevance.tokens) for relevance in found)
    if len(lengths) > 1:
        counted = " and ".join(map(str, lengths))
        raise InputError(f"The prompts of one circuit must be equally long, but have {counted} tokens; give such ones.")
    return found


def _edges(
    model: Model, relevance: Relevance, places: Sequence[Place], heads: bool, told: Callable[[int], None]
) -> list[Tensor]:
    """(K + 1, S) effects, what of them goes through attention patterns, and contributions."""
    pair, targets = choosing.pair_of(relevance), [*choosing.probes(relevance, places), None]
    difference = {site: choosing.change(relevance, site) for site in (("ffn", "attn") if heads else ("ffn",))}
    read = [x[0] - x[1] for x in edges.inputs_of(model, pair)]
    find = partial(edges.direct, model, pair, targets, places, read, difference, told=told)
    effect, held, contribution = find(), find(held=True), find(DIFFERENCE)
    whole, values, shared = (_matrix(parts, places) for parts in (effect, held, contribution))
    return [whole, whole - values, shared]


def _matrix(parts: edges.EdgeSums, places: Sequence[Place]) -> Tensor:
    """(K + 1, S) of tokens, nodes, and what is not shown."""
    rest = parts.sums.clone()  # (K + 1, L, T)
    for number, (_, layer, token, _) in enumerate(places):
        rest[:, layer, token] -= parts.nodes[:, number]
    return torch.cat((parts.tokens, parts.nodes, rest.flatten(1)), 1)


def _nodes(model: Model, places: Sequence[Place], scores: Tensor, own: Tensor, other: Tensor) -> tuple[Node, ...]:
    """With the words that their differences write."""
    neurons = [Neuron(layer, site, index) for site, layer, _, index in places]
    said = projections(model, (neuron for neuron in neurons if neuron.site == "ffn"), WORDS)

    def node(neuron: Neuron, token: int, here: float, there: float) -> Node:
        words: tuple[str, ...] = ()
        if neuron in said:
            rows = said[neuron].promoted if here >= there else said[neuron].suppressed
            words = tuple(row.text for row in rows)
        score = scores[neuron.layer, token, choosing.column(model, neuron)]
        return Node(neuron, token, score.item(), here, there, words)

    positions = [token for _, _, token, _ in places]
    each = zip(neurons, positions, own[:-1].tolist(), other[:-1].tolist(), strict=True)
    return tuple(node(*of) for of in each)

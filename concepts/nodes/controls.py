"""Sufficiency and necessity of nodes: activation patching with counterfactual values, with random controls.

A node is a neuron or attention head at a token. F(K) = (m(K) - m(c)) / (m(x) - m(c)), where m is the explained number,
x the prompt and c the counterfactual. In m(K), the nodes of K are recomputed and all other nodes of the site take their
counterfactual values. Sufficiency is F(K) ("faithfulness" in Marks et al. 2024, arXiv 2403.19647); necessity is 1
minus F of all other nodes (1 - "completeness"). F of no nodes is not 0 where what is recomputed, such as attention to
the last token's own embedding, brings a part of the difference back.

Without a counterfactual, the mean activations on the calibration texts take the place of counterfactual values (mean
ablation), and m(c) is the number when all nodes take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch
from torch import Tensor

from icebear.concepts.passes.patching import PatchableNodes
from icebear.concepts.passes.prompt import Counterfactual
from icebear.concepts.passes.run import Logits, forward
from icebear.concepts.passes.sites import neuron_site
from icebear.concepts.results.ranking import By
from icebear.concepts.results.result import Relevance
from icebear.concepts.vocabulary.calibration import calibrate
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import InNotebooks
from icebear.values import check_int, seed_of, typed

RANDOM_SETS = 5
"""Random sets of neurons."""
RANDOM_HEAD_SETS = 20
"""Random sets of heads: single heads differ more than single neurons do."""


def nodes_of(model: Model, relevance: Relevance, *sites: str) -> PatchableNodes:
    """Return the nodes of a relevance, by default of the site ``ffn``.

    Raises `InputError` if the relevance is of another model, or has not recorded all positions.
    """
    model.check_made(relevance.made_with["model"], "The relevance")
    if len(relevance.neurons.recorded) != len(relevance.tokens):
        raise InputError("Ablation needs the activations at all positions; pass record='all' to attribute.")
    if model.task.stacks == 2:
        raise InputError("Ablation needs one stack of layers, and an encoder-decoder has two; leave out the ablation.")
    if relevance.contrast_phrase:
        raise InputError("Ablation cannot measure a phrase against a contrast phrase; leave out the contrast.")
    objective, sites = relevance.explained(), sites or ("ffn",)
    activation = {site: relevance.activation(neuron_site(site)) for site in sites}
    if relevance.counterfactual is None:
        return PatchableNodes(
            model, objective, sites, activation, {site: _means(model, relevance, site) for site in sites}
        )
    contrast = relevance.contrast.id if relevance.contrast else None
    counterfactual = {site: relevance.neurons.counterfactual[neuron_site(site)] for site in sites}
    number_c = _counterfactual_number(model, relevance.counterfactual, contrast)
    return PatchableNodes(model, replace(objective, contrasts=(contrast,)), sites, activation, counterfactual, number_c)


def _means(model: Model, relevance: Relevance, site: str) -> Tensor:
    """Return mean activations (L, T, N) on the calibration texts. The means leave out sinks, which do not change."""
    values = relevance.activation(neuron_site(site)).clone()
    others = [position for position in range(len(relevance.tokens)) if position not in relevance.prompt.sinks]
    values[:, others] = calibrate(model).means[neuron_site(site)][:, None].to(values)
    return values


def _counterfactual_number(model: Model, counterfactual: Counterfactual, contrast: int | None) -> float:
    """Return m(c), the mean over several counterfactuals."""
    if len(set(counterfactual.contrasts)) < 2:  # else the numbers have contrasts that m has not
        return fmean(counterfactual.numbers)
    rows = [replace(pair.rows([1]), contrasts=(contrast,)) for pair in counterfactual.pairs]
    return fmean(forward(model, Logits(row), []).item() for row in rows)


def largest(scores: Tensor, k: int) -> Tensor:
    """Return the mask of the k nodes with the largest |score|."""
    flat = scores.abs().flatten()
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    chosen[flat.topk(min(k, len(flat))).indices] = True
    return chosen.view(scores.shape)


def most_relevant(scores: Tensor, k: int, positions: Sequence[int]) -> Tensor:
    """Return the mask of at most k nodes (L, T, W) with the largest scores above 0 at some positions."""
    allowed = torch.zeros_like(scores)
    allowed[:, list(positions)] = scores[:, list(positions)].clamp(min=0)
    return largest(allowed, min(k, int((allowed > 0).sum())))


def random_nodes(chosen: Tensor, site: str, generator: torch.Generator, layers: Sequence[int] | None = None) -> Tensor:
    """Draw a random mask (L, T, N) of nodes that are not chosen: as many neurons at each layer and token as `chosen`
    has, or as many heads at each token, from all layers. Where fewer are left, all of them are drawn.

    layers: the layers that have heads, by default all.
    """
    if site == "head":  # a layer has few heads, of which the chosen ones would leave less than a choice
        drawn, present = torch.zeros_like(chosen), list(range(len(chosen)) if layers is None else layers)
        by_token = chosen[present].transpose(0, 1).flatten(1)  # (T, L * H)
        drawn[present] = random_nodes(by_token, "", generator).unflatten(1, (len(present), -1)).transpose(0, 1)
        return drawn
    draw = torch.rand(chosen.shape, generator=generator).masked_fill(chosen, -1)
    counts = torch.minimum(chosen.sum(-1, keepdim=True), (~chosen).sum(-1, keepdim=True))
    most = int(counts.max())
    return torch.zeros_like(chosen).scatter(-1, draw.topk(most).indices, torch.arange(most) < counts)


@dataclass(frozen=True, repr=False)
class Ablation(InNotebooks):
    """Sufficiency and necessity of a list of nodes, with two controls. They may be below 0 or above 1 (overshoot)."""

    site: str
    """The site, or sites joined by +."""
    nodes: int
    sufficiency: float
    """F of the list: the share of the difference that comes about when all other nodes take their counterfactual
    values."""
    necessity: float
    """1 - F of all other nodes: the share that is lost when only the list takes its counterfactual values."""
    random_sufficiency: float
    """The median sufficiency of `RANDOM_SETS` random sets (`random_nodes`), for heads of `RANDOM_HEAD_SETS`."""
    random_necessity: float
    most_changed_sufficiency: float
    """Sufficiency of as many nodes whose activations change most, by |a - a'|."""
    most_changed_necessity: float
    empty_sufficiency: float
    """F of no nodes: all nodes take their counterfactual values, but for those of a circuit's whole parts."""
    difference: float
    """m(x) - m(c), in logits: what the shares are shares of."""


@typed
def ablation(
    model: Model, relevance: Relevance, k: int, site: str = "ffn", seed: int = 0, by: By = "positive"
) -> Ablation:
    """Measure sufficiency and necessity of the k most relevant nodes, with random controls.

    Parameters
    ----------
    model : Model
    relevance : Relevance
        A relevance that recorded all positions. Without a counterfactual or a base model, nodes take their mean
        activation on the calibration texts.
    k : int
        The number of nodes, as `Relevance.top` ranks them at all tokens: by positive relevance, without sinks.
    site : str
        ``ffn``, ``attn`` or ``head``.
    seed : int
        The seed of the random control.
    by : {"positive", "negative", "absolute"}
        The order, as in `Relevance.top`.

    Returns
    -------
    Ablation

    Raises
    ------
    InputError
        If the relevance is of another model, or not all positions were recorded, or patching the whole site changes
        nothing.

    References
    ----------
    Faithfulness and completeness: Marks et al. 2024, arXiv 2403.19647.
    """
    k, seed = check_int(k, "The number of nodes"), seed_of(seed)
    nodes, ranked = nodes_of(model, relevance, site), relevance.top(k, site, position="all", by=by)
    return ablate(nodes, relevance.mask(ranked, site), torch.Generator().manual_seed(seed))


def ablate(
    nodes: PatchableNodes, chosen: Tensor, generator: torch.Generator, recomputed: Tensor | None = None
) -> Ablation:
    """Measure sufficiency and necessity of a mask (L, T, W) of nodes, with controls.

    recomputed: the nodes of whole parts, which are recomputed beside the chosen ones when sufficiency is measured.
    """
    count, change = int(chosen.sum()), nodes.change()
    parts = list(zip(nodes.sites, chosen.split(nodes.widths, -1), strict=True))
    sets = range(RANDOM_HEAD_SETS if "head" in nodes.sites else RANDOM_SETS)
    layers = nodes.model.layers_with("attn") if "head" in nodes.sites else None
    draws = [torch.cat([random_nodes(part, site, generator, layers) for site, part in parts], -1) for _ in sets]
    changed = largest(change if recomputed is None else change * ~recomputed, count)
    sufficiency, remaining = recovered_shares(nodes, [chosen, changed, *draws], recomputed=recomputed)
    necessity = [1 - share for share in remaining]
    return Ablation(
        "+".join(nodes.sites),
        count,
        sufficiency[0],
        necessity[0],
        median(sufficiency[2:]),
        median(necessity[2:]),
        sufficiency[1],
        necessity[1],
        nodes.empty_share if recomputed is None else recovered_shares(nodes, [recomputed])[0][0],
        nodes.ends[0] - nodes.ends[1],
    )


def recovered_shares(
    nodes: PatchableNodes,
    choices: Sequence[Tensor],
    recomputed: Tensor | None = None,
) -> tuple[list[float], list[float]]:
    """Return F of each mask of nodes, and F of all other nodes.

    recomputed: nodes that are recomputed beside those of each mask.
    """
    number_x, number_c = nodes.ends
    beside = choices if recomputed is None else [choice | recomputed for choice in choices]
    numbers = nodes.numbers([*beside, *(~choice for choice in choices)])
    values = [(number - number_c) / (number_x - number_c) for number in numbers]
    return values[: len(choices)], values[len(choices) :]

"""The neurons of a relevance: their scores by site, and their ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat, starmap
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from icebear.concepts.passes.neuron_recorders import Largest
from icebear.concepts.passes.prompt import PromptTokens
from icebear.concepts.passes.storage import SiteValues
from icebear.errors import InputError
from icebear.records import POLARITIES, SITES_AND_HEADS, Neuron, Ranked
from icebear.result_files import saved_as
from icebear.values import check_int, one_of, several, shown

Position = int | Literal["last", "all"]
By = Literal["positive", "negative", "absolute"]
SIZE: dict[By, Callable[[Tensor], Tensor]] = {
    "positive": lambda relevance: relevance,
    "negative": lambda relevance: -relevance,
    "absolute": lambda relevance: relevance.abs(),
}
"""How nodes are ordered -> the number whose largest values come first. Nodes where it is not above 0 are left out."""
SIGNS: tuple[By, ...] = ("positive", "negative")


@dataclass(frozen=True)
class Ranking:
    """How neurons are ranked: the arguments of `Relevance.top`."""

    k: int = 10
    site: str | None = None
    polarity: Literal["+", "-"] | None = None
    position: Position | None = None
    """None: an explanation ranks at ``all`` positions of an image or with a counterfactual, otherwise at ``last``."""
    include_sinks: bool = False
    by: By = "positive"
    layers: int | Iterable[int] | None = None
    include_template: bool = False

    def __post_init__(self) -> None:
        check_int(self.k, "The number of neurons to rank")
        if self.layers is not None and not isinstance(self.layers, Integral):
            object.__setattr__(self, "layers", tuple(several(self.layers)))
        one_of(self.by, "order", SIZE)
        if self.polarity is not None:
            one_of(self.polarity, "polarity", POLARITIES)
            if self.site == "head":
                raise InputError(
                    "A head has no polarity, because its output is a vector; leave out polarity, or rank site attn."
                )

    def positions(self, prompt: PromptTokens) -> list[int]:
        count, position = len(prompt.ids), self.position
        named = position if isinstance(position, str) else ""
        if named == "all":
            excluded = {*(() if self.include_sinks else prompt.sinks)}
            excluded |= {*(() if self.include_template else prompt.template)}
            return [t for t in range(count) if t not in excluded]
        if named == "last":
            return list(prompt.target_positions)
        if isinstance(position, Integral) and not isinstance(position, bool) and -count <= position < count:
            return [int(position) % count]
        raise InputError(f"Position {shown(position)} does not exist; use last, all or a number from 0 to {count - 1}.")


@dataclass(frozen=True, eq=False)
class NeuronScores:
    """Relevance and activations of the neurons of a prompt by site, (L, P, N), at P recorded positions."""

    relevance: SiteValues
    activation: SiteValues
    recorded: tuple[int, ...]
    head_count: int
    counterfactual: SiteValues = field(default_factory=SiteValues)
    """The counterfactual activations, (L, P, N) by site, averaged over several counterfactuals."""
    largest: Largest | None = None
    """With ``keep="top"``: what is recorded of the other positions."""

    @property
    def nbytes(self) -> int:
        parts = (self.relevance, self.activation, self.counterfactual)
        return sum(part.unmoved(site).nbytes for part in parts for site in part)

    def of(self, site: str) -> Tensor:
        """Return (L, P, N) relevance of the neurons of a site, or of heads. Raises `InputError` if it was not
        recorded."""
        if site == "head":
            return self.heads()
        self.check_site(site)
        return self.relevance[site]

    def check_site(self, site: str) -> None:
        if site == "head" and "attn" in self.relevance:
            raise InputError(
                "A head has no single activation: take those of its components, "
                "activation('attn').unflatten(-1, (model.heads, -1)), or its relevance, heads()."
            )
        if not isinstance(site, str) or site not in self.relevance:
            have = ", ".join(self.relevance) or "none"
            one_of(site, "site", SITES_AND_HEADS)
            raise InputError(f"This relevance has no site {shown(site)} (it has: {have}); add it to sites=.")

    def heads(self) -> Tensor:
        """Return (L, P, H) relevance of the outputs of the attention heads; (L, T, H) with ``keep="top"``."""
        return self._heads().cpu()

    def _heads(self) -> Tensor:
        """Return them where they were recorded."""
        self.check_site("attn")
        if self.largest and self.largest.heads is not None:
            return self.largest.heads
        return self.relevance.unmoved("attn").unflatten(-1, (self.head_count, -1)).sum(-1)

    def _on_one_device(self, site: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return relevance, activations and counterfactual activations of a site where they lie, or on the CPU if a
        part of them was moved there."""
        self.check_site(site)
        parts = (self.relevance, self.activation, self.counterfactual)
        is_split = len({part.unmoved(site).device for part in parts if site in part}) > 1
        of = SiteValues.__getitem__ if is_split else SiteValues.unmoved
        activation, others = (of(part, site) if site in part else None for part in parts[1:])
        return of(self.relevance, site), activation, others

    def top(self, ranking: Ranking, prompt: PromptTokens) -> list[Ranked]:
        """Rank neurons by relevance, see `Relevance.top`."""
        rows: list[Ranked] = []
        for site in self.relevance if ranking.site is None else [ranking.site]:
            if self.largest and ranking.position == "all" and site != "head":
                self.check_site(site)
                filters = (ranking.polarity, ranking.include_sinks, ranking.include_template)
                if any(filters) or ranking.layers is not None:
                    raise InputError(
                        "Only the neurons with the largest relevance were recorded; pass keep='all' to record all."
                    )
                rows += self.largest.top(ranking.k, site)
            else:
                rows += self._top_of_site(site, ranking, self.columns(site, ranking.positions(prompt)))
        sizes = SIZE[ranking.by](torch.tensor([row.relevance for row in rows], dtype=torch.float64)).tolist()
        order = sorted(zip(sizes, rows, strict=True), key=lambda pair: (-pair[0], pair[1].neuron, pair[1].position))
        return [row for size, row in order[: ranking.k] if size > 0]

    def only(self, k: int, recorded: Sequence[int], prompt: PromptTokens) -> NeuronScores:
        """Reduce scores of all positions to what ``keep="top"`` keeps: the recorded positions, and the k largest."""
        at = [check_int(position, "A position to record", 0, len(prompt.ids) - 1) for position in several(recorded)]
        ranked = {
            site: tuple(row for by in SIGNS for row in self.top(Ranking(k, site, position="all", by=by), prompt))
            for site in self.relevance
        }
        heads = self.heads() if "attn" in self.relevance else None
        largest = Largest(k, ranked, {site: x.sum(-1) for site, x in self.relevance.items()}, heads)
        parts: dict[str, Any] = {
            name: SiteValues({site: x[:, at] for site, x in getattr(self, name).items()})
            for name in ("relevance", "activation", "counterfactual")
        }
        return replace(self, **parts, recorded=tuple(at), largest=largest)

    def minus(self, other: NeuronScores, before: int) -> NeuronScores:
        """Subtract another relevance at the positions up to `before` that both recorded."""
        shared = [position for position in self.recorded if position < before and position in other.recorded]
        left, right = ([scores.recorded.index(position) for position in shared] for scores in (self, other))
        relevance = {site: x.clone() for site, x in self.relevance.items()}
        for site, x in relevance.items():
            x[:, left] -= other.of(site)[:, right]
        return replace(self, relevance=SiteValues(relevance))

    def _positions(self, site: str) -> Sequence[int]:
        """The positions of the columns of `of` or `heads`."""
        if self.largest and site == "head" and self.largest.heads is not None:
            return range(self.largest.heads.shape[1])
        return self.recorded

    def columns(self, site: str, positions: Sequence[int]) -> list[int]:
        """Return the columns of positions. Raises `InputError` if one was not recorded."""
        have = self._positions(site)
        if not set(positions) <= set(have):
            raise InputError(
                f"A position was not recorded (recorded: {', '.join(map(str, self.recorded)) or 'none'}); pass "
                "record='all' to attribute."
            )
        return [have.index(position) for position in positions]

    def _top_of_site(self, site: str, ranking: Ranking, columns: list[int]) -> Iterable[Ranked]:
        """With several target positions, rank the sum of each neuron, at the position that contributes most. All is
        computed where the values lie; only the k nodes move."""
        relevance, activation, others = (self._heads(), None, None) if site == "head" else self._on_one_device(site)
        chosen = relevance[:, columns].transpose(1, 2)  # (L, N, P): flat order is the order of ties
        where = chosen.new_tensor(columns, dtype=torch.long).expand(chosen.shape)
        if ranking.position == "last":
            most = SIZE[ranking.by](chosen).argmax(-1, keepdim=True)
            where, chosen = where.gather(-1, most), chosen.sum(-1, keepdim=True)
        scores = SIZE[ranking.by](chosen)
        scores = scores.masked_fill(scores <= 0, -torch.inf)
        if ranking.polarity and activation is not None:
            signs = (activation if others is None else activation - others).transpose(1, 2).gather(-1, where)
            scores = scores.masked_fill(signs >= 0 if ranking.polarity == "-" else signs < 0, -torch.inf)
        if ranking.layers is not None:
            layers = {check_int(layer, "A layer", 0, len(scores) - 1) for layer in several(ranking.layers)}
            scores[[layer for layer in range(len(scores)) if layer not in layers]] = -torch.inf
        layer, index, p = unraveled(_largest(scores.flatten(), ranking.k), scores.shape)
        column = where[layer, index, p]
        values, counterfactuals = (
            [None] * len(column) if x is None else x[layer, column, index].tolist() for x in (activation, others)
        )
        neurons = map(Neuron, layer.tolist(), repeat(site), index.tolist())
        positions = [self._positions(site)[number] for number in column.tolist()]
        rows = zip(neurons, positions, values, chosen[layer, index, p].tolist(), counterfactuals, strict=True)
        return starmap(Ranked, rows)


def unraveled(numbers: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the indices in each dimension of entries that are numbered as in a flattened tensor."""
    indices = []
    for size in reversed(shape):  # torch.unravel_index would import sympy, which takes longer than a ranking
        indices.append(numbers % size)
        numbers = numbers // size
    return indices[::-1]


def _largest(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest finite scores. Ties go to the first one, which topk does not guarantee."""
    k = min(k, int((scores > -torch.inf).sum()))
    if k == 0:
        return scores.new_empty(0, dtype=torch.long)
    last = scores.topk(k).values[-1]
    above = (scores > last).nonzero().flatten()
    tied = (scores == last).nonzero().flatten()[: k - len(above)]
    return torch.cat((above, tied))


saved_as(Ranking, lambda ranking: dict(vars(ranking)), lambda saved, _: Ranking(**saved))

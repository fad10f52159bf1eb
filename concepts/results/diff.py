"""`Diff`: the difference between a model's answer and its base model's, split among the weights that changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from icebear.concepts.results.ranking import Ranking
from icebear.concepts.results.result import Relevance
from icebear.concepts.weights.changed_weights import ChangedWeights
from icebear.concepts.weights.weight_parts import NEURONS, WeightKind
from icebear.errors import InputError, UnknownName
from icebear.records import Neuron, Ranked
from icebear.values import check_int, several

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, order=True)
class Change:
    """The change of a row or column of weights, or of a whole parameter, and what it caused."""

    module: str
    """The path of the module, or the name of a whole parameter."""
    layer: int | None
    kind: WeightKind
    """``w_in``, ``gate``, ``w_out``, ``q``, ``k``, ``v``, ``o``, ``embedding``, ``unembedding``, ``router``, ``norm``,
    ``bias``, ``cross`` or ``other``."""
    index: int
    """The neuron, head, key-value head or token; 0 for a whole parameter."""
    caused: float
    """Its part of the difference, in logits."""
    size: float
    """The norm of the change."""

    @property
    def neuron(self) -> Neuron | None:
        """The neuron or head; None for others."""
        site = NEURONS.get(self.kind)
        return Neuron(self.layer, site, self.index) if site and self.layer is not None else None

    def __str__(self) -> str:
        if self.neuron:
            return f"{self.neuron} {self.kind}"
        if self.kind in ("k", "v", "cross"):
            return f"L{self.layer} {self.kind} group {self.index}"
        return f"{self.kind} of token {self.index}" if self.kind.endswith("embedding") else self.module

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "neuron": str(self.neuron) if self.neuron else None, "name": str(self)}


@dataclass(frozen=True, eq=False, repr=False)
class Diff(Relevance):
    """Relevance compared with a base model, and what each changed weight caused, in logits.

    Relevance of tokens and neurons is what they *pass on*: the difference of their activations times the multiplier.
    What changed weights *cause* sums to the difference of the explained number, minus the relevance of tokens (zero if
    both models read the same prompt).
    """

    changes: tuple[ChangedWeights, ...] = ()

    @classmethod
    def from_relevance(cls, relevance: Relevance, changes: tuple[ChangedWeights, ...]) -> Diff:
        """Add what weights caused to a relevance."""
        caused = sum(float(change.caused.sum(dtype=torch.float64)) for change in changes)
        return cls(**{**vars(relevance), "sums": replace(relevance.sums, weights=caused)}, changes=changes)

    def __str__(self) -> str:
        return f"<Diff of {self.total:.3f} logits for {self.target_text!r}, {self.caused_total:.3f} caused by weights>"

    @property
    def total(self) -> float:
        """The explained number minus that of the base model."""
        return self.sums.target

    @property
    def caused_total(self) -> float:
        """The sum of what the changed weights caused; `total`, if both models read the same prompt."""
        return self.sums.weights

    def by_kind(self) -> dict[WeightKind, float]:
        """Return what the weights of each kind caused."""
        return self._sums(lambda change: change.kind)

    def by_layer(self) -> dict[int | None, float]:
        """Return what the weights of each layer caused; None for those outside of layers."""
        return self._sums(lambda change: change.layer)

    def _sums(self, key: Any) -> dict[Any, float]:
        sums: dict[Any, float] = {}
        for change in self.changes:
            sums[key(change)] = sums.get(key(change), 0.0) + float(change.caused.sum(dtype=torch.float64))
        return dict(sorted(sums.items(), key=lambda entry: -abs(entry[1])))

    def top_changes(
        self,
        k: int = 10,
        kind: WeightKind | Sequence[WeightKind] | None = None,
        layers: int | Iterable[int] | None = None,
    ) -> list[Change]:
        """Rank changes by the size of what they caused, largest first.

        Parameters
        ----------
        k : int
        kind : str or sequence of str, optional
            Only these kinds, see `Change.kind`.
        layers : int or iterable of int, optional
            Only these layers.

        Returns
        -------
        list of Change
        """
        chosen = self._chosen(kind, layers)
        return ranked_changes(chosen, [change.caused.abs() for change in chosen], check_int(k, "The number of changes"))

    def _chosen(self, kind: Any, layers: Any) -> list[ChangedWeights]:
        kinds = None if kind is None else set(several(kind))
        known = dict.fromkeys(change.kind for change in self.changes)
        for unknown in (kinds or set()) - WEIGHT_KINDS:
            raise UnknownName("kind of weight", str(unknown), WEIGHT_KINDS, f"The kinds here are {', '.join(known)}.")
        wanted = None if layers is None else {check_int(layer, "A layer") for layer in several(layers)}
        return [
            change
            for change in self.changes
            if (kinds is None or change.kind in kinds) and (wanted is None or change.layer in wanted)
        ]

    def passed_on(self, k: int = 10) -> list[Ranked]:
        """Rank neurons at tokens by the size of what they pass on, largest first.

        What a neuron passes on is (activation - activation in the base model) x multiplier: changed weights below
        caused it, and it is not part of the sum of causes.
        """
        if not self.sites:
            raise InputError("This result has no neurons; pass sites= to attribute, such as sites=['ffn'].")
        return self.neurons.top(Ranking(k, position="all", by="absolute"), self.prompt)

    def minus(self, other: Relevance) -> Diff:
        result = super().minus(other)
        assert isinstance(result, Diff)
        assert isinstance(other, Diff)
        pairs = zip(self.changes, other.changes, strict=True)
        return replace(result, changes=tuple(replace(a, caused=a.caused - b.caused) for a, b in pairs))

    def conservation_text(self) -> str:
        total, base = self.total, self.counterfactual.numbers[0] if self.counterfactual else 0.0
        number = "Logit difference" if self.contrast_text else "Logit"
        tokens = f", passed on from the prompts {self.sums.tokens:z.3f}" if self.sums.tokens else ""
        return (
            f"{number} {total + base:z.3f} here and {base:z.3f} in the base model; of the difference {total:z.3f}, "
            f"changed weights caused {self.caused_total:z.3f}{tokens}, remainder {self.sums.remainder:z.3f}"
        )

    def comparison_text(self) -> str:
        return f"Compared with the model {self.counterfactual.model}" if self.counterfactual else ""

    def to_dict(self, k: int = 20) -> dict[str, Any]:
        causes = {
            "total": self.total,
            "caused": self.caused_total,
            "by_kind": self.by_kind(),
            "by_layer": [{"layer": layer, "caused": value} for layer, value in self.by_layer().items()],
            "top": [change.to_dict() for change in self.top_changes(max(k, 1))],
        }
        return {**super().to_dict(k), "changes": causes}

    def to_frame(self, k: int = 100, kind: WeightKind | None = None, **ranking: Any) -> pandas.DataFrame:
        """Return the top k changes as a pandas table. Arguments are those of `top_changes`."""
        import pandas

        columns = ["name", "neuron", "layer", "kind", "index", "module", "caused", "size"]
        rows = [change.to_dict() for change in self.top_changes(k, kind, **ranking)]
        return pandas.DataFrame(rows, columns=columns).astype({"caused": float, "size": float})


WEIGHT_KINDS = set("gate w_in w_out q k v o cross router embedding unembedding norm bias other".split())


def ranked_changes(changes: Sequence[ChangedWeights], scores: Sequence[Tensor], k: int | None = None) -> list[Change]:
    """Return the k units (None: all) with the largest scores that are not negative. Units whose weights are the same in
    both models are left out."""
    if not changes:
        return []
    flat = torch.cat([x.masked_fill(change.size == 0, -1) for change, x in zip(changes, scores, strict=True)])
    count = min(int((flat >= 0).sum()), len(flat) if k is None else k)
    order = flat.argsort(descending=True, stable=True)[:count].tolist()
    bounds = torch.tensor([0, *(len(x) for x in scores)]).cumsum(0)
    owners = (torch.searchsorted(bounds, torch.tensor(order), right=True) - 1).tolist()
    starts, values = bounds.tolist(), [(change.caused.tolist(), change.size.tolist()) for change in changes]
    rows = []
    for number, owner in zip(order, owners, strict=True):
        change, (caused, size), index = changes[owner], values[owner], number - starts[owner]
        rows.append(Change(change.module, change.layer, change.kind, index, caused[index], size[index]))
    return rows

"""What of a saved result does not fit the rest of it: a file may have been changed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from torch import Tensor

from icebear.records import SITES, TokenScore

if TYPE_CHECKING:
    from icebear.concepts.attribution.result import Counterfactual, Largest, Relevance
    from icebear.concepts.circuits.graph import Graph


def of_relevance(found: Relevance) -> Iterator[str]:
    """The names of the parts that do not fit the others."""
    count = len(found.tokens) if found.tokens.dim() == 1 else 0
    each = (found.token_ids, found.token_strings)
    places = (*found.explained_at, *found.recorded, *found.sinks)
    ends = (found.read, found.answer_from or 0, *(end for turn in found.turns for end in _ends(turn)))
    checks = {
        "tokens": count > 0 and bool(found.tokens.isfinite().all()),
        "token_ids or token_strings": all(len(part) == count for part in each),
        "explained_at": len(found.explained_at) > 0,
        "explained_at, recorded or sinks": all(0 <= place < count for place in places),
        "recorded": list(found.recorded) == sorted(set(found.recorded)),
        "read, answer_from or turns": all(0 <= end <= count for end in ends),
        "turns": all(list(_ends(turn)) == sorted(_ends(turn)) for turn in found.turns),
        "head_count": found.head_count > 0,
        "conserved": all(map(isfinite, found.conserved.to_dict().values())),
        "target, contrast or predictions": all(isfinite(one.logit) for one in _scores(found)),
        "predictions": len(found.predictions) > 0,
        "made_with": _made(found.made_with),
        "positions": found.positions is None or _fits(found.positions, 2, count),
        "sites or recorded": all(_site(found, name, *pair) for name, pair in found.sites.items()),
    }
    yield from (name for name, fits in checks.items() if not fits)
    if all(checks.values()):
        yield from _of_largest(found, found.largest) if found.largest else ()
        yield from _of_counterfactual(found, found.counterfactual) if found.counterfactual else ()


def of_graph(found: Graph) -> Iterator[str]:
    if not found.relevances or any(one.counterfactual is None for one in found.relevances):
        yield "relevances"
        return
    for one in found.relevances:
        yield from (f"relevances: {name}" for name in of_relevance(one))
    rows, tokens, model = len(found.nodes) + 1, len(found.relevances[0].tokens), found.model
    shape = (rows, tokens + len(found.nodes) + model.layers * tokens)
    matrices = {name: getattr(found, name) for name in ("effect", "patterns", "contribution")}
    yield from (name for name, x in matrices.items() if x.shape != shape or not x.isfinite().all())
    if found.difference.shape != (rows,):
        yield "difference"
    inside = all(0 <= node.position < tokens and node.neuron.layer < model.layers for node in found.nodes)
    if not inside or not {node for group in found.other_groups or () for node in group.nodes} <= {*found.nodes}:
        yield "nodes or other_groups"
    if not 0 < found.kept <= 1:
        yield "kept"
    if not _made(found.made_with):
        yield "made_with"


def _of_largest(found: Relevance, largest: Largest) -> Iterator[str]:
    count, names = len(found.tokens), set(found.sites)
    ranked = [one for rows in largest.ranked.values() for one in rows]
    layers = {name: (found.sites[name][0].shape[0], count) for name in names}
    whole = largest.heads is None if "attn" not in names else _fits(largest.heads, 3, count)
    if largest.k < 1 or set(largest.ranked) != names or not whole:
        yield "largest"
    elif {name: tuple(sums.shape) for name, sums in largest.layers.items()} != layers:
        yield "largest: layers"
    elif not all(0 <= one.position < count and one.neuron.site in names for one in ranked):
        yield "largest: ranked"


def _of_counterfactual(found: Relevance, counterfactual: Counterfactual) -> Iterator[str]:
    shapes = [(len(found.tokens), len(tokens)) for tokens in counterfactual.prompts]
    if (
        not shapes
        or len(counterfactual.numbers) != len(shapes)
        or (counterfactual.pairs and len(counterfactual.pairs) != len(shapes))
    ):
        yield "counterfactual: prompts, pairs or numbers"
    if [tuple(share.shape) for share in counterfactual.shares] != shapes:
        yield "counterfactual: shares"
    if not all(map(isfinite, (*counterfactual.numbers, counterfactual.overlap or 0.0))):
        yield "counterfactual: numbers or overlap"
    activation = {name: x.shape for name, (_, x) in found.sites.items()}
    if {name: x.shape for name, x in counterfactual.activation.items()} != activation:
        yield "counterfactual: activation"
    if counterfactual.at not in ("both", "prompt", "midpoint", "path", "model") or (
        counterfactual.at == "model"
    ) is not bool(counterfactual.model):
        yield "counterfactual: at"


def _scores(found: Relevance) -> Iterator[TokenScore]:
    yield from (one for one in (found.target, found.contrast, *found.predictions) if one)


def _site(found: Relevance, name: str, relevance: Tensor, activation: Tensor) -> bool:
    whole = name != "attn" or (relevance.dim() == 3 and relevance.shape[2] % max(found.head_count, 1) == 0)
    same = relevance.shape == activation.shape and bool(relevance.isfinite().all() and activation.isfinite().all())
    return name in SITES and whole and same and _fits(relevance, 3, len(found.recorded))


def _fits(x: Tensor | None, dim: int, count: int) -> bool:
    """Whether it has so many dimensions, of which the second is so long."""
    return x is not None and x.dim() == dim and x.shape[1] == count


def _ends(turn: object) -> tuple[int, ...]:
    return tuple(getattr(turn, name) for name in ("start", "first", "last", "stop"))


def _made(told: dict) -> bool:
    """Whether it says by which model it was made."""
    model = told.get("model")
    return isinstance(model, dict) and all(isinstance(model.get(name), str) for name in ("name", "fingerprint"))

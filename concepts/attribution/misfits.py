"""What of a saved result does not fit the rest of it: a file may have been changed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from torch import Tensor

from icebear.records import SITES, TokenScore

if TYPE_CHECKING:
    from icebear.concepts.attribution.ranking import NeuronScores
    from icebear.concepts.attribution.result import Counterfactual, Relevance
    from icebear.concepts.circuits.graph import Graph
    from icebear.concepts.passes.largest import Largest


def of_relevance(relevance: Relevance) -> Iterator[str]:
    """The names of the parts that do not fit the others."""
    count = len(relevance.tokens) if relevance.tokens.dim() == 1 else 0
    prompt, neurons = relevance.prompt, relevance.neurons
    places = (*prompt.target_positions, *neurons.recorded, *prompt.sinks)
    ends = (prompt.encoder_length, prompt.answer_start or 0, *(end for turn in prompt.turns for end in _ends(turn)))
    checks = {
        "tokens": count > 0 and bool(relevance.tokens.isfinite().all()),
        "ids or strings": len(prompt.ids) == len(prompt.strings) == count,
        "target_positions": len(prompt.target_positions) > 0,
        "target_positions, recorded or sinks": all(0 <= place < count for place in places),
        "recorded": list(neurons.recorded) == sorted(set(neurons.recorded)),
        "encoder_length, answer_start or turns": all(0 <= end <= count for end in ends),
        "turns": all(list(_ends(turn)) == sorted(_ends(turn)) for turn in prompt.turns),
        "head_count": neurons.head_count > 0,
        "sums": all(map(isfinite, relevance.sums.to_dict().values())),
        "target, contrast or predictions": all(isfinite(one.logit) for one in _scores(relevance)),
        "predictions": len(relevance.predictions) > 0,
        "made_with": _made(relevance.made_with),
        "positions": relevance.positions is None or _fits(relevance.positions, 2, count),
        "neurons": _neurons(neurons),
    }
    yield from (name for name, fits in checks.items() if not fits)
    if all(checks.values()):
        yield from _of_largest(neurons, neurons.largest, count) if neurons.largest else ()
        yield from _of_counterfactual(relevance, relevance.counterfactual) if relevance.counterfactual else ()


def of_graph(graph: Graph) -> Iterator[str]:
    if not graph.relevances or any(one.counterfactual is None for one in graph.relevances):
        yield "relevances"
        return
    for one in graph.relevances:
        yield from (f"relevances: {name}" for name in of_relevance(one))
    rows, tokens, model = len(graph.nodes) + 1, len(graph.relevances[0].tokens), graph.model
    shape = (rows, tokens + len(graph.nodes) + model.layers * tokens)
    matrices = {name: getattr(graph, name) for name in ("effect", "patterns", "contribution")}
    yield from (name for name, x in matrices.items() if x.shape != shape or not x.isfinite().all())
    if graph.difference.shape != (rows,):
        yield "difference"
    inside = all(0 <= node.position < tokens and node.neuron.layer < model.layers for node in graph.nodes)
    if not inside or not {node for group in graph.other_groups or () for node in group.nodes} <= {*graph.nodes}:
        yield "nodes or other_groups"
    if not 0 < graph.kept <= 1:
        yield "kept"
    if not _made(graph.made_with):
        yield "made_with"


def _of_largest(neurons: NeuronScores, largest: Largest, count: int) -> Iterator[str]:
    ranked = [one for rows in largest.ranked.values() for one in rows]
    layers = {name: (len(x), count) for name, x in neurons.relevance.items()}
    whole = largest.heads is None if "attn" not in layers else _fits(largest.heads, 3, count)
    if largest.k < 1 or set(largest.ranked) != set(layers) or not whole:
        yield "largest"
    elif {name: tuple(sums.shape) for name, sums in largest.layers.items()} != layers:
        yield "largest: layers"
    elif not all(0 <= one.position < count and one.neuron.site in layers for one in ranked):
        yield "largest: ranked"


def _of_counterfactual(relevance: Relevance, counterfactual: Counterfactual) -> Iterator[str]:
    shapes = [(len(relevance.tokens), len(tokens)) for tokens in counterfactual.prompts]
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
    if _shapes(relevance.neurons.counterfactual) != _shapes(relevance.neurons.activation):
        yield "counterfactual: activation"
    if counterfactual.at not in ("both", "prompt", "midpoint", "path", "model") or (
        counterfactual.at == "model"
    ) is not bool(counterfactual.model):
        yield "counterfactual: at"


def _scores(relevance: Relevance) -> Iterator[TokenScore]:
    yield from (one for one in (relevance.target, relevance.contrast, *relevance.predictions) if one)


def _neurons(neurons: NeuronScores) -> bool:
    """Whether sites have values of one shape at the positions recorded, all finite."""
    values = [*neurons.relevance.values(), *neurons.activation.values(), *neurons.counterfactual.values()]
    heads = neurons.relevance.get("attn")
    return (
        _shapes(neurons.relevance) == _shapes(neurons.activation)
        and set(neurons.relevance) <= set(SITES)
        and all(x.isfinite().all() and _fits(x, 3, len(neurons.recorded)) for x in values)
        and (heads is None or heads.shape[2] % max(neurons.head_count, 1) == 0)
    )


def _shapes(values: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in values.items()}


def _fits(x: Tensor | None, dim: int, count: int) -> bool:
    """Whether it has so many dimensions, of which the second is so long."""
    return x is not None and x.dim() == dim and x.shape[1] == count


def _ends(turn: object) -> tuple[int, ...]:
    return tuple(getattr(turn, name) for name in ("start", "first", "last", "stop"))


def _made(made_with: dict) -> bool:
    """Whether it says by which model it was made."""
    model = made_with.get("model")
    return isinstance(model, dict) and all(isinstance(model.get(name), str) for name in ("name", "fingerprint"))

"""A relevance as JSON and as tables."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from icebear.concepts.attribution.ranking import Selection
from icebear.errors import InputError
from icebear.records import Ranked
from icebear.values import whole

if TYPE_CHECKING:
    import pandas

    from icebear.concepts.attribution.result import Relevance

RANKING = frozenset(field.name for field in fields(Selection))
"""The arguments of `Relevance.top` that `Relevance.to_frame` takes."""


def to_dict(relevance: Relevance, k: int) -> dict[str, Any]:
    """JSON-ready: tokens, target, conservation, sinks, and the top k neurons of each site."""
    k, prompt, rather = whole(k, "The number of neurons", 0), relevance.prompt, relevance.rather
    tokens = zip(prompt.ids, prompt.strings, relevance.tokens.tolist(), strict=True)
    return {
        **relevance.made_with,
        "method": repr(relevance.method),
        "target": vars(relevance.target) if relevance.target else None,
        "target_text": relevance.target_text,
        "contrast": vars(relevance.contrast) if relevance.contrast else None,
        "rather": {"text": rather.text, "tokens": _texts(rather.strings, rather.tokens.tolist())} if rather else None,
        "predictions": [vars(token) for token in relevance.predictions],
        "tokens": [{"id": id, "text": text, "relevance": value} for id, text, value in tokens],
        "predicted_at": relevance.predicted_at,
        "explained_at": list(prompt.target_positions),
        "read": prompt.encoder_length,
        "positions": None if relevance.positions is None else relevance.positions.tolist(),
        "patches": relevance.image.patches.tolist() if relevance.image else None,
        "sinks": list(prompt.sinks),
        "turns": [vars(turn) for turn in prompt.turns],
        "template": list(prompt.template),
        "answer_from": prompt.answer_start,
        "conservation": relevance.conservation().to_dict(),
        "counterfactual": _counterfactual(relevance),
        "missing_rules": list(relevance.missing_rules),
        "top": {site: [ranked_dict(row) for row in relevance.top(k, site)] for site in relevance.sites} if k else {},
    }


def _texts(strings: tuple[str, ...], values: list[float]) -> list[dict[str, Any]]:
    return [{"text": text, "relevance": value} for text, value in zip(strings, values, strict=True)]


def _counterfactual(relevance: Relevance) -> dict[str, Any] | None:
    other = relevance.counterfactual
    if other is None:
        return None
    return {
        "prompts": [list(tokens) for tokens in other.prompts],
        "contrasts": list(other.contrasts),
        "own_answers": other.own,
        "at": other.at,
        "numbers": list(other.numbers),
        "model": other.model or None,
        "linear_share": relevance.linear_share,
        "overlap": other.overlap,
        "note": other.note,
    }


def ranked_dict(ranked: Ranked) -> dict[str, Any]:
    """JSON-ready; a head has no activation of its own."""
    return {
        "neuron": str(ranked.neuron),
        "position": ranked.position,
        "polarity": ranked.polarity or None,
        "activation": ranked.activation,
        "relevance": ranked.relevance,
        **({} if ranked.counterfactual is None else {"counterfactual": ranked.counterfactual}),
    }


def neurons_frame(relevance: Relevance, k: int, ranking: dict[str, Any]) -> pandas.DataFrame:
    """The top k neurons, one a row, with prompt, target and contrast the same in each row."""
    import pandas

    unknown = sorted(set(ranking) - RANKING)
    if unknown:
        raise InputError(f"{unknown[0]!r} is no argument of top; use {', '.join(sorted(RANKING))}.")
    compared = bool(relevance.counterfactual)
    rows = [
        {
            "prompt": relevance.prompt.text,
            "target": relevance.target_text,
            "contrast": relevance.contrast_text or None,
            "neuron": str(row.neuron),
            "layer": row.neuron.layer,
            "site": row.neuron.site,
            "index": row.neuron.index,
            "position": row.position,
            "token": relevance.prompt.strings[row.position],
            "polarity": row.polarity or None,
            "activation": row.activation,
            **({"counterfactual": row.counterfactual} if compared else {}),
            "relevance": row.relevance,
        }
        for row in relevance.top(k, **ranking)
    ]
    numbers = ("activation", *(("counterfactual",) if compared else ()), "relevance")
    return pandas.DataFrame(rows).astype(dict.fromkeys(numbers, float) if rows else {})

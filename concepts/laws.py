"""Laws that hold for every model, measured on one prompt: what `selftest` reports in addition to its pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.lrp import CP_LRP
from icebear.concepts.passes.sites import hooks
from icebear.concepts.results.result import Relevance
from icebear.errors import MissingRule
from icebear.models.batch import Batch
from icebear.models.model import Model
from icebear.models.text.prompts import PromptLike
from icebear.records import WRITERS
from icebear.values import several

TRIED = 2048
"""Tokens: a longer context is not run."""


@dataclass(frozen=True)
class Law:
    name: str
    finding: str
    """What was found, in a few words."""
    holds: bool | None
    """None if it was not tried, or is refused by name."""


Found = dict[str, float | str]
"""By law: the deviation, as a share of the largest value, or why it was not tried."""


def laws_of(model: Model, prompt: PromptLike, position: int | None, tolerance: float) -> list[Law]:
    """Measure each law.

    ``context``: as many tokens as `context_length` says run. ``batch``: each row has the relevance that it has alone.
    ``activations``: recorded activations equal a plain pass with a plain hook. ``counterfactual``: relevance
    sums to the difference of two prompts. ``compared activations``: the same beside a counterfactual.

    tolerance: the largest deviation at which a law holds.
    """
    options: dict[str, Any] = {"position": position, "strict": not model.has_scan}  # which have no rule alone
    measures: dict[str, Callable[[], Found]] = {"activations": partial(_recorded, model, prompt, options)}
    if model.task.reads_text:
        encoded = model.encode([prompt])
        ids = encoded.ids[0, : encoded.lengths[0]].tolist()
        measures = {
            "context": partial(_longest, model, ids),
            "batch": partial(_together, model, ids, options),
            "activations": partial(_recorded, model, ids, options),
            "counterfactual": partial(_compared, model, ids, options),
        }
    return [law for name, measure in measures.items() for law in _laws(name, measure, tolerance)]


def _laws(name: str, measure: Callable[[], Found], tolerance: float) -> list[Law]:
    try:
        deviations = measure()
    except MissingRule as error:
        return [Law(name, f"refused: {str(error).split('; ')[0].split('. The method')[0]}", None)]
    except Exception as error:  # whatever another's model may raise
        return [Law(name, f"fails ({type(error).__name__})", False)]
    return [
        Law(law, value, None) if isinstance(value, str) else Law(law, f"differs by {value:.0e}", value <= tolerance)
        for law, value in deviations.items()
    ]


def _longest(model: Model, ids: Sequence[int]) -> Found:
    longest = model.context_length
    if longest > TRIED:
        return {"context": f"{longest} tokens, not tried" if longest < 1 << 30 else "no limit"}
    row = [*(list(ids) * longest)[: longest - len(ids)], *ids] if len(ids) < longest else list(ids)[:longest]
    with torch.no_grad(), model.lock:
        stream = model.final_stream(model.read([row]))
    return {"context": 0.0 if torch.isfinite(stream).all() else float("nan")}


def _together(model: Model, ids: Sequence[int], options: dict[str, Any]) -> Found:
    half = [token for position, token in enumerate(ids) if position >= len(ids) // 2 or token in _special(model)]
    rows: list[PromptLike] = [list(ids), half]
    options = {**options, "method": CP_LRP, "sites": (), "number": "logit"}
    alone = [attribute(model, row, **options) for row in rows]
    together = attribute(model, rows, [row.target.id if row.target else None for row in alone], **options)
    return {"batch": max(_off(batched.tokens, other.tokens) for batched, other in zip(together, alone, strict=True))}


def _recorded(model: Model, prompt: PromptLike, options: dict[str, Any]) -> Found:
    result = attribute(model, prompt, method=CP_LRP, sites=model.sites if model.has_family else (), **options)
    return {"activations": _off_plain(model, result)}


def _compared(model: Model, ids: Sequence[int], options: dict[str, Any]) -> Found:
    position = next(position for position in range(len(ids) // 2, -1, -1) if ids[position] not in _special(model))
    other = [*ids[:position], (ids[position] + 7) % model.config.vocab_size, *ids[position + 1 :]]
    best = [token.id for token in model.predict(ids, 2, position=options["position"])]
    sites = model.sites if model.has_family else ()
    result = attribute(model, ids, *best, counterfactual=other, sites=sites, position=options["position"])
    sums = result.conservation()
    largest = max(abs(sums.target), result.tokens.abs().max().item(), 1e-12)
    return {"counterfactual": abs(sums.remainder) / largest, "compared activations": _off_plain(model, result)}


def _special(model: Model) -> set[int | None]:
    ends = several(getattr(model.config, "eos_token_id", None))
    return {*model.special_ids(), *ends, getattr(model.tokenizer, "mask_token_id", None)}


def _off_plain(model: Model, result: Relevance) -> float:
    """Return the largest deviation of recorded activations from those of a plain pass."""
    batch = result.explained().batch
    plain = plain_activations(model, batch)
    return max((_off(_of_layer(model, batch, result, *site_layer), x) for site_layer, x in plain.items()), default=0.0)


def _of_layer(model: Model, batch: Batch, result: Relevance, site: str, layer: int) -> Tensor:
    return result.activation(site)[layer, batch.span_of(model.stack_of(layer))]


def plain_activations(model: Model, batch: Batch) -> dict[tuple[str, int], Tensor]:
    """Return the activations (T, N) of each site and layer in a pass without rules, of one prompt. Those of linear maps
    are read by hooks of torch; only a mixture of experts, whose neurons no map has as its input, needs ours."""
    seen: dict[tuple[str, int], Tensor] = {}
    with model.lock, torch.no_grad(), ExitStack() as undo:
        for site in model.sites if model.has_family else ():
            for layer in model.layers_with(site):
                if site in ("ffn", "router") and model.family.experts:
                    see = lambda site, layer, x: seen.update({(site, layer): x[0]})  # noqa: E731
                    undo.enter_context(hooks(model, [(site, layer)], see))
                elif site in WRITERS:
                    keep = partial(_keep_input, seen, (site, layer))
                    undo.callback(model.site_module(site, layer).register_forward_pre_hook(keep).remove)
                else:
                    keep_output = partial(_keep_output, seen, (site, layer), model.columns(site))
                    undo.callback(model.site_module(site, layer).register_forward_hook(keep_output).remove)
        model.logits(batch, [0])
    return seen


def _keep_input(seen: dict[Any, Tensor], key: Any, module: Any, args: tuple) -> None:
    seen[key] = args[0].flatten(0, -2)


def _keep_output(
    seen: dict[Any, Tensor], key: Any, columns: Tensor | None, module: Any, args: Any, output: Tensor
) -> None:
    seen[key] = (output if columns is None else output[..., columns]).flatten(0, -2)


def _off(left: Tensor, right: Tensor) -> float:
    """Return the largest deviation, as a share of the largest right value."""
    left, right = left.float().cpu(), right.float().cpu()
    return ((left - right).abs().max() / right.abs().max().clamp(min=1e-12)).item()

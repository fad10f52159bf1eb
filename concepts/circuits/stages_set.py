"""Circuits of the answer's stages: their heads and neurons, and the whole parts that are recomputed beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from icebear.concepts.circuits.edges import RecomputedTokens
from icebear.concepts.circuits.nodes import pair_of
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.patched_pair import PatchedPair
from icebear.concepts.stages.stage_measurements import StageMeasurement
from icebear.concepts.stages.stage_parts import WholeKinds
from icebear.concepts.stages.stage_records import WholePart
from icebear.concepts.stages.stages import stage_sites, why_no_stages
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.records import Ranked


def stages_set(model: Model, relevance: Relevance) -> tuple[list[Ranked], tuple[WholePart, ...]] | None:
    """Return the heads and neurons of the answer's stages, with the whole parts that they need; None where no set
    gives the difference, or where circuits lack sites that stages have."""
    measured = _stage_measurement(model, relevance)
    result = measured.search(relevance) if measured else None
    if measured is None or result is None or not result.reached:
        return None
    return [*result.heads, *result.neurons], measured.named(result.whole_kinds)


def named_parts(model: Model, relevance: Relevance, names: WholeKinds) -> tuple[WholePart, ...]:
    """Return whole parts of the tokens of a pair of prompts. Raises `InputError` where there are none."""
    measured = _stage_measurement(model, relevance) if names else None
    if names and measured is None:
        raise InputError("The prompts of an edge beside whole parts have stages; change the claim.")
    return measured.named(names) if measured else ()


def _stage_measurement(model: Model, relevance: Relevance) -> StageMeasurement | None:
    """Return the measurements of stages; None where stages hold other sites than circuits, or no parts of tokens."""
    sites = {"ffn", "attn"}
    is_dense = set(stage_sites(model)) == sites and "router" not in model.sites  # stages hold routers, circuits do not
    if not is_dense or model.task.stacks == 2 or why_no_stages(model, relevance):
        return None
    measured = StageMeasurement(model, [PatchedPair(model, pair_of(relevance))])
    return measured if measured.kind == "alone" else None


def whole_tokens(parts: Sequence[WholePart], count: int) -> RecomputedTokens:
    """Return the tokens of whole parts as masks (T,), by site."""
    masks: dict[str, Tensor] = {}
    for part in parts:
        masks.setdefault(part.kind, torch.zeros(count, dtype=torch.bool))[list(part.positions)] = True
    return masks


def whole_mask(parts: Sequence[WholePart], shape: Sequence[int], width: int) -> Tensor:
    """Return the nodes of whole parts as a mask (L, T, W). width: the number of neurons, which heads follow."""
    mask = torch.zeros(*shape, dtype=torch.bool)
    for part in parts:
        mask[:, list(part.positions), slice(width) if part.kind == "ffn" else slice(width, None)] = True
    return mask

"""`behaviour`: the neurons with the largest mean relevance over many prompts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from icebear.concepts.answers.restoring import ExplainedChanges
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.attnlrp import AttnLRP, Difference
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Token
from icebear.paths import read_text
from icebear.records import Neuron
from icebear.steps import OnProgress, unwatched
from icebear.values import one_of

ROWS_PER_BATCH = 8
"""The number of prompts in a padded batch."""
RESAMPLES = 2000
"""The number of bootstrap resamples."""


@dataclass(frozen=True)
class Case:
    """A prompt and its target, see `icebear.attribute`."""

    prompt: Any
    target: Token | None = None
    contrast: Token | None = None
    counterfactual: Any = None


@dataclass(frozen=True)
class BehaviourNeuron:
    """A neuron or head of a behaviour: means over the prompts, where the prediction is made."""

    neuron: Neuron
    relevance: float
    low: float
    """`low` to `high` is the 95 % bootstrap interval of the mean over prompts. It does not correct for the selection of
    neurons with a large mean."""
    high: float
    activation: float
    """NaN for heads."""
    among_top: int
    """The number of prompts whose top k has the neuron."""

    @property
    def polarity(self) -> Literal["+", "-"]:
        return "-" if self.activation < 0 else "+"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; heads have no activation."""
        row = {**vars(self), "neuron": str(self.neuron), "polarity": self.polarity}
        return {**row, "activation": None, "polarity": None} if self.neuron.site == "head" else row


def behaviour(
    model: Model,
    prompts: Sequence[Any],
    k: int = 20,
    site: str | None = None,
    polarity: Literal["+", "-"] | None = None,
    *,
    method: AttnLRP | Difference | None = None,
    checkpoint: bool | None = None,
    seed: int = 0,
    on_progress: OnProgress = unwatched,
) -> list[BehaviourNeuron]:
    """Rank neurons by their mean relevance over prompts, if it is positive. With one prompt this is `Relevance.top`.

    prompts: texts, token ids or `Case`s. Pairs are explained one by one, others in batches of
        `ROWS_PER_BATCH` of similar length; the order does not matter. Memory is four bytes for each prompt and neuron.
    site: one site, ``head`` for attention heads, or None for ``ffn`` and ``attn``.
    polarity: only neurons whose mean activation has this sign.
    seed: the seed of the bootstrap.
    """
    cases = [part if isinstance(part, Case) else Case(part) for part in prompts]
    cases.sort(key=lambda case: (len(repr(case.prompt)), repr(case)))  # of about the same length: little is padded
    if not cases:
        raise InputError("There is no prompt; give at least one.")
    names = [site] if site else ["ffn", "attn"]
    sites = ["attn" if name == "head" else name for name in names]
    how: dict[str, Any] = {"method": method, "sites": sites, "checkpoint": checkpoint, "record": "last"}
    rows, among_top, activations = [], Counter[Neuron](), torch.zeros(())
    for relevance in _explained(model, cases, how):
        among_top.update(row.neuron for row in relevance.top(k, site, polarity))
        parts = [_at_the_answer(relevance, name) for name in names]
        rows.append(torch.cat([relevance.flatten() for relevance, _ in parts]).float())
        activations = activations + torch.cat([activation.flatten() for _, activation in parts]).double()
        widths = [relevance.shape[1] for relevance, _ in parts]
        on_progress(len(rows), len(cases))
    values, activations = torch.stack(rows), activations / len(cases)  # (P, N), (N,)
    means = values.mean(0, dtype=torch.float64)
    scores = means.clone()
    if polarity:
        scores[activations >= 0 if polarity == "-" else activations < 0] = -torch.inf
    chosen = scores.argsort(descending=True, stable=True)[:k]  # ties go to the first
    chosen = chosen[scores[chosen] > 0]
    neurons = [_neuron(number, names, widths, model.layers) for number in chosen.tolist()]
    low, high = bootstrap_interval(values[:, chosen].double(), seed)
    numbers = (means[chosen].tolist(), low.tolist(), high.tolist(), activations[chosen].tolist())
    counts = [among_top[neuron] for neuron in neurons]
    return [BehaviourNeuron(*row) for row in zip(neurons, *numbers, counts, strict=True)]


def behaviour_changes(model: Model, base_model: Model, cases: Sequence[Case], k: int = 10) -> ExplainedChanges:
    """Explain which changed weights matter for a behaviour: the mean over prompts of what they caused.

    k: the number of changes that are listed.
    """
    options: dict[str, Any] = {"base_model": base_model, "sites": ()}
    diffs: Iterator[Any] = _explained(model, cases, options, max(1, len(cases)))  # the weights are compared once
    return ExplainedChanges.of(*diffs, k=k)


def read_cases(path: str | Path, has_counterfactuals: bool = False, **defaults: Any) -> list[Case]:
    """Read a file of JSON lines: objects with prompt and, optionally, target, contrast and counterfactual.

    has_counterfactuals: whether each must have a counterfactual. defaults: values for missing fields. Raises
        `InputError`.
    """
    cases: list[Case] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_with_single_keys)
        except (ValueError, RecursionError):
            row = None
        cases.append(case_of(row, f"line {number} of {path}", has_counterfactuals, **defaults))
    if not cases:
        raise InputError(f"{path} has no prompt; give a JSON object with a prompt on each line.")
    return cases


def case_of(row: Any, where: str, has_counterfactual: bool = False, **defaults: Any) -> Case:
    """Return the case of a mapping; an empty text is a missing field. where: its name in messages. Raises
    `InputError`."""
    fields = row.items() if isinstance(row, Mapping) else ()
    values = defaults | {name: value for name, value in fields if not isinstance(value, str | None) or value}
    wanted = ["prompt", *(["counterfactual"] if has_counterfactual else [])]
    if any(values.get(name) is None for name in wanted):
        what = " and a ".join(wanted)
        raise InputError(f"{where[0].upper()}{where[1:]} is not a JSON object with a {what}; correct it.")
    names = ("prompt", "target", "contrast", "counterfactual")
    for name, _ in fields:
        one_of(name, f"key in {where}", names)
    return Case(*(values.get(name) for name in names))


def _with_single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError` for a key that it has twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands twice")
    return row


def _explained(
    model: Model, cases: Sequence[Case], how: dict[str, Any], size: int = ROWS_PER_BATCH
) -> Iterator[Relevance]:
    alone = [case for case in cases if case.counterfactual is None]
    for start in range(0, len(alone), size):
        part = alone[start : start + size]
        answers: Any = ([case.target for case in part], [case.contrast for case in part])  # None where open
        yield from attribute(model, [case.prompt for case in part], *answers, **how)
    for case in cases:
        if case.counterfactual is not None:
            yield attribute(model, case.prompt, case.target, case.contrast, counterfactual=case.counterfactual, **how)


def _at_the_answer(result: Relevance, site: str) -> tuple[Tensor, Tensor]:
    """Return (L, N) relevance summed over the target positions, and the mean activation at them."""
    if site == "head":
        relevance = result.heads().sum(1)
        return relevance, torch.full_like(relevance, torch.nan)
    return result.of(site).sum(1), result.activation(site).mean(1)


def _neuron(number: int, names: Sequence[str], widths: Sequence[int], layers: int) -> Neuron:
    """Return a neuron by its number among all neurons, which are ordered by site, layer and index."""
    for site, width in zip(names, widths, strict=True):
        if number < layers * width:
            return Neuron(number // width, site, number % width)
        number -= layers * width
    raise IndexError(number)


def bootstrap_interval(values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return the bounds (K,) of the 95 % bootstrap interval of the mean of values (P, K)."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    counts = torch.stack([draw.bincount(minlength=len(values)) for draw in draws]).to(values.dtype)  # (R, P)
    means, bounds = counts @ values / len(values), torch.tensor([0.025, 0.975], dtype=values.dtype)
    low, high = means.quantile(bounds, dim=0)
    return low, high

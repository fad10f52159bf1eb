"""`selftest` checks on one prompt whether relevance works for a model."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.laws import Law, laws_of
from icebear.concepts.methods.lrp import ATTNLRP, CP_LRP
from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import Conservation, Logits, forward_backward
from icebear.concepts.vocabulary.calibration import token_rows
from icebear.lrp.context import relevance_rules
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.models.text.prompts import PromptLike

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Of the rest that conservation leaves, as a share of the target; coarser types get 0.1."""


@dataclass(frozen=True)
class SelfTest:
    """The results of a self-test; `troubles` has a sentence for each problem."""

    parity: float
    """The largest change of a logit under the rules, as a share of the largest logit."""
    conserved: Conservation
    """Under CP-LRP, whose rules conserve everything except the relevance of positions and biases."""
    missing: tuple[str, ...]
    """Operations without a rule."""
    sites: dict[str, int]
    """Site -> neurons per layer; empty for an unknown family."""
    sinks: tuple[int, ...]
    cost: float
    """The time of a relevance pass as a multiple of gradient x input, the median of three."""
    laws: tuple[Law, ...]
    troubles: tuple[str, ...]

    @property
    def verdict(self) -> str:
        return "fine" if not self.troubles else " ".join(self.troubles)


def selftest(model: Model, prompt: PromptLike = "The ice bear lives in the") -> SelfTest:
    """Measure parity, conservation, missing operations, sites, sinks and cost on one prompt, in some seconds."""
    if isinstance(prompt, str):
        prompt = model.task.as_prompt(model, prompt) if model.reads_any_text else token_rows(model)[0]
    position = -1 if model.task.unembeds else None
    objective = objective_of(model, [prompt], position=position)
    with model.lock, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing operations are reported below
        plain = model.logits(objective.batch, objective.all_positions)
        with relevance_rules(model.net, ATTNLRP, strict=False):
            ruled = model.logits(objective.batch, objective.all_positions)
        parity = ((ruled - plain).abs().max() / plain.abs().max()).item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        relevance = attribute(model, prompt, method=CP_LRP, sites=(), number="logit", position=position, strict=False)
        ours = partial(attribute, model, prompt, position=position, sites=(), strict=False)
        bare = lambda: forward_backward(model, Logits(objective), [Inputs()])  # noqa: E731
        cost = statistics.median(seconds(ours, model.device) / seconds(bare, model.device) for _ in range(3))
    sites = {site: model.width(site) for site in model.sites} if model.has_family else {}
    conserved = relevance.conservation()
    with warnings.catch_warnings(action="ignore"):
        laws = tuple(laws_of(model, prompt, position, TOLERANCE.get(model.dtype, 0.1)))
    troubles = _troubles(model, parity, conserved, relevance.missing_rules)
    troubles += tuple(f"The law of {law.name} does not hold ({law.finding})." for law in laws if law.holds is False)
    return SelfTest(parity, conserved, relevance.missing_rules, sites, relevance.prompt.sinks, cost, laws, troubles)


def _troubles(model: Model, parity: float, conserved: Conservation, missing: tuple[str, ...]) -> tuple[str, ...]:
    tolerance = TOLERANCE.get(model.dtype, 0.1)
    troubles = []
    if parity > tolerance:
        troubles.append(f"The logits change by {parity:.1e} under the rules; please report this model.")
    if missing:
        troubles.append(f"No rule for {', '.join(missing)}: add it to lrp/operations.py.")
    elif abs(conserved.remainder) > tolerance * max(abs(conserved.target), abs(conserved.tokens)):
        troubles.append(f"Relevance is not conserved (remainder {conserved.remainder:.1e}); try --dtype float32.")
    if not model.has_family:
        troubles.append("Only tokens have relevance: docs/new-family.md shows how to add the places of the neurons.")
    return tuple(troubles)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the time in seconds until the device has finished the work."""
    wait: Callable[[], object] = (
        (lambda: None) if device.type == "cpu" else partial(torch.accelerator.synchronize, device)
    )
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start

"""Whether rules at modules were proved to give the relevance that a lookup of every operation gives.

1. The first pass of a kind looks every operation up, so that one without a rule is an error.
2. Before the second one, the same prompts are explained in both ways. A half is exact in floating point, so the
   relevance of the tokens must be equal to the last bit; the conservation accounting up to rounding. Both graphs must
   have the same rules, and the one with lookups no other products, also where their effect is small. Passes of this
   kind then take the rules at modules.
3. A kind is a method, an implementation of attention, whether there are several prompts, whether they are padded, and
   the number of tokens up to a factor of two. While something is in the model, a hook or another module, operations
   are looked up.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Hashable

import torch
from torch import Tensor

from icebear.concepts.passes.inputs import Inputs
from icebear.concepts.passes.run import LONG, Target, forward_backward, new_accounting
from icebear.lrp import rules
from icebear.lrp.context import applied
from icebear.lrp.linear_rules import Epsilon, Rules
from icebear.lrp.module_hooks import FACTORS, ModuleHooks
from icebear.models.batch import Batch
from icebear.models.model import Model

ROUNDING_ERRORS = 100
"""How far the accounting may differ, in rounding errors of the sum of all relevance."""


def rules_at_modules(
    model: Model, target: Target, method: Rules | None, checkpoint: bool | None = None
) -> ModuleHooks | None:
    """Return the rules at modules if passes of this kind are proved; None if operations must be looked up."""
    batch = target.batch
    if batch is None or checkpoint or method is None or (kind := _kind(model, batch, method)) is None:
        return None
    with model.lock:
        if kind not in model.proofs:
            model.proofs[kind] = None  # a proof costs two passes: not for a single one
            return None
        if model.proofs[kind] is None:
            model.proofs[kind] = _proof(model, batch, method)
        proof = model.proofs[kind]
        return proof if isinstance(proof, ModuleHooks) and proof.fits(model.net) else None


def _kind(model: Model, batch: Batch, method: Rules) -> Hashable | None:
    rows, tokens = batch.ids.shape
    linear_rules = {method.linear, method.attention_in or Epsilon(), method.attention_out or Epsilon()}
    plain_rules = linear_rules == {Epsilon()} and method.softmax in FACTORS and not method.paired
    has_image = batch.pixels is not None or batch.images is not None
    alone = batch.decoder is None and not has_image and batch.after is None and not batch.before
    if not plain_rules or not alone or tokens >= LONG or not model.task.is_causal:
        return None
    padded = min(batch.lengths) < tokens
    return method, model.net.config._attn_implementation, rows > 1, padded, tokens.bit_length(), model.dtype


def _proof(model: Model, batch: Batch, method: Rules) -> ModuleHooks | str | None:
    """Return the rules at modules, why they are not enough, or None while something else is in the model."""
    try:
        at_modules = ModuleHooks(model)
        if not at_modules.fits(model.net):
            return None
        looked_up, ruled = (_explained(model, batch, method, way) for way in (None, at_modules))
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:  # the code of the model has another form
        return _refused(model, str(error))
    relevance, sums, functions = looked_up
    halves = functions.pop("Scaled", 0) - len(at_modules.gated)
    attended = (3, 2) if method.softmax == "taylor" else (0,)  # at q, k and y, or at both products
    if functions != ruled[2] or halves not in [count * model.layers for count in attended]:
        return _refused(model, f"other rules: {functions}, {halves} products in attention, and {ruled[2]}")
    difference = (ruled[0] - relevance).abs().max() / relevance.abs().max()
    unaccounted = ((ruled[1] - sums).abs() / relevance.abs().sum((1, 2))).max()
    if difference == 0 and unaccounted <= ROUNDING_ERRORS * torch.finfo(model.dtype).eps:
        return at_modules
    return _refused(model, f"relevance differs by {difference:.1e}, its accounting by {unaccounted:.1e}")


def _refused(model: Model, reason: str) -> str:
    if os.environ.get("ICEBEAR_DEBUG"):
        print(f"icebear: every operation of {model.name} is looked up ({reason})", file=sys.stderr)
    return reason


def _explained(
    model: Model, batch: Batch, method: Rules, at_modules: ModuleHooks | None
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Return the relevance of the input (B, T, D), the sums that rules retained (3, B), and how often each rule was
    applied."""
    inputs, target, accounting = Inputs(), _Largest(batch), new_accounting(model, len(batch.ids))
    forward_backward(model, target, [inputs], method, accounting=accounting, at_modules=at_modules)
    functions = {kind.__name__: count for kind, count in target.applied.items() if kind is not rules.CaptureGradient}
    return inputs.relevance()[0], torch.stack(list(accounting.values())), functions


class _Largest(Target):
    """The largest logit after the last token of each prompt."""

    def __init__(self, batch: Batch) -> None:
        self.batch: Batch = batch
        self.applied: Counter[type] = Counter()

    def numbers(self, model: Model) -> Tensor:
        last = [length - 1 for length in self.batch.lengths]
        logits = model.logits(self.batch, sorted(set(last)))  # (B, P, V)
        self.applied = applied(logits)
        return logits[range(len(last)), [sorted(set(last)).index(at) for at in last]].amax(-1)

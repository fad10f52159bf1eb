"""`CheckedClaim`: a claim that was measured again, in the plain run or under a condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from icebear.claims.claim import Claim
from icebear.claims.conditions import Condition
from icebear.claims.kind import Measured
from icebear.errors import IcebearError, NumericalError
from icebear.models.model import Model

Verdict = Literal["passed", "broken", "control passes too", "cannot be measured here"]


@dataclass(frozen=True)
class Repeats:
    """How many of several paraphrases a claim holds in."""

    passed: int
    measured: int
    interval: tuple[float, float]
    """The exact 95 % interval of the share (Clopper and Pearson 1934)."""


@dataclass(frozen=True)
class CheckedClaim:
    """A claim that was measured again."""

    claim: Claim
    model: str
    fingerprint: str
    measured: Measured | None
    verdict: Verdict
    why: str
    """The reason of the verdict, in a sentence; empty if it passed, except in paraphrases."""
    repeats: Repeats | None = None
    """In paraphrases; `measured` is then of the paraphrase in which the value is nearest to breaking the claim."""

    @property
    def failed(self) -> bool:
        return self.verdict in ("broken", "control passes too")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        now, then = self.measured, self.claim
        return {
            "kind": then.what.kind,
            "claim": str(then.what),
            "then": then.value,
            "now": now and now.value,
            "threshold": then.threshold,
            "control_then": then.control,
            "control": now and now.control,
            "control_below": then.control_below,
            "verdict": self.verdict,
            "why": self.why,
            **(
                {"paraphrases": {**vars(self.repeats), "interval": list(self.repeats.interval)}} if self.repeats else {}
            ),
            "model": self.model,
            "fingerprint": self.fingerprint,
            "same_model": then.provenance and then.provenance.fingerprint == self.fingerprint,
        }


@dataclass(frozen=True)
class ConditionRun:
    """All claims under one condition, in their order in the plain run."""

    condition: Condition
    rows: tuple[CheckedClaim, ...]


def check_claim(model: Model, claim: Claim, seed: int | None = None) -> CheckedClaim:
    """Measure a claim again. seed: of random controls; by default, that of the claim."""
    names = model.name, model.fingerprint
    try:
        return checked_number(claim, *names, claim.what.measured(model, claim.seed if seed is None else seed))
    except NumericalError as error:
        return CheckedClaim(claim, *names, None, "broken", str(error))
    except IcebearError as error:
        return CheckedClaim(claim, *names, None, "cannot be measured here", str(error))


def checked_number(claim: Claim, model: str, fingerprint: str, measured: Measured) -> CheckedClaim:
    """Return a claim with what was measured of it, and the verdict."""
    return CheckedClaim(claim, model, fingerprint, measured, *_verdict(claim, measured))


def _verdict(claim: Claim, now: Measured) -> tuple[Verdict, str]:
    what = claim.what
    if now.broken_by:
        return "broken", now.broken_by
    if not now.value >= claim.threshold - claim.tolerance:
        return "broken", f"The {what.value_is} is {now.value:.3f}, below {claim.threshold:.3f}."
    if not now.control < claim.control_below:
        return "control passes too", f"The control ({what.control_is}) is {now.control:.3f}."
    return "passed", ""


def not_run(claim: Claim, why: str) -> CheckedClaim:
    """Return a claim that was not measured, with the reason."""
    return CheckedClaim(claim, "", "", None, "cannot be measured here", " ".join(why.split()))

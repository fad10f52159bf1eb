"""`check`: measure claims again, in the same model or in another one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from icebear.claims.claim import Claim
from icebear.claims.claims_files import read_claims
from icebear.claims.kind import Measured
from icebear.errors import IcebearError, InputError, NumericalError
from icebear.models.model import Model
from icebear.records import InNotebooks
from icebear.result_files import SavedResult
from icebear.steps import OnProgress, unwatched
from icebear.values import several, shown, typed

Verdict = Literal["passed", "broken", "control passes too", "cannot be measured here"]


@dataclass(frozen=True)
class CheckedClaim:
    """A claim that was measured again."""

    claim: Claim
    model: str
    fingerprint: str
    measured: Measured | None
    verdict: Verdict
    why: str
    """The reason of the verdict, in a sentence; empty if it passed."""

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
            "model": self.model,
            "fingerprint": self.fingerprint,
            "same_model": then.provenance and then.provenance.fingerprint == self.fingerprint,
        }


@dataclass(frozen=True, repr=False)
class CheckedClaims(SavedResult, InNotebooks):
    """The claims of a file, measured again."""

    rows: tuple[CheckedClaim, ...]

    @property
    def passed(self) -> bool:
        """Whether at least one claim passed, and none failed. Claims that cannot be measured here do not count."""
        return any(row.verdict == "passed" for row in self.rows) and not any(row.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {"passed": self.passed, "claims": [row.to_dict() for row in self.rows]}


@typed
def check(
    model: Model,
    claims: str | Path | Iterable[Claim],
    on_progress: OnProgress = unwatched,
) -> CheckedClaims:
    """Measure claims again.

    Parameters
    ----------
    model : Model
        The model that the claims are checked in: the one that they were made with, or another version of it.
    claims : str, Path or iterable of Claim
        A file of claims (docs/claims.md), or claims.
    on_progress : callable
        Called with (done, total) claims.

    Returns
    -------
    CheckedClaims
        Its ``passed`` is true if at least one claim passed and none failed.

    Raises
    ------
    InputError
        If the file cannot be read, or there is no claim.
    """
    every = read_claims(claims) if isinstance(claims, str | Path) else tuple(several(claims))
    if not every:
        raise InputError("There is no claim to check; write claims with --claim (docs/claims.md).")
    for claim in every:
        if not isinstance(claim, Claim):
            raise InputError(f"{shown(claim)} is not a claim; give a file of claims, or the claims that it has.")
    rows = []
    for done, claim in enumerate(every):
        on_progress(done, len(every))
        rows.append(check_claim(model, claim))
    return CheckedClaims(tuple(rows))


def check_claim(model: Model, claim: Claim) -> CheckedClaim:
    """Measure one claim again."""
    measured = None
    try:
        measured = claim.what.measured(model, claim.seed)
        verdict, why = _verdict(claim, measured)
    except NumericalError as error:
        verdict, why = "broken", str(error)
    except IcebearError as error:
        verdict, why = "cannot be measured here", str(error)
    return CheckedClaim(claim, model.name, model.fingerprint, measured, verdict, why)


def _verdict(claim: Claim, now: Measured) -> tuple[Verdict, str]:
    what = claim.what
    if now.broken_by:
        return "broken", now.broken_by
    if not now.value >= claim.threshold - claim.tolerance:
        return "broken", f"The {what.value_is} is {now.value:.3f}, below {claim.threshold:.3f}."
    if not now.control < claim.control_below:
        return "control passes too", f"The control ({what.control_is}) is {now.control:.3f}."
    return "passed", ""

"""`check`: measure claims again, in the same model or in another one, and under conditions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from icebear.claims.checked import CheckedClaims
from icebear.claims.claim import Claim
from icebear.claims.claims_files import read_claims_file
from icebear.claims.conditions import Condition, conditions_of
from icebear.claims.under_conditions import check_under, reload_model
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.steps import OnProgress, unwatched
from icebear.values import several, shown, typed


@typed
def check(
    model: Model,
    claims: str | Path | Iterable[Claim],
    under: Sequence[str | Condition] = (),
    on_progress: OnProgress = unwatched,
) -> CheckedClaims:
    """Measure claims again.

    Parameters
    ----------
    model : Model
        The model that the claims are checked in: the one that they were made with, or another version of it.
    claims : str, Path or iterable of Claim
        A file of claims (docs/claims.md), or claims.
    under : sequence of str
        Conditions under which all claims are measured once more, after those of the file: ``dtype=bfloat16``,
        ``bits=8``, ``attention=eager``, ``model=OTHER``, ``paraphrases=auto``, ``threads=1``, ``seed=1``, or
        ``url=http://localhost:8000/v1`` (docs/claims.md). For the first three the model is loaded again by its name.
    on_progress : callable
        Called with (done, total) claims, each counted once a condition.

    Returns
    -------
    CheckedClaims
        Its ``passed`` is true if at least one claim passed in the plain run and none failed. ``under`` has a run for
        each condition.

    Raises
    ------
    InputError
        If the file cannot be read, if there is no claim, or for an unknown condition.
    """
    conditions = conditions_of(several(under))
    if isinstance(claims, str | Path):
        every, written = read_claims_file(claims)
        conditions = conditions_of([*written, *conditions])
    else:
        every = tuple(several(claims))
    if not every:
        raise InputError("There is no claim to check; write claims with --claim (docs/claims.md).")
    for claim in every:
        if not isinstance(claim, Claim):
            raise InputError(f"{shown(claim)} is not a claim; give a file of claims, or the claims that it has.")
    return check_under(model, partial(reload_model, model), every, conditions, on_progress)

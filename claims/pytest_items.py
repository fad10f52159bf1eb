"""Claims as tests of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from icebear.claims.checked_claim import check_claim
from icebear.claims.claims_files import read_claims
from icebear.errors import IcebearError
from icebear.models.loading import loading


class ClaimFailed(Exception):
    """A claim that is broken, or whose control passes too."""


class ClaimsFile(pytest.File):
    """A file of claims."""

    def collect(self) -> Iterator[pytest.Item]:
        try:
            claims = read_claims(self.path)
        except IcebearError as error:
            raise self.CollectError(str(error)) from None
        for number, claim in enumerate(claims, 1):
            yield ClaimItem.from_parent(self, name=f"{number} {claim}", claim=claim)


class ClaimItem(pytest.Item):
    """A claim as a test: it fails if it is broken, and is skipped if it cannot be measured."""

    def __init__(self, *, claim: Any, **more: Any) -> None:
        super().__init__(**more)
        self.claim = claim

    def runtest(self) -> None:
        provenance = self.claim.provenance
        name = self.config.getoption("--claims-model") or (provenance and provenance.model)
        row = check_claim(_model(name), self.claim)
        if row.failed:
            raise ClaimFailed(f"{row.verdict}: {row.why}")
        if row.measured is None:
            pytest.skip(f"{row.verdict}: {row.why}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, ClaimFailed | IcebearError):
            return f"{self.claim}\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, str(self.claim)


@cache
def _model(name: str | None) -> Any:
    return loading.load_model(name) if name else loading.load_model()

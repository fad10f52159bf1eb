"""Claims about a model: what was measured, as a file that is measured again after every change of the model.

`pytest -p icebear.claims` collects the claims of `*.claims.yaml` as tests. Loading it imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ENDINGS = (".claims.yaml", ".claims.yml")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("icebear").addoption(
        "--claims-model",
        metavar="MODEL",
        help="Check the claims of *.claims.yaml in this model instead of the one that they were made with.",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not file_path.name.endswith(ENDINGS):
        return None
    from icebear.claims.pytest_items import ClaimsFile

    return ClaimsFile.from_parent(parent, path=file_path)

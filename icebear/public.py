"""A package's public names, each imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def public(package: str, names: dict[str, str]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package.

    names: module -> the names that come from it, with spaces between. For type checkers, which cannot read this, the
        package says ``import name as name`` besides.
    """
    homes = {name: module for module, some in names.items() for name in some.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return sorted(homes), get, lambda: sorted(homes)

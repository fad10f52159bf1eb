"""An attribute of one object, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `name` of this object, and not of its class, is `value`; afterwards it is as before."""
    missing = object()
    before = vars(owner).get(name, missing)
    vars(owner)[name] = value
    try:
        yield
    finally:
        if before is missing:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before

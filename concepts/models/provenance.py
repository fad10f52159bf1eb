"""Where a number comes from, in one shape for every output."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model

PACKAGES = ("icebear", "torch", "transformers")


def provenance(model: Model, **more: Any) -> dict[str, Any]:
    """JSON-ready: the model, how its weights are kept, the versions of what computed, and what else decides a number
    (method, seed, ...)."""
    return {
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "dtype": model.dtype_name,
            "weights": model.weights,
        },
        "versions": versions(),
        **more,
    }


@cache
def versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}

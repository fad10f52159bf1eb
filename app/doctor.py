"""What `icebear doctor` reports."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from app.roots import roots
from concepts.models import Model
from db.errors import IcebearError
from db.fetch import cache_folder


def examine(load: Callable[[], Model]) -> dict[str, Any]:
    """Versions, places, and a relevance pass on the model: conservation, sites, sinks."""
    facts: dict[str, Any] = {"python": sys.version.split()[0], "machine": platform.platform()}
    for name in ("icebear", "torch", "transformers", "tokenizers", "safetensors", "gguf"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "missing"
    facts["packages"] = ", ".join(sorted(set(roots().values())))
    facts["cache"] = str(cache_folder())
    try:
        facts.update(_model_facts(load()))
    except IcebearError as error:
        facts["error"] = str(error)
    return facts


def _model_facts(model: Model) -> dict[str, Any]:
    from concepts.attribution import attribute
    from concepts.lrp.method import CP_LRP

    relevance = attribute(model, "The ice bear lives in the", method=CP_LRP)
    return {
        "model": repr(model),
        "fingerprint": model.fingerprint,
        "family": model.family.name,
        "sites": ", ".join(f"{site} {model.width(site)}" for site in ("ffn", "attn", "q", "k", "v")),
        "predicts": f"{relevance.target_text!r} after 'The ice bear lives in the'",
        "cp-lrp": str(relevance.conservation()),
        "sinks": list(relevance.sinks),
    }

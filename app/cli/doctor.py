"""What `icebear doctor` reports."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from icebear.cache import cache_folder
from icebear.concepts.models.model import Model
from icebear.db.store import Store
from icebear.db.vectors import NAMES
from icebear.errors import IcebearError


def examine(
    load: Callable[[], Model], store_of: Callable[[Model], AbstractContextManager[Store | None]]
) -> dict[str, Any]:
    """Versions, places, a self-test of the model, and whether a store fits it."""
    facts: dict[str, Any] = {"python": sys.version.split()[0], "machine": platform.platform()}
    for name in ("icebear", "torch", "transformers", "tokenizers", "safetensors", "gguf"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "missing"
    facts["package"] = str(files("icebear"))
    facts["cache"] = str(cache_folder())
    try:
        model = load()
        facts.update(_model_facts(model))
        with store_of(model) as store:
            facts["store"] = _store_fact(store) if store else "none"
    except IcebearError as error:
        facts["error"] = str(error)
    return facts


def _store_fact(store: Store) -> str:
    """Raises `StoreError` where its vectors are not its own."""
    for name in NAMES:
        store.vectors.get(name)
    return f"{store.path} fits the model"


def _model_facts(model: Model) -> dict[str, Any]:
    from icebear.concepts.selftest import selftest

    found = selftest(model)
    return {
        "model": f"{model.name}, {model.layers} layers, {model.dtype_name}, {model.device}",
        "dtype": model.dtype_name,
        "fingerprint": model.fingerprint,
        "family": model.family.name if model.has_family else "unknown",
        "sites": ", ".join(f"{site} {width}" for site, width in found.sites.items()) or "none",
        "parity": f"logits under the rules differ by {found.parity:.1e} of the largest",
        "cp-lrp": str(found.conserved),
        "LRP rules": f"none for {', '.join(found.missing)}" if found.missing else "all operations covered",
        "sinks": list(found.sinks),
        "cost": f"{found.cost:.2f}x the time of gradient x input",
        "verdict": found.verdict,
    }

"""Whether something was made for this model."""

from __future__ import annotations

import hashlib
import logging


def fits(made_for: str, model: str, what: str) -> bool:
    """Whether `what`, made for the fingerprint `made_for`, fits the model with the fingerprint `model`.

    Version 250f754 and before knew the first half only, the signs of weights: then it fits, with a warning.
    """
    if made_for and model.startswith(f"{made_for}-"):
        logging.getLogger("icebear").warning(
            "%s was made by an earlier icebear, which knew a model by the signs of its weights only; if weights were "
            "scaled or removed since, make it again.",
            what,
        )
        return True
    return made_for == model


def hashed(text: str) -> int:
    """64 bits that depend on nothing but the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

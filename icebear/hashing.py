"""Hashes that do not depend on the process or version."""

from __future__ import annotations

import hashlib


def stable_hash(text: str) -> int:
    """Return 64 bits that depend only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

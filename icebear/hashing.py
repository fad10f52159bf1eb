"""Hashes that are the same in every process and version."""

from __future__ import annotations

import hashlib


def stable_hash(text: str) -> int:
    """64 bits that depend on nothing but the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

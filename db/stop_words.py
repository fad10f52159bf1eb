"""Stop words: the words of a search text that do not say what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

STOP_WORDS = frozenset(Path(__file__).with_name("stop_words.txt").read_text(encoding="utf-8").split())
"""English function words, and the pieces that an apostrophe leaves. Frequent words that a search can be about, such as
war and water, are not in it."""


def without_stop_words(words: Sequence[str]) -> list[str]:
    """Return the words without stop words; all of them if there are no others."""
    return [word for word in words if word.lower() not in STOP_WORDS] or list(words)

"""Content words: which words of a text say what it is about, told without a model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

COMMON = frozenset(Path(__file__).with_name("common.txt").read_text(encoding="utf-8").split())
"""The 200 most common English words."""
SHORTEST = 3
"""The smallest number of letters of a word in a script with upper case."""


def is_content(text: str) -> bool:
    """Return whether a text, apart from spaces around it, is a number or a word that is not one of the common ones."""
    word = text.strip()
    if word.isdecimal():
        return True
    long_enough = len(word) >= (SHORTEST if word.lower() != word.upper() else 1)
    return is_word(word) and long_enough and word.lower() not in COMMON


def is_word(text: str) -> bool:
    """Return whether a text has letters and their marks, and nothing else."""
    return any(map(str.isalpha, text)) and all(x.isalpha() or unicodedata.category(x)[0] == "M" for x in text)


def words_of(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of all words and numbers in the texts of tokens, without the punctuation at them."""
    start = None
    for position, text in enumerate([*texts, " "]):
        inside = is_word(text.strip()) or text.strip().isdecimal()
        if start is not None and (text[:1].isspace() or not inside):
            yield start, position
            start = None
        if inside and start is None:
            start = position


def first_content_word(texts: Sequence[str], question: str = "") -> tuple[int, int]:
    """Return the bounds of the first content word in the texts of an answer's tokens that the question does not have;
    else of the first content word, or of the first token."""
    known = {word.lower() for word in re.findall(r"\w+", question)}
    words = [span for span in words_of(texts) if is_content("".join(texts[slice(*span)]))]
    new = (span for span in words if "".join(texts[slice(*span)]).strip().lower() not in known)
    return next(new, words[0] if words else (0, 1))

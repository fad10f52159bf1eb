"""Terms: what sentences and queries are searched by, the same for both, in all scripts.

A text becomes terms with a space between them. Where a script puts spaces between words, a term is a word. Elsewhere,
and in Korean, whose particles are part of the word, each character is a term. A word is searched for as a phrase of its
terms, which finds it there at any place, as a search for a part of the text does.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from icebear.db.stop_words import without_stop_words
from icebear.errors import InputError
from icebear.values import shown

SPACED = (
    *("LATIN", "GREEK", "COPTIC", "CYRILLIC", "ARMENIAN", "GEORGIAN", "HEBREW", "ARABIC", "SYRIAC", "THAANA", "NKO"),
    *("DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA"),
    *("TIBETAN", "ETHIOPIC", "CHEROKEE", "CANADIAN SYLLABICS", "MONGOLIAN", "TIFINAGH", "DIGIT", "MODIFIER LETTER"),
)
"""Beginnings of the Unicode names of letters in scripts with spaces between words, and of digits and modifier letters.
The letters of all other scripts are terms one by one, which misses nothing."""
OPTIONAL_MARKS = ("COMBINING", "ARABIC", "HEBREW", "SYRIAC", "MUSICAL")
"""Beginnings of the Unicode names of marks that people leave out: accents, and vowels of these scripts. Other marks,
such as the vowels of Hindi, are letters."""
IOTA = "\u0345"
"""The mark under a Greek letter, whose capital is a letter."""
DOTLESS = "\u0131"
"""The Turkish letter whose capital is I."""
TATWEEL = "\u0640"
"""Stretches an Arabic word."""
TSHEG = "\u0f0b\u0f0c"
"""The marks between the syllables of a Tibetan word."""
BREAK = "|"
"""The term for what stands between two characters that are terms: no phrase goes across it."""
TOKENIZER = f"unicode61 remove_diacritics 2 categories 'L* M* N* Co Cn' tokenchars '{BREAK}'"
"""SQLite splits terms at the spaces. Cn: letters that are newer than its tables."""


class _Letters(dict[int, str]):
    """Code point -> the character if it is a part of a word, nothing if people leave it out, or else a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category, name = unicodedata.category(character), unicodedata.name(character, "")
        optional = category[0] == "M" and name.startswith(OPTIONAL_MARKS) and "KANA" not in name
        if optional or category == "Cf" or character == TATWEEL or "VARIATION SELECTOR" in name:
            self[code] = ""
        else:
            self[code] = character if category[0] in "LMN" or category == "Co" else " "
        return self[code]


class _Terms(dict[int, str]):
    """Code point -> the character, between spaces if it is a term."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_spaced = unicodedata.name(character, "").startswith(SPACED)
        self[code] = character if is_spaced else f" {character} "
        return self[code]


_LETTERS = _Letters({ord(IOTA): IOTA, ord(DOTLESS): "i"})
_TERMS = _Terms({ord(" "): "\n"})


def table(name: str, content: str) -> str:
    """Return the SQL that makes a full-text table of `terms`; `content` is the table of the texts, if any."""
    return f'CREATE VIRTUAL TABLE {name} USING fts5(text, content="{content}", tokenize="{TOKENIZER}")'


def terms(text: str) -> str:
    """Return the terms of a text, without case, accents and compatibility forms."""
    letters = _decomposed(text.translate(_LETTERS)).casefold()
    letters = _decomposed(letters).translate(_LETTERS)
    separated = unicodedata.normalize("NFC", letters).translate(_TERMS)
    return " ".join(re.sub(r" \n+ ", f" {BREAK} ", separated).split())


def _decomposed(text: str) -> str:
    """Return compatibility forms and letters with marks in parts; but single Korean letters stay, which would become
    syllables."""
    return JAMO.sub(lambda match: match[0] if match[1] else unicodedata.normalize("NFKD", match[0]), text)


JAMO = re.compile("([\u3131-\u318e]+)|[^\u3131-\u318e]+")


def words(text: str) -> list[str]:
    """Return the words of a text as they are written."""
    text = unicodedata.normalize("NFC", text)
    runs = "".join(" " if _LETTERS[ord(c)] == " " and c not in TSHEG else c for c in text).split()
    return [run for run in runs if terms(run)]


def has_words(text: str) -> bool:
    """Return whether a text can be searched for: a token may be a full stop."""
    return bool(words(text))


def words_of(text: Any) -> list[str]:
    """Return the words of a search text that count: without stop words, unless it has no others. Raises `InputError` if
    it has none."""
    words_found = words(text) if isinstance(text, str) else []
    if not words_found:
        raise InputError(f"The search text {shown(text)} has no words; give at least one.")
    return without_stop_words(words_found)


def padded(text: str) -> str:
    """Return the terms of a text between spaces: those of a word are in those of a text that `query_of` finds by it."""
    return f" {terms(text)} "


def query_of(words: Iterable[str]) -> str:
    """Return the full-text query for texts with any of these words."""
    return " OR ".join(f'"{terms(word)}"' for word in words)

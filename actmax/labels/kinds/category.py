"""The token here, before or after is of a category: numbers, capitals, punctuation, endings, scripts, code."""

from __future__ import annotations

import re

import numpy as np

from icebear.actmax.labels.evidence import Evidence
from icebear.actmax.labels.kinds.base import LabelKind
from icebear.actmax.labels.label import PLACE_TEXTS, Label, at
from icebear.actmax.labels.sample import Sample

WHERE = ("here", "before", "after")


def _script(first: str, last: str) -> str:
    return f"[{first}-{last}]"


def _words(text: str) -> str:
    return rf"(?i)\s?({text.replace(' ', '|')})$"


PATTERNS = {
    "a number": r"\s?\d+$",
    "a number word": _words("one two three four five six seven eight nine ten hundred thousand million billion"),
    "an ordinal": _words("first second third fourth fifth sixth seventh eighth ninth tenth last"),
    "a capitalised word": r"\s?[A-Z][a-z]",
    "capitals": r"\s?[A-Z]{2,}$",
    "a single capital": r"\s?[A-Z]$",
    "the inside of a word": r"[^\W\d_]+$",
    "a comma": r"\s?,$",
    "a full stop": r"\s?[.!?]$",
    "a colon or semicolon": r"\s?[:;]$",
    "a hyphen or dash": r"\s?[-\u2013\u2014]+$",
    "an opening bracket": r"\s?[(\[{]",
    "a closing bracket": r"\s?[)\]}]",
    "a quotation mark": r"\s?[\"'\u2018-\u201f\u00ab\u00bb]+$",
    "an apostrophe": r"['\u2019]\w*$",
    "punctuation": r"\s?[^\w\s]+$",
    "code": r"\s?[{}<>=;_\\|#$@`~^*]+|\s?[a-z]+_[a-z_]+$",
    "an article": _words("the a an"),
    "a preposition": _words("of in on at by for with from to into over under between through during against about as"),
    "a conjunction": _words("and or but nor so yet while because although if when than that"),
    "a pronoun": _words("he she it they we you his her its their who which whose this these those"),
    "an auxiliary": _words("is was are were be been being has have had do does did will would can could may might"),
    "a negation": _words("not no never none without neither nor"),
    "a comparison": _words("more most less least very such many much several some all both each other"),
    "a month": _words("january february march april may june july august september october november december"),
    "a weekday": _words("monday tuesday wednesday thursday friday saturday sunday"),
    "accented Latin": r".*[À-ɏ]",
    "Greek": f".*{_script('Ͱ', 'Ͽ')}",
    "Cyrillic": f".*{_script('Ѐ', 'ӿ')}",
    "Hebrew": f".*{_script('֐', '׿')}",
    "Arabic": f".*{_script('؀', 'ۿ')}",
    "Devanagari": f".*{_script('ऀ', 'ॿ')}",
    "Chinese or Japanese": f".*{_script('぀', 'ヿ')}|.*{_script('一', '鿿')}",
    "Hangul": f".*{_script('가', '힯')}",
}
"""Name -> of the token."""
ENDINGS = ("ing", "ed", "ly", "s", "er", "est", "ion", "al", "ic", "ism", "ist", "ous", "able", "ive", "ian", "ment")
"""Of the word that ends with the token."""


class Categories(LabelKind):
    """The token here, before or after is of a category."""

    name = "category"
    depends_on_neuron = False

    def candidates(self, evidence: Evidence) -> list[Label]:
        names = (*PATTERNS, *(f"-{ending}" for ending in ENDINGS))
        return [Label.of(self.name, where, (name,)) for name in names for where in WHERE]

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        name = label.texts[0]
        return at(sample, _of_words(sample, name) if name.startswith("-") else _of_tokens(sample, name), label.where)

    def text(self, label: Label) -> str:
        return PLACE_TEXTS[label.where].format(label.texts[0])


def _of_tokens(sample: Sample, name: str) -> np.ndarray:
    known = {piece: bool(re.match(PATTERNS[name], piece)) for piece in set(sample.pieces)}
    return np.array([known[piece] for piece in sample.pieces])


def _of_words(sample: Sample, name: str) -> np.ndarray:
    ending = name.removeprefix("-")
    able = [word for word in sample.codes.words if word.endswith(ending) and len(word) > len(ending) + 2]
    return sample.codes.chosen(sample.codes.words, able)[sample.word]

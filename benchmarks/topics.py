"""The concepts of the steering evaluation: words, and the sentences of a corpus that contain them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icebear.errors import InputError
from icebear.values import stable_hash

CONCEPTS: dict[str, str] = json.loads((Path(__file__).parent / "topics.json").read_text(encoding="utf-8"))
"""Name -> sixteen words; every other word is held out."""
PARTS = ("find", "choose", "report")
ENOUGH = {"find": 120, "choose": 60, "report": 100}
"""Maximum sentences of a concept in each part; there are twice as many without any word of any concept."""
FEWEST = 40
"""Minimum sentences of a concept in each part."""

Row = tuple[str, str]
"""A document's title, and a sentence of it."""


@dataclass(frozen=True)
class Topic:
    """A concept's words, and sentences of each part. Sentences to find and choose by have known words only; sentences
    to report on have held-out words only, and are from other documents."""

    name: str
    known: tuple[str, ...]
    held_out: tuple[str, ...]
    sentences: dict[str, list[str]]
    silent: list[str]
    """Sentences to report on without any of the words, of documents whose first sentence has a held-out word."""


@dataclass(frozen=True)
class TopicSentences:
    concepts: list[Topic]
    others: dict[str, list[str]]
    """part -> sentences without any word of any concept, of documents without one in their first sentence."""


def split_of(title: str) -> str:
    return PARTS[stable_hash(f"topic {title}") % 3]


def topics(rows: Sequence[Row], names: Sequence[str], seed: int = 0) -> TopicSentences:
    """Collect the sentences of concepts. Raises `InputError` for too few sentences."""
    order = np.random.default_rng(seed).permutation(len(rows))
    words_of = {text: set(re.findall(r"[a-z]+", text.lower())) for _, text in rows}
    leads: dict[str, set[str]] = {}
    for title, text in rows:
        leads.setdefault(title, words_of[text])
    every = {word for words in CONCEPTS.values() for word in words.split()}
    others: dict[str, list[str]] = {part: [] for part in PARTS}
    for number in order.tolist():
        title, text = rows[number]
        if not (words_of[text] | leads[title]) & every:
            others[split_of(title)].append(text)
    others = {part: texts[: 2 * ENOUGH[part]] for part, texts in others.items()}
    return TopicSentences([_topic(name, rows, order.tolist(), words_of, leads) for name in names], others)


def _topic(
    name: str, rows: Sequence[Row], order: Sequence[int], words_of: dict[str, set[str]], leads: dict[str, set[str]]
) -> Topic:
    words = CONCEPTS[name].split()
    known, held_out = words[::2], words[1::2]
    sentences: dict[str, list[str]] = {part: [] for part in PARTS}
    silent = []
    for number in order:
        title, text = rows[number]
        part, present, lead = split_of(title), words_of[text], leads[title]
        wanted, unwanted = (held_out, known) if part == "report" else (known, held_out)
        if present & set(wanted) and not present & set(unwanted):
            sentences[part].append(text)
        elif part == "report" and not present & set(words) and lead & set(held_out) and present != lead:
            silent.append(text)
    sentences = {part: texts[: ENOUGH[part]] for part, texts in sentences.items()}
    least = min(map(len, sentences.values()))
    if least < FEWEST:
        raise InputError(
            f"A part of the corpus has {least} sentences about {name}, but {FEWEST} are needed; use a larger corpus."
        )
    return Topic(name, tuple(known), tuple(held_out), sentences, silent[: ENOUGH["report"]])

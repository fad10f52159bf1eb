"""The concepts that methods are compared on: words, and the sentences of a corpus that have them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from icebear.errors import InputError
from icebear.hashing import stable_hash

CONCEPTS = {
    "music": "song album band guitar piano singer orchestra melody jazz composer musical opera concert musician "
    "symphony rhythm",
    "sport": "football olympic player team basketball championship tournament athlete league baseball tennis coach "
    "players stadium medal soccer",
    "animals": "species mammal bird fish habitat predator breeding prey wings feathers fur insects eggs nest reptile "
    "amphibian",
    "medicine": "disease patients symptoms treatment infection drug surgery medical doctor hospital syndrome diagnosis "
    "therapy cancer virus blood",
    "war": "battle army soldiers troops military invasion siege weapons navy defeated attack commander soldier "
    "regiment artillery infantry",
    "film": "film movie actor actress director hollywood cinema screenplay films starring television comedy academy "
    "filmmaker drama studio",
    "religion": "church god bible christian prayer worship catholic priest sacred monks temple jesus religious faith "
    "bishop scripture",
    "chemistry": "chemical acid atoms molecule compound element electrons carbon hydrogen oxygen metal reaction ions "
    "oxide solvent isotopes",
    "politics": "election president parliament minister party government vote senator democratic political congress "
    "elected policy legislature republican campaign",
    "literature": "novel poet poems writer fiction author literary poetry stories published narrator books playwright "
    "prose literature novelist",
    "astronomy": "star planet orbit galaxy solar moon telescope astronomers jupiter comet sun asteroid stars universe "
    "spacecraft constellation",
    "computing": "software computer program programming internet algorithm data hardware users processor code "
    "operating digital computers web microsoft",
}
"""Name -> sixteen words; every other one is left for the report."""
PARTS = ("find", "choose", "report")
ENOUGH = {"find": 120, "choose": 60, "report": 100}
"""Sentences of each part that a concept has at most, and there are twice as many without any word of any concept."""
FEWEST = 40
"""Of a part."""

Row = tuple[str, str]
"""A document's title, and a sentence of it."""


@dataclass(frozen=True)
class Topic:
    """A concept's words, and sentences: those to find by have words of the first half only, those to report on words
    of the second half only, and are of other documents."""

    name: str
    known: tuple[str, ...]
    held_out: tuple[str, ...]
    sentences: dict[str, list[str]]
    silent: list[str]
    """Sentences to report on that have none of the words, of documents whose first sentence has one held out."""


@dataclass(frozen=True)
class TopicSentences:
    concepts: list[Topic]
    others: dict[str, list[str]]
    """part -> sentences without any word of any concept, of documents that have none in their first sentence."""


def split_of(title: str) -> str:
    return PARTS[stable_hash(f"topic {title}") % 3]


def topics(rows: Sequence[Row], names: Sequence[str], seed: int = 0) -> TopicSentences:
    """Raises `InputError` for a concept with too few sentences in the corpus, and an unknown one."""
    unknown = [name for name in names if name not in CONCEPTS]
    if unknown:
        raise InputError(f"There is no concept {unknown[0]!r} here; there are {', '.join(CONCEPTS)}.")
    order = np.random.default_rng(seed).permutation(len(rows))
    found = {text: set(re.findall(r"[a-z]+", text.lower())) for _, text in rows}
    first: dict[str, set[str]] = {}
    for title, text in rows:
        first.setdefault(title, found[text])
    every = {word for words in CONCEPTS.values() for word in words.split()}
    others: dict[str, list[str]] = {part: [] for part in PARTS}
    for place in order.tolist():
        title, text = rows[place]
        if not (found[text] | first[title]) & every:
            others[split_of(title)].append(text)
    others = {part: texts[: 2 * ENOUGH[part]] for part, texts in others.items()}
    return TopicSentences([_topic(name, rows, order.tolist(), found, first) for name in names], others)


def _topic(
    name: str, rows: Sequence[Row], order: Sequence[int], found: dict[str, set[str]], first: dict[str, set[str]]
) -> Topic:
    words = CONCEPTS[name].split()
    known, held_out = words[::2], words[1::2]
    sentences: dict[str, list[str]] = {part: [] for part in PARTS}
    silent = []
    for place in order:
        title, text = rows[place]
        part, own = split_of(title), found[text]
        wanted, unwanted = (held_out, known) if part == "report" else (known, held_out)
        if own & set(wanted) and not own & set(unwanted):
            sentences[part].append(text)
        elif part == "report" and not own & set(words) and first[title] & set(held_out) and own != first[title]:
            silent.append(text)
    sentences = {part: texts[: ENOUGH[part]] for part, texts in sentences.items()}
    least = min(map(len, sentences.values()))
    if least < FEWEST:
        raise InputError(
            f"The corpus has {least} sentences of {name} in a part, and {FEWEST} are needed; take a larger corpus."
        )
    return Topic(name, tuple(known), tuple(held_out), sentences, silent[: ENOUGH["report"]])

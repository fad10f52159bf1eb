"""Labels are readable functions of tokens, and the evidence that they are made from: where a neuron is most active in
train documents, and the tokens that it promotes.

To add a kind, add a class (`LabelKind`) and its line in `KINDS`.
"""

from __future__ import annotations

import math
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from icebear.actmax.labels.sample import Sample, distinctive
from icebear.values import one_of

TOP_TOKENS = 0.01
"""The share of tokens that are positives."""
TOP_SENTENCES = 0.05
"""The share of sentences that are positives."""
FEWEST = 8
"""The smallest number of tokens with an activation above zero for a label."""

SentenceToken = tuple[tuple[str, ...], int]
"""The tokens of a sentence, and a position among them."""
WHERE = {"here": "{}", "before": "after {}", "after": "before {}"}
"""Where a label looks, relative to a token -> the label in words. ``before`` is the token before."""
STEPS = {"here": 0, "before": -1, "after": 1}


@dataclass(frozen=True)
class Evidence:
    """The evidence for labels of a neuron at one polarity."""

    sample: Sample
    """The train sample."""
    values: np.ndarray
    """(N,) activations in the sample; negated for polarity ``-``."""
    examples: tuple[SentenceToken, ...] = ()
    """Maximally activating examples from train documents."""
    writes: tuple[str, ...] = ()
    """Tokens that the neuron promotes; empty for a site without W_out."""

    @cached_property
    def strongest(self) -> list[SentenceToken]:
        """Where it is most active: in the sample, and in the index."""
        tokens = top(self.values, self.sample.counted, TOP_TOKENS)
        return [*(self.sample.sentence_token(token) for token in tokens), *self.examples]


def top(values: np.ndarray, counted: np.ndarray, share: float) -> np.ndarray:
    """Return the positions of the largest share of the counted values above zero, largest first."""
    wanted = max(FEWEST, math.ceil(share * counted.sum()))
    able = np.flatnonzero(counted & (values > 0))
    if len(able) > wanted:  # sorting all of them would take most of the time of a label
        able = able[values[able] >= np.partition(values[able], -wanted)[-wanted]]
    return able[np.argsort(-values[able], kind="stable")[:wanted]]


def tokens_at(tokens: Iterable[SentenceToken], step: int) -> list[str]:
    """Return the token `step` tokens after each of these, in lower case."""
    rows = ((pieces, position + step) for pieces, position in tokens)
    return [pieces[at].lower() for pieces, at in rows if 0 <= at < len(pieces)]


@dataclass(frozen=True)
class Label:
    """A property that tokens have in common where a neuron is active."""

    kind: str
    """A key of `KINDS`."""
    where: str
    """A key of `WHERE`, or ``sentence``."""
    items: tuple[tuple[str, ...], ...]
    """Tokens, the name of a category, or the words of a topic, each alone; any of them makes the label true."""

    @classmethod
    def of(cls, kind: str, where: str, texts: Iterable[str]) -> Label:
        """Make a label whose items are single texts."""
        return cls(kind, where, tuple((text,) for text in texts))

    @property
    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in self.items]


class LabelKind(ABC):
    """A kind of label: makes candidates from evidence, and says where a label is true."""

    name: str
    depends_on_neuron = True
    """Whether the candidates differ between neurons."""

    @abstractmethod
    def candidates(self, evidence: Evidence) -> list[Label]:
        """Return candidate labels; of equally good ones the first is preferred."""

    @abstractmethod
    def true(self, label: Label, sample: Sample) -> np.ndarray:
        """Return at which tokens the label is true (N,)."""

    def degree(self, label: Label, sample: Sample) -> np.ndarray:
        """Return the degree (S,) to which the label is true of each sentence."""
        return sample.means(self.true(label, sample))

    def text(self, label: Label) -> str:
        return WHERE[label.where].format(", ".join(map(repr, label.texts)))


class Tokens(LabelKind):
    """The token here, before or after is one of a few."""

    name = "tokens"

    def candidates(self, evidence: Evidence) -> list[Label]:
        sample, labels = evidence.sample, []
        for where, step in STEPS.items():
            best = distinctive(tokens_at(evidence.strongest, step), sample.token_counts, len(sample), 8)
            labels += [Label.of(self.name, where, best[:size]) for size in (1, 2, 3, 5, 8) if size <= len(best)]
        if evidence.writes:  # neurons of the last layers are active before the tokens that they promote
            labels += [Label.of(self.name, where, map(str.lower, evidence.writes)) for where in ("here", "after")]
        return labels

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        matching = sample.codes.chosen(sample.codes.tokens, label.texts)[sample.token]
        return sample.beside(matching, STEPS[label.where])


class Categories(LabelKind):
    """The token here, before or after belongs to a category, such as numbers, punctuation, endings or scripts."""

    name = "category"
    depends_on_neuron = False
    expressions = tomllib.loads(Path(__file__).with_name("categories.toml").read_text())
    endings = "ing ed ly s er est ion al ic ism ist ous able ive ian ment".split()
    """Endings of the word that ends with the token."""

    def candidates(self, evidence: Evidence) -> list[Label]:
        names = (*self.expressions, *(f"-{ending}" for ending in self.endings))
        return [Label.of(self.name, where, (name,)) for name in names for where in ("here", "before", "after")]

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        name = label.texts[0]
        if name not in sample.seen:
            sample.seen[name] = self._members(name, sample)
        return sample.beside(sample.seen[name], STEPS[label.where])

    def _members(self, name: str, sample: Sample) -> np.ndarray:
        """Return which tokens belong to the category (N,)."""
        if name.startswith("-"):
            ending, words = name[1:], sample.codes.words
            able = [word for word in words if word.endswith(ending) and len(word) > len(ending) + 2]
            return sample.codes.chosen(words, able)[sample.word]
        known = {piece: bool(re.match(self.expressions[name], piece)) for piece in set(sample.pieces)}
        return np.array([known[piece] for piece in sample.pieces])

    def text(self, label: Label) -> str:
        return WHERE[label.where].format(label.texts[0])


class TopicLabels(LabelKind):
    """The sentence belongs to a topic."""

    name = "topic"
    depends_on_neuron = False
    alike = 0.3
    """The smallest cosine between a sentence and its topic."""

    def candidates(self, evidence: Evidence) -> list[Label]:
        return [Label.of(self.name, "sentence", words) for words in evidence.sample.topics]

    def degree(self, label: Label, sample: Sample) -> np.ndarray:
        """Return the cosine (S,) between each sentence and the topic."""
        return sample.topics[tuple(label.texts)]

    def true(self, label: Label, sample: Sample) -> np.ndarray:
        return (self.degree(label, sample) >= self.alike)[sample.sentence]

    def text(self, label: Label) -> str:
        return f"sentences about {', '.join(label.texts)}"


KINDS: dict[str, LabelKind] = {kind.name: kind for kind in (Tokens(), Categories(), TopicLabels())}


def of(label: Label) -> LabelKind:
    """Return the kind of a label. Raises `UnknownName` for one of another icebear."""
    return KINDS[one_of(label.kind, "kind of label", KINDS)]

"""What is measured of the sources of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any

from icebear.records import InNotebooks
from icebear.result_files import SavedResult

if TYPE_CHECKING:
    import pandas

SHOWN_SOURCES = 3
"""The sources of a sentence of the answer that a screen shows, and that are removed together."""
NAT = 1.0
"""A sentence of the answer is said to hang on a source if it loses so much more than without any control."""


@dataclass(frozen=True)
class MeasuredSource:
    """A source that was removed."""

    role: str
    """Who wrote it."""
    text: str
    change: float
    """Of the log-probability of the sentence of the answer, without minus with the source, in nats."""
    relevance: float
    """CP-LRP, in logits."""
    message: int
    """The index of its message."""
    start: int
    """Its first token, in what the model reads; `stop` is the one after its last."""
    stop: int
    characters: tuple[int, int] | None
    """Its characters [start, stop) of the text of its message; None for a call of a tool, reasoning and an image."""
    is_image: bool = False
    """Whether it is the image of the prompt, which is blurred instead of removed."""


@dataclass(frozen=True)
class RandomRemovals:
    """The control: changes without random other sources, which are drawn before anything is removed."""

    singles: tuple[float, ...] = ()
    """One at a time."""
    together: float | None = None
    """As many together as the first sources; None if there are not as many others."""
    are_all: bool = False
    """Whether they are all other sources, because a short context has no more."""


def stands_out(change: float, controls: Sequence[float]) -> bool:
    """Return whether a change is a loss of a nat more than each control; False without a control."""
    return bool(controls) and change <= min(0.0, *controls) - NAT


@dataclass(frozen=True)
class StandIn:
    """The first three sources, where they lose more together than one at a time."""

    alone: tuple[float, ...]
    """The change where only this one of the three is left."""
    each_suffices: bool
    """Whether any of them alone keeps nine tenths of what they lose together."""


@dataclass(frozen=True)
class SourcedSentence:
    """A sentence of the answer, or a call of a tool, with its sources."""

    text: str
    start: int
    """Its first token, in the answer; `stop` is the one after its last."""
    stop: int
    log_probability: float
    """Of its tokens after all that stands before them, in nats."""
    sources: tuple[MeasuredSource, ...]
    """Those with the largest relevance, without the controls; the largest loss is first."""
    together: float | None
    """The change without the first three sources."""
    only: float | None
    """The change without all sources but the first three; None if there are no others."""
    random: RandomRemovals
    stand_in: StandIn | None = None

    @property
    def leading(self) -> tuple[MeasuredSource, ...]:
        """The first three sources."""
        return self.sources[:SHOWN_SOURCES]

    def probability(self, change: float = 0.0) -> float:
        """Return the probability a token (geometric mean) after a change of the log-probability."""
        return exp((self.log_probability + change) / (self.stop - self.start))

    @property
    def is_decided(self) -> bool:
        """Whether it hangs on its first source: it loses a nat more than without any control."""
        return bool(self.sources) and stands_out(self.sources[0].change, self.random.singles)


@dataclass(frozen=True)
class AffectedSentence:
    """A sentence of the answer, and its change without one source."""

    text: str
    start: int
    stop: int
    log_probability: float
    change: float
    random: tuple[float, ...]
    """The changes without random other sources, one at a time."""

    @property
    def is_hit(self) -> bool:
        """Whether it loses a nat more without the source than without any control."""
        return stands_out(self.change, self.random)


@dataclass(frozen=True)
class SourceEffect:
    """What a source did to each sentence of the answer."""

    role: str
    text: str
    message: int
    sentences: tuple[AffectedSentence, ...]


@dataclass(frozen=True)
class DroppedText:
    """What a conversation has and the model did not read, because the template leaves it out."""

    role: str
    message: int
    text: str


def losses(sources: Sequence[MeasuredSource]) -> float:
    """Return the sum of the single losses of sources; a gain is no loss."""
    return sum(max(0.0, -source.change) for source in sources)


@dataclass(frozen=True, repr=False)
class SourcesRecord(SavedResult, InNotebooks):
    """The fields of `icebear.concepts.answers.sources.Sources`, which its sentences read."""

    sentences: tuple[SourcedSentence, ...]
    units: str
    """What a source is: a sentence, message or document."""
    count: int
    """The number of sources in the context."""
    question: str
    """What the user asked, which stays in place; empty if everything was a source."""
    dropped: tuple[DroppedText, ...]
    """What the template leaves out, so that the model did not read it."""
    reader: str
    """The name of the model that reads the answer, if it is not known to have written it; else empty."""
    is_complete: bool
    """Whether everything was measured; else Ctrl-C ended it."""
    made_with: dict[str, Any] = field(compare=False)
    """See `Model.made_with`."""

    @property
    def has_image(self) -> bool:
        """Whether an image is among the sources."""
        return any(source.is_image for sentence in self.sentences for source in sentence.sources)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict. Every change is the log-probability without minus with, in nats."""
        about = {name: getattr(self, name) for name in ("units", "count", "question", "reader", "is_complete")}
        return {
            "answer_sentences": [_row(sentence) for sentence in self.sentences],
            **about,
            "dropped": [vars(text) for text in self.dropped],
            "made_with": self.made_with,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)

    def to_frame(self) -> pandas.DataFrame:
        """Return a row for each removal of a single source."""
        import pandas

        rows = [
            {"answer": sentence.text.strip(), **vars(source), "text": source.text.strip()}
            for sentence in self.sentences
            for source in sentence.sources
        ]
        return pandas.DataFrame(rows, columns=["answer", *MeasuredSource.__dataclass_fields__])


def _row(sentence: SourcedSentence) -> dict[str, Any]:
    """Return a sentence of the answer JSON-ready."""
    stand_in = sentence.stand_in
    return {
        **{name: getattr(sentence, name) for name in ("text", "start", "stop", "log_probability", "together", "only")},
        "sources": [vars(source) for source in sentence.sources],
        "random": {
            "single": list(sentence.random.singles),
            "together": sentence.random.together,
            "are_all": sentence.random.are_all,
        },
        "stand_in": stand_in and {"alone": list(stand_in.alone), "each_suffices": stand_in.each_suffices},
    }

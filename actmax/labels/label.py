"""A label: a function of tokens that people can read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from icebear.actmax.labels.sample import Sample


@dataclass(frozen=True)
class Label:
    """What the tokens have in common that a neuron fires at."""

    kind: str
    """A key of `icebear.actmax.labels.kinds.KINDS`."""
    where: str
    """What is looked at, seen from the token: ``here``, ``before`` (the token before it), ``after``, ``earlier`` (in
    its sentence, or here), ``sentence``."""
    items: tuple[tuple[str, ...], ...]
    """Any of these makes it true: words, tokens, or sequences of tokens."""

    @classmethod
    def of(cls, kind: str, where: str, texts: Iterable[str]) -> Label:
        """Each item a text by itself."""
        return cls(kind, where, tuple((text,) for text in texts))

    @property
    def texts(self) -> list[str]:
        return ["".join(item) for item in self.items]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "where": self.where, "items": list(map(list, self.items))}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Label:
        return cls(found["kind"], found["where"], tuple(map(tuple, found["items"])))


def at(sample: Sample, x: np.ndarray, where: str) -> np.ndarray:
    """(N,) bool: where x (N,), that is true of tokens, is true in the place that is looked at."""
    if where == "here":
        return x
    return sample.beside(x, -1 if where == "before" else 1)


PLACE_TEXTS = {"here": "{}", "before": "after {}", "after": "before {}", "earlier": "{} earlier in the sentence"}


def place_text(label: Label) -> str:
    """In words: what the token is, or what it stands behind or before."""
    return PLACE_TEXTS[label.where].format(", ".join(map(repr, label.texts)))

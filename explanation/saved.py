"""An explanation as it is saved: plain values and sentences, which are read without torch and without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from icebear.concepts.stages.stage_records import StageRecord
from icebear.convert import Saved
from icebear.records import TokenScore


@dataclass(frozen=True, repr=False)
class SavedExplanation(Saved):
    """What an explanation says of T tokens, and its stages."""

    prompt: Any
    """A text, token ids, or the messages of a chat."""
    counterfactual: Any
    """None if there is none."""
    target: str
    contrast: str | None
    predictions: tuple[TokenScore, ...]
    """The most probable next tokens."""
    counterfactual_predictions: tuple[TokenScore, ...]
    tokens: tuple[str, ...]
    """(T,)"""
    relevance: tuple[float, ...]
    """(T,) of the tokens, in logits."""
    sinks: tuple[int, ...]
    template: tuple[int, ...]
    tokens_sentence: str
    margins_sentence: str
    made_with: dict[str, Any]
    """See `Model.made_with`."""
    stages: StageRecord | None = None
    """How the answer is computed, if there is a counterfactual; without the nodes of random sets."""
    effects: tuple[str, ...] = ()
    """Without stages: what nodes do to the answer, above random ones; the first line is the title."""
    advice: str = ""
    """Without stages: why there are none, or what to compare with."""

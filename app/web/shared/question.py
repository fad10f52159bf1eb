"""The question that views share: both prompts, the answer and its alternative, in the same fields and the same URL."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import streamlit as st

from icebear.app.web.shared import background_job, counterfactuals, gallery, jobs, links
from icebear.explanation.saved import SavedExplanation
from icebear.records import TokenScore
from icebear.render import visible

DEFAULT_EXAMPLE = gallery.example(gallery.NAMES[0])
"""What a first visit of any view shows."""
PROMPT = DEFAULT_EXAMPLE.fields[0]
THEIRS = "Words that are probable after the counterfactual prompt, with their probabilities there; or any other word."


class Answers(NamedTuple):
    """Probable answers, and the ones that are explained if none is chosen."""

    predictions: Sequence[TokenScore]
    counterfactual_predictions: Sequence[TokenScore]
    target: str
    contrast: str | None


@dataclass(frozen=True)
class Request:
    """What is to be explained."""

    prompt: str
    counterfactual: str | None
    target: str | None
    """The answer as it was typed; None for the most probable one."""
    contrast: str | None
    method: str | None

    @property
    def is_default(self) -> bool:
        return not (self.target or self.contrast or self.method)


def prompts(label: str = "Compared with (counterfactual prompt)") -> tuple[str, str | None, Sequence[Any]]:
    """Draw the fields for both prompts. Return them, and the slots of the answer and its alternative.

    Once after a prompt was typed, icebear fills them, unless a person does; the page ends here while it looks."""
    job = counterfactuals.choose()
    row = st.columns([6, 2, 2], vertical_alignment="bottom")
    prompt = prompt_field(row[0])
    counterfactual = counterfactuals.field(DEFAULT_EXAMPLE.fields[1] if prompt == PROMPT else "", label)
    if job:
        # No run waits for it: a request of the browser from before the field was filled would empty the field again.
        jobs.show_progress(job)
        st.stop()
    counterfactuals.show_choice(prompt, counterfactual)
    return prompt, counterfactual, row[1:]


def prompt_field(slot: Any) -> str:
    """Draw the field for the prompt."""
    return links.bound(slot.text_input, "Prompt", "prompt", value=PROMPT, on_change=counterfactuals.forget)


def contrast_field(key: str) -> str | None:
    """Draw the field for another word that could stand in an answer. Return what is in it, None if it is empty."""
    about = "Another word that could stand there; the numbers then say what speaks for one of the two."
    return links.bound(st.text_input, "Rather than (optional)", key, width=200, help=about).strip() or None


def answers(prompt: str, counterfactual: str | None) -> Answers | SavedExplanation:
    """Return probable answers; those of a finished example need no model."""
    example = gallery.known(prompt, counterfactual)
    return example.explanation if example else measuring().answers(prompt, counterfactual)


def measuring() -> ModuleType:
    """Return the module `why.measuring`, as soon as the model is loaded."""
    jobs.model()
    return module("why.measuring")


def module(name: str) -> ModuleType:
    """Import what imports torch."""
    with background_job.importing:
        return importlib.import_module(f"icebear.app.web.{name}")


def target(slot: Any, known: Answers | SavedExplanation) -> str | None:
    return _chip(slot, "Answer", "target", known.predictions, known.target)


def contrast(slot: Any, known: Answers | SavedExplanation, label: str = "Rather than") -> str | None:
    theirs = known.counterfactual_predictions
    return _chip(slot, label, "contrast", theirs or known.predictions, known.contrast, THEIRS if theirs else None)


def _chip(
    slot: Any, label: str, key: str, tokens: Sequence[TokenScore], default: str | None, about: str | None = None
) -> str | None:
    """Draw a chip with probable tokens; another one can be typed. None is the default."""
    # A link has these names.
    texts = {
        f"{visible(token.text.strip()) if token.text.strip() else repr(token.text)} {token.number}": token.text
        for token in tokens
    }
    chosen = links.bound(
        slot.selectbox,
        label,
        key,
        list(texts),
        index=None,
        placeholder=visible((default or "any other word").strip()),
        accept_new_options=True,
        help=about,
    )
    return texts.get(chosen, chosen)

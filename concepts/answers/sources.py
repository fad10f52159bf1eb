"""Where an answer came from: its log-probability without each source of the context (context attribution).

1. Relevance orders: CP-LRP of each sentence of the answer, summed over the tokens of each source; one forward pass, and
   a backward pass each.
2. Removal measures: the first eight sources are taken out of the conversation, one at a time. The conversation is
   tokenized anew; the answer keeps its tokens. A change is the log-probability without minus with the source.
3. The three largest losses are also removed together, and everything but these three.
4. Control: four random others, drawn before anything is removed, one at a time, and three of them together. In a short
   context half of the sources, at most four, stay for the control.
5. A sentence of the answer hangs on a source if it loses a nat more than without any control.
6. Where three lose more together than one at a time, and than three random ones together, each is left alone: they may
   stand in for each other.

References: context attribution, and the log-probability that a removal loses: Cohen-Wang et al. 2024 (ContextCite),
arXiv 2409.00729. CP-LRP: Ali et al. 2022, arXiv 2202.07304.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from icebear.concepts.answers import source_sentences
from icebear.concepts.answers.removals import check_causal
from icebear.concepts.answers.source_measurement import OnExpected, SourceMeasurement, sources_request
from icebear.concepts.answers.source_records import DroppedText, SourceEffect, SourcesRecord
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.text.answer import Answer, Span
from icebear.models.text.chat import Chat
from icebear.models.text.splitting import UNITS
from icebear.render import page, render
from icebear.steps import OnProgress, unwatched
from icebear.values import one_of, seed_of, typed


@dataclass(frozen=True, repr=False)
class Sources(SourcesRecord):
    """What each sentence of an answer hangs on, measured."""

    def __str__(self) -> str:
        return "\n".join(map(str, source_sentences.source_lines(self)))

    def to_html(self) -> str:
        """Return a page."""
        return str(page("Where the answer came from", self._fragment()))

    def _repr_html_(self) -> str:
        return str(self._fragment())

    def _fragment(self) -> Markup:
        return render("icebear.concepts/sources.html", lines=source_sentences.source_lines(self), result=self)


@typed
def sources(
    model: Model,
    answer: Answer | Chat,
    units: str = "sentence",
    span: Span | None = None,
    seed: int = 0,
    checkpoint: bool | None = None,
    on_progress: OnProgress = unwatched,
    on_expected: OnExpected | None = None,
) -> Sources:
    """Measure which sentences of the context an answer hangs on: what it loses without each of them.

    The sources are sentences, list items, table rows, lines of code and members of JSON in all messages before the
    answer. What the user asks at the end of the last message stays. Ctrl-C ends the measurement and keeps what is
    measured.

    Parameters
    ----------
    model : Model
        A causal language model.
    answer : Answer or Chat
        An answer of `Model.answer`; or a chat whose last message is the answer, which any model may have written.
    units : str
        What is removed: ``sentence``, ``message`` or ``document`` (parts between empty lines).
    span : (int, int) or str, optional
        The tokens [i, j) of the answer, or a phrase of it. Default: each of its sentences.
    seed : int
        Of the random sources.
    checkpoint : bool, optional
        Recompute layers in the backward pass. Default: from 2,048 tokens on.
    on_progress : callable
        Called with (done, total) passes.
    on_expected : callable, optional
        Called with the expected seconds when the model has read the conversation once.

    Returns
    -------
    Sources
        Changes of log-probability in nats, with random sources as their control.

    Raises
    ------
    InputError
        If the answer is empty or of another model, has no such span, or no source is before it.

    References
    ----------
    Cohen-Wang et al. 2024 (ContextCite), arXiv 2409.00729; Ali et al. 2022 (CP-LRP), arXiv 2202.07304.
    """
    one_of(units, "unit", UNITS)
    seed_of(seed)
    check_causal(model)
    request = sources_request(model, answer, units, span)
    measured = SourceMeasurement(model, request, seed)
    is_complete = True
    try:
        measured.measure(checkpoint, on_progress, on_expected)
    except KeyboardInterrupt:
        if not measured.changes:
            raise
        is_complete = False
    context, written = request.context, request.answer.model is not None
    together = groupby(request.dropped, key=lambda source: (source.role, source.message, source.of))
    dropped = tuple(DroppedText(*about[:2], "".join(source.text for source in parts)) for about, parts in together)
    return Sources(
        sentences=tuple(measured.sentence(number) for number in range(len(request.spans))),
        units=units,
        count=len(request.sources),
        question="".join(part.text for part in context.question).strip(),
        dropped=dropped,
        reader="" if written else model.name,
        is_complete=is_complete,
        made_with=model.made_with,
    )


def effect_of_source(
    model: Model,
    answer: Answer | Chat,
    message: int,
    at: int,
    units: str = "sentence",
    span: Span | None = None,
    seed: int = 0,
) -> SourceEffect:
    """Measure what one sentence of the context, or another unit, did to each sentence of an answer.

    message, at: the index of its message, and a character of its text. The controls are those of `sources`. Raises
    `InputError` where there is no such source, or the model did not read it.
    """
    check_causal(model)
    request = sources_request(model, answer, units, span, with_question=True)
    every = request.sources
    index = next((i for i, x in enumerate(every) if x.message == message and x.start <= at < x.stop), None)
    if index is None:
        raise InputError(f"Message {message} has no {units} at character {at} that the model read; choose another.")
    measured = SourceMeasurement(model, request, seed)
    spans = range(len(request.spans))
    measured.read()
    measured.order(checkpoint=None)
    measured.remove(frozenset([number]) for number in {index, *(x for span in spans for x in measured.controls(span))})
    sentences = tuple(measured.affected(span, index) for span in spans)
    return SourceEffect(every[index].role, every[index].text, message, sentences)

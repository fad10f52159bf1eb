"""The removals that `sources` measures: which sources there are, in which order they are removed, and what changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from icebear.concepts.answers.removals import Removals
from icebear.concepts.answers.source_records import (
    SHOWN_SOURCES,
    AffectedSentence,
    MeasuredSource,
    RandomRemovals,
    SourcedSentence,
    StandIn,
    losses,
    stands_out,
)
from icebear.concepts.answers.units import answer_batch, span_relevance, units_of
from icebear.concepts.methods.attnlrp import CP_LRP
from icebear.concepts.passes.freeing import free_at_once
from icebear.concepts.passes.prompt import all_special_ids
from icebear.concepts.passes.run import LONG
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.prompt_image import PromptImage
from icebear.models.text.answer import Answer, Span, answer_of
from icebear.models.text.chat import Chat
from icebear.models.text.context import IMAGE, Context, ContextSource
from icebear.models.text.prompt_images import counterfactual_prompt, with_image
from icebear.models.text.prompts import Prompt
from icebear.steps import OnProgress, counting
from icebear.values import common_length, shown

REMOVED_SOURCES = 8
"""The sources of a sentence of the answer that are removed: at most so many, those with the largest relevance."""
RANDOM_SOURCES = 4
"""Removed one at a time as the control; in a short context at most half of the sources, with the least relevance."""
TOGETHER = 1.5
"""Sources stand in for each other where they lose so many times the sum of their single losses together, and a nat more
than random ones together."""
SUFFICES = 0.1
"""One of them suffices if, with it alone, at most this share of their joint loss is lost."""

Removed = frozenset[int]
"""The sources that are removed together, by their index."""
OnExpected = Callable[[float], None]


@dataclass(frozen=True)
class SourcesRequest:
    """What is measured: an answer, its spans of tokens, and the sources before it."""

    answer: Answer
    spans: tuple[tuple[int, int], ...]
    context: Context
    sources: tuple[ContextSource, ...]
    """Those that the model reads."""
    tokens: tuple[tuple[int, int], ...]
    """Of each source."""
    dropped: tuple[ContextSource, ...]
    blurred: PromptImage | None = None
    """What is left of an image that is removed."""

    @property
    def controls(self) -> set[int]:
        """The sources that may be a control, by their index: what the user asks is none, and an image is none."""
        sources = enumerate(self.sources)
        return {index for index, source in sources if source not in self.context.request and source.of != IMAGE}

    @property
    def image(self) -> int | None:
        """The index of the image among the sources."""
        return next((index for index, source in enumerate(self.sources) if source.of == IMAGE), None)

    def without(self, removed: Iterable[int]) -> Prompt:
        """Return what is read without some sources, by their index. The image is blurred."""
        indices = set(removed)
        left = self.context.without([self.sources[index] for index in indices])
        return replace(Prompt.of(left), image=self.blurred if self.image in indices else self.answer.image)


def read_left(model: Model, left: Prompt) -> Prompt | None:
    """Return what is left after a removal with its tokens; None if it is empty, or if the template refuses it: a tool's
    result may need its call."""
    if left.text is not None and not left.text.strip():
        return None
    try:
        read = with_image(model, left)
        return Prompt(ids=tuple(model.ids(read)), image=read.image)
    except InputError:
        if left.chat is None:
            raise
        return None


def sources_request(
    model: Model, answer: Answer | Chat, units: str, span: Span | None, with_question: bool = False
) -> SourcesRequest:
    """Find the sources in what was read before an answer. with_question: what the user asked is a source too.

    Raises `InputError` if the answer is empty or of another model, has no such span, or no source is before it.
    """
    if isinstance(answer, Chat):
        answer = answer_of(model, answer, len(answer.messages) - 1)
    if not isinstance(answer, Answer):
        raise InputError(f"{shown(answer)} is not an answer; get one from Model.answer, or pass a Chat that ends so.")
    answer.check(model)
    if not answer.ids:
        raise InputError("The answer is empty, so there is nothing to explain; give another prompt.")
    blurred = counterfactual_prompt(model, _read_prompt(answer), "blur", "").image if answer.image else None
    context = Context.of(answer.question or _text(model, answer), units, has_image=blurred is not None)
    every = [*context.sources, *(context.question if with_question else ())]
    pieces = model.pieces(answer.prompt_ids)
    tokens_of = [(source, _tokens_of(model, answer, context, source, pieces)) for source in every]
    readable = [(source, tokens) for source, tokens in tokens_of if tokens not in (None, UNREAD)]
    dropped = [source for source, tokens in tokens_of if tokens == UNREAD]
    if answer.dropped and answer.question:
        turn = len(answer.question.messages)
        dropped.append(ContextSource("assistant", turn, answer.dropped, 0, len(answer.dropped), "reasoning_content"))
    if not readable:
        raise InputError(
            "There is no source before the answer: the prompt has only the question. Give a text or a conversation "
            "that it is about."
        )
    spans = [answer.token_range(span)] if span is not None else _spans(answer)
    readable_sources, tokens = zip(*readable, strict=True)
    return SourcesRequest(answer, tuple(spans), context, readable_sources, tokens, tuple(dropped), blurred)


UNREAD = (0, 0)
"""The tokens of a source that the model did not read."""


def _tokens_of(
    model: Model, answer: Answer, context: Context, source: ContextSource, pieces: Sequence[str]
) -> tuple[int, int] | None:
    """Return the tokens [start, stop) of a source, of an image with what stands between its tiles; None if it cannot
    be removed."""
    if source.of == IMAGE:
        sign = model.net.config.image_token_id
        positions = [position for position, token in enumerate(answer.prompt_ids) if token == sign]
        return positions[0], positions[-1] + 1
    left = read_left(model, replace(Prompt.of(context.without([source])), image=answer.image))
    if left is None or left.ids is None:
        return None
    if left.ids == answer.prompt_ids:
        return UNREAD
    return _gone(answer.prompt_ids, left.ids, pieces, source.text)


def _read_prompt(answer: Answer) -> Prompt:
    return Prompt(ids=answer.prompt_ids, image=answer.image)


def _text(model: Model, answer: Answer) -> str:
    """Return the plain prompt of an answer as a text, without its image. Raises `InputError` if it does not have the
    same tokens."""
    signs = model.special_ids() if answer.image is None else {*all_special_ids(model), model.net.config.image_token_id}
    pieces = model.pieces(answer.prompt_ids)
    written = "".join(piece for token, piece in zip(answer.prompt_ids, pieces, strict=True) if token not in signs)
    for text in (written, written.removeprefix(" "), written.strip()):  # which some tokenizers, and images, add
        left = read_left(model, Prompt(text=text, image=answer.image)) if model.reads_any_text else None
        if left and left.ids == answer.prompt_ids:
            return text
    raise InputError("This prompt is not a text that can be tokenized anew; pass a text or a Chat to Model.answer.")


def _gone(ids: Sequence[int], without: Sequence[int], pieces: Sequence[str], text: str) -> tuple[int, int]:
    """Return the tokens [start, stop) of ids that are not in `without`, where the text begins with them.

    Where the same tokens stand before and behind what is gone, several spans are possible.
    """
    shortest = min(len(ids), len(without))
    start = common_length(ids, without)
    behind = next((at for at in range(shortest - start) if ids[-1 - at] != without[-1 - at]), shortest - start)
    stop = len(ids) - behind
    for moved in range(start + 1):
        begin, end = start - moved, stop - moved
        if text.strip().startswith("".join(pieces[begin:end]).strip()[: len(text.strip())]):
            return begin, end
        if ids[begin - 1] != ids[end - 1]:
            break
    return start, stop


def _spans(answer: Answer) -> list[tuple[int, int]]:
    """Return the tokens of each sentence and each call of a tool of an answer."""
    starts = [answer.tokens_at(start, start + 1)[0] for start in answer.calls]
    calls = list(pairwise([*starts, len(answer.ids)]))
    parts = units_of(answer.token_strings[: starts[0] if starts else None], (), None, "sentence")
    return [(part.start, part.stop) for part in parts if part.text.strip()] + calls or [(0, len(answer.ids))]


class SourceMeasurement:
    """The changes that are measured, in the order of the file's docstring."""

    def __init__(self, model: Model, request: SourcesRequest, seed: int) -> None:
        self.model, self.request, self.seed = model, request, seed
        self.answer_ids = request.answer.ids[: max(stop for _, stop in request.spans)]
        self.passes = Removals(model, self.answer_ids)
        self.changes: dict[Removed, Tensor] = {}
        """The change (spans,) without some sources."""
        self.base = torch.zeros(0)
        """The log-probability (spans,) with all sources."""
        self.relevance = torch.zeros(len(request.spans), len(request.sources))

    def measure(self, checkpoint: bool | None, on_progress: OnProgress, on_expected: OnExpected | None) -> None:
        spans = range(len(self.request.spans))
        if len(self.request.answer.prompt_ids) >= LONG:
            free_at_once()
        self.read()
        self._report_expected_seconds(on_expected)
        self.order(checkpoint)
        singles = {frozenset([index]) for span in spans for index in self._singles(span)}
        advance = counting(on_progress, len(singles) + SHOWN_SOURCES * len(spans))  # three more removals each
        self.remove(sorted(singles, key=min), advance)
        self.remove((removed for span in spans for removed in self._several(span)), advance)
        self.remove((removed for span in spans for removed in self._alone(span)), advance)

    def read(self) -> None:
        """Measure the log-probability with all sources."""
        [(_, values)] = self.passes.log_probabilities([_read_prompt(self.request.answer)])
        self.base = self._by_span(values)

    def _report_expected_seconds(self, on_expected: OnExpected | None) -> None:
        """Report how long it will take, by the first pass: a backward pass takes as long as two, and removals read what
        comes behind a source, half of the prompt on average."""
        spans, count = len(self.request.spans), len(self.request.sources)
        removals = spans * (min(count, REMOVED_SOURCES) + RANDOM_SOURCES + SHOWN_SOURCES)
        if on_expected:
            on_expected(self.passes.seconds * (3 + 2 * spans + min(removals, count + SHOWN_SOURCES * spans) / 2))

    def order(self, checkpoint: bool | None) -> None:
        """Sum the relevance over the tokens of each source. It decides what is removed, and what is a control."""
        prompt, image = self.request.answer.prompt_ids, self.request.answer.image
        batch, begins = answer_batch(self.model, [*prompt, *self.answer_ids], image), len(prompt)
        spans = [(begins + start, begins + stop) for start, stop in self.request.spans]
        values = span_relevance(self.model, batch, spans, CP_LRP, checkpoint)  # (spans, T)
        self.relevance = torch.stack([values[:, start:stop].sum(1) for start, stop in self.request.tokens], 1)

    def remove(self, removals: Iterable[Removed], advance: Callable[[int], None] = lambda steps: None) -> None:
        """Measure the changes that are not known yet."""
        new = [removed for removed in dict.fromkeys(removals) if removed not in self.changes]
        left = [(removed, read_left(self.model, self.request.without(removed))) for removed in new]
        readable = [(removed, prompt) for removed, prompt in left if prompt is not None]
        for index, values in self.passes.log_probabilities([prompt for _, prompt in readable]):
            self.changes[readable[index][0]] = self._by_span(values) - self.base
            advance(1)

    def _by_span(self, values: Tensor) -> Tensor:
        return torch.stack([values[start:stop].sum() for start, stop in self.request.spans])

    def change(self, span: int, removed: Iterable[int]) -> float | None:
        """Return the change without some sources, in nats; None if it was not measured."""
        change = self.changes.get(frozenset(removed))
        return None if change is None else change[span].item()

    def changes_of(self, span: int, indices: Iterable[int]) -> list[float]:
        """Return the changes without each of some sources that was measured."""
        changes = (self.change(span, [index]) for index in indices)
        return [change for change in changes if change is not None]

    # --- which sources are removed ----------------------------------------------------------------------

    def _by_relevance(self, span: int) -> list[int]:
        """Return the sources, the image first and then the largest relevance, without the question (its effect may be
        measured, too)."""
        ordered = self.relevance[span].argsort(descending=True, stable=True).tolist()
        of_text = [index for index in ordered if self.request.sources[index] not in self.request.context.question]
        image = self.request.image
        return of_text if image is None else [image, *(index for index in of_text if index != image)]

    def _largest(self, span: int) -> list[int]:
        """Return the sources with the largest relevance; half of a short context is left for controls."""
        ordered = self._by_relevance(span)
        return ordered[: min(REMOVED_SOURCES, len(ordered) - min(RANDOM_SOURCES, len(ordered) // 2))]

    def controls(self, span: int) -> list[int]:
        """Draw the controls from the others, before anything is removed."""
        others = sorted(self.request.controls - set(self._largest(span)))
        return random.Random(self.seed).sample(others, min(RANDOM_SOURCES, len(others)))

    def _singles(self, span: int) -> list[int]:
        return [*self._largest(span), *self.controls(span)]

    def _ranked(self, span: int) -> list[int]:
        """Return those of the largest that were removed, the largest loss first."""
        measured = [index for index in self._largest(span) if self.change(span, [index]) is not None]
        return sorted(measured, key=lambda index: self.change(span, [index]))  # type: ignore[arg-type,return-value]

    def _several(self, span: int) -> list[Removed]:
        """Return the first three together, all but these, and three random others together."""
        chosen, drawn = self._ranked(span)[:SHOWN_SOURCES], self.controls(span)
        others = set(range(len(self.request.sources))) - set(chosen)
        together = [drawn[: len(chosen)]] if len(drawn) >= len(chosen) else []
        return [frozenset(part) for part in (chosen, others, *together) if part]

    def _alone(self, span: int) -> list[Removed]:
        """Return what leaves each of the first three alone, where these stand in for each other."""
        if not self._are_interchangeable(span):
            return []
        chosen = self._ranked(span)[:SHOWN_SOURCES]
        return [frozenset(chosen) - {index} for index in chosen]

    def _are_interchangeable(self, span: int) -> bool:
        """Return whether the first three lose much more together than one at a time and than random ones together, and
        none of them alone stands out."""
        chosen, drawn = self._ranked(span)[:SHOWN_SOURCES], self.controls(span)[:SHOWN_SOURCES]
        together, random = self.change(span, chosen), self.change(span, drawn)
        if together is None or random is None or len(drawn) < SHOWN_SOURCES or self._is_decided(span):
            return False
        summed = losses([self._source(span, index) for index in chosen])
        return stands_out(together, [random]) and -together > TOGETHER * summed

    def _is_decided(self, span: int) -> bool:
        most = self.change(span, self._ranked(span)[:1])
        return most is not None and stands_out(most, self.changes_of(span, self.controls(span)))

    # --- what was measured ------------------------------------------------------------------------------

    def _source(self, span: int, index: int) -> MeasuredSource:
        source, (start, stop) = self.request.sources[index], self.request.tokens[index]
        change, relevance = self.changes[frozenset([index])][span].item(), self.relevance[span, index].item()
        characters = (source.start, source.stop) if source.of == "content" else None
        about = (source.message, start, stop, characters, source.of == IMAGE)
        return MeasuredSource(source.role, source.text, change, relevance, *about)

    def sentence(self, span: int) -> SourcedSentence:
        start, stop = self.request.spans[span]
        ranked, drawn = self._ranked(span), self.controls(span)
        chosen = ranked[:SHOWN_SOURCES]
        others = set(range(len(self.request.sources))) - set(chosen)
        is_control = len(drawn) >= len(chosen)
        return SourcedSentence(
            text="".join(self.request.answer.token_strings[start:stop]),
            start=start,
            stop=stop,
            log_probability=self.base[span].item(),
            sources=tuple(self._source(span, index) for index in ranked),
            together=self.change(span, chosen),
            only=self.change(span, others) if others else None,
            random=RandomRemovals(
                tuple(self.changes_of(span, drawn)),
                self.change(span, drawn[: len(chosen)]) if is_control else None,
                len({*self._largest(span), *drawn}) == len(self.request.sources),
            ),
            stand_in=self._stand_in_record(span, chosen),
        )

    def _stand_in_record(self, span: int, chosen: Sequence[int]) -> StandIn | None:
        if not self._are_interchangeable(span):
            return None
        alone = [self.change(span, set(chosen) - {index}) for index in chosen]
        changes = tuple(change for change in alone if change is not None)
        if not changes or len(changes) < len(chosen):
            return None
        together = self.change(span, chosen)
        assert together is not None
        return StandIn(changes, all(-change < SUFFICES * -together for change in changes))

    def affected(self, span: int, index: int) -> AffectedSentence:
        """Return what the removal of a source did to a sentence of the answer."""
        start, stop = self.request.spans[span]
        others = [number for number in self.controls(span) if number != index]
        text = "".join(self.request.answer.token_strings[start:stop])
        change, random = self.changes[frozenset([index])][span].item(), self.changes_of(span, others)
        return AffectedSentence(text, start, stop, self.base[span].item(), change, tuple(random))

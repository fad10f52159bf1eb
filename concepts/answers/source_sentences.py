"""What is said of the sources of an answer: the lines of a screen, which its page shows too."""

from __future__ import annotations

from collections.abc import Iterator

from icebear.concepts.answers.source_records import MeasuredSource, SourcedSentence, SourcesRecord, StandIn
from icebear.lines import Line
from icebear.render import visible

LONGEST = 240
"""Characters of a quoted text."""
SHOWN_SENTENCES = 12
"""Sentences of an answer on a screen."""


def source_lines(sources: SourcesRecord) -> list[Line]:
    """Return the lines of a screen."""
    lines = [Line(_heading(sources), "bold", indent=2)]
    lines += [Line(text, "dim", indent=2) for text in _about(sources)]
    for sentence in sources.sentences[:SHOWN_SENTENCES]:
        lines += [Line(""), *_sentence(sentence, sources)]
    more = len(sources.sentences) - SHOWN_SENTENCES
    if more > 0:
        lines.append(Line(f"{more} more sentences of the answer: --json has all, --span chooses one.", "dim"))
    return lines


def _heading(sources: SourcesRecord) -> str:
    of_text = sources.count - sources.has_image
    count = f"{of_text} {sources.units}{'' if of_text == 1 else 's'}{' and an image' * sources.has_image}"
    most = max((len(sentence.sources) for sentence in sources.sentences), default=0) - sources.has_image
    how = f"The {most} most relevant were removed" if most > 1 else "The most relevant was removed"
    how += ", one at a time" * (most > 1) + ", and the image was blurred" * sources.has_image
    how = how if most > 0 or not sources.has_image else "The image was blurred"
    text = f"Where did the answer come from? The context has {count}. {how}."
    return text if sources.is_complete else f"{text} Stopped before everything was measured."


def _about(sources: SourcesRecord) -> Iterator[str]:
    if sources.reader:
        yield f"The answer is read by {sources.reader}, which may not have written it."
    if sources.question:
        yield f"This stays in place, because the answer is about it: {quote(sources.question)}"
    for dropped in sources.dropped:
        yield f"The template drops this text of {dropped.role}, so the model did not read it: {quote(dropped.text)}"


def _sentence(sentence: SourcedSentence, sources: SourcesRecord) -> Iterator[Line]:
    yield Line(f"{quote(sentence.text)}  {sentence.probability():.2g} a token", "bold", indent=2)
    yield Line(finding(sentence, sources.units) if sources.is_complete else "Of what was removed so far:", indent=2)
    for source in sentence.leading:
        yield Line(f"  without {source.role}: {_named(source)}  {change_text(sentence, source.change)}", indent=4)
    if control := control_text(sentence, sources.units):
        yield Line(f"  [{control}]", "dim", indent=4)
    yield from (Line(f"  {text}", indent=4) for text in _together(sentence, sources.count))


def finding(sentence: SourcedSentence, unit: str) -> str:
    """Say on which source a sentence of the answer hangs, if it does on one."""
    if not sentence.sources:
        return "Nothing was measured."
    most = sentence.sources[0]
    if sentence.is_decided:
        return f"It hangs most on {_named(most)} ({most.role})."
    if sentence.stand_in:
        return f"It hangs on several {unit}s together; {stand_in_text(sentence.stand_in)}."
    if not sentence.random.singles:
        return f"There is no other {unit} as a control, so it is open what it hangs on."
    return f"It hangs on no single {unit}: no removal costs 1 nat more than every control."


def _named(source: MeasuredSource) -> str:
    return "the image (blurred)" if source.is_image else quote(source.text)


def stand_in_text(stand_in: StandIn) -> str:
    count = len(stand_in.alone)
    return f"each of the first {count} suffices" if stand_in.each_suffices else "they stand in for one another"


def change_text(sentence: SourcedSentence, change: float) -> str:
    """Say a change as probabilities a token, and in nats."""
    return f"{sentence.probability():.2g} -> {sentence.probability(change):.2g} a token ({change:+.1f} nats)"


def control_text(sentence: SourcedSentence, unit: str) -> str:
    """Say the control of single removals; empty where there is no other source."""
    singles, are_all = sentence.random.singles, sentence.random.are_all
    if not singles:
        return f"no other {unit} for a control"
    if len(singles) == 1:
        return f"control, {'the only' if are_all else 'one random'} other {unit}: {singles[0]:+.1f} nats"
    others = f"all {len(singles)} other {unit}s" if are_all else f"{len(singles)} random other {unit}s"
    return f"control, {others}, one at a time: {min(singles):+.1f} to {max(singles):+.1f} nats"


def _together(sentence: SourcedSentence, count: int) -> Iterator[str]:
    count_leading = len(sentence.leading)
    if count_leading < 2:
        return
    what = f"the first {count_leading}"
    if sentence.together is not None:
        random = sentence.random.together
        control = "too few others for a control" if random is None else f"control, as many others: {random:+.1f}"
        yield f"without {what}: {change_text(sentence, sentence.together)} [{control}]"
    if sentence.only is not None:
        yield f"with only {what} of {count}: {change_text(sentence, sentence.only)}"
    if sentence.stand_in:
        alone = ", ".join(f"{change:+.1f}" for change in sentence.stand_in.alone)
        yield f"with only one of the three left: {alone} nats"


def quote(text: str) -> str:
    """Return a text in quotes, in one line; the middle of a long one is left out."""
    plain = visible(" ".join(text.split()))
    cut = plain if len(plain) <= LONGEST else f"{plain[: LONGEST // 2]} ... {plain[-LONGEST // 2 :]}"
    return f"\u201c{cut}\u201d"

"""`icebear explain`: why the model predicts what it predicts. docs/changing.md lists the files that it runs through."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import click

import icebear
from icebear.app.cli.options import AttributionOptions, ModelOptions, exactly_one, is_given, option, record, verb
from icebear.app.cli.output import claim, show, write_page
from icebear.app.cli.progress import bar, waiting
from icebear.app.cli.stores import STORE_IF_ANY, store_if_any
from icebear.models.text.chat import Chat
from icebear.points import Naming

if TYPE_CHECKING:
    from icebear.concepts.answers.what_if import WhatIf
    from icebear.concepts.attribution.cases import Case

OF_SOURCES = (
    "prompt image chat system messages template_option sources units span answer max_new_tokens checkpoint html claim"
)
"""Options that act on the measurement of sources."""
WAYS = "--counterfactual for your own, --no-counterfactual for none"
WORD_WAYS = "--span for another word, --next-token for the first token"


@record
class _Attribution(AttributionOptions):
    target: str | None = option(
        "Token or label to explain; default: the likeliest, for a PROMPT alone the likeliest content word."
    )


@record
class Options:
    attribution: _Attribution
    site: str | None = option(show_default="ffn")
    position: Any
    top: int = option("Number of neurons to rank; the stages of a comparison do not use it.", default=10, type="count")
    sources: bool = option(
        "Generate an answer, and measure which sentences of the context it depends on, by removing each; removed "
        "random sentences are the control."
    )
    answer: int | None = option(
        "Explain this answer of the --messages, as it stands: the number of the assistant's message, from 1.",
        type="count",
        advanced=True,
    )
    details: bool = option(
        "With --sources, also show the relevance of tokens and neurons, and how much came from the template, the "
        "context, the question and the answer's earlier words.",
        advanced=True,
    )
    store: str = option(show_default=STORE_IF_ANY)
    html: str | None
    json: bool
    names: Naming
    file: str | None = option(
        "Read many prompts from this file instead of PROMPT, and show which heads and neurons they share; each line is "
        "a JSON object with a prompt, a counterfactual and, optionally, target and contrast.",
        type="file",
        advanced=True,
    )
    units: Literal["word", "sentence", "message", "document"] | None = option(
        "Sum the relevance of tokens by word, sentence, ...; with --sources, what is removed (no word).",
        show_default="token; sentence with --sources",
        advanced=True,
    )
    paraphrase: tuple[tuple[str, str], ...] = option(
        "Also measure the heads and neurons that compute the answer on another pair of prompts. You can give this "
        "option several times.",
        nargs=2,
        multiple=True,
        metavar="PROMPT OTHER",
        default=(),
        show_default=False,
        advanced=True,
    )
    next_token: bool = option(
        "For a PROMPT alone, explain the likeliest token, even if it is not a content word; with --chat, the first "
        "token of the answer.",
        advanced=True,
    )
    no_counterfactual: bool = option("Choose no counterfactual for a PROMPT alone.", advanced=True)
    png: str | None = option(advanced=True)
    claim: str | None
    model: ModelOptions


@verb(Options)
def explain(options: Options) -> None:
    """Explain the prediction after PROMPT.

    With --counterfactual, or one that icebear finds for a PROMPT alone, show how the answer is computed: the tokens
    that are read, the heads that move their information, and the neurons that write it; with --file, what many pairs
    share. Without it, show the tokens and neurons that contributed; with --base-model, the changed weights. With
    --chat or --span, explain words of the answer.

    Example:
      icebear explain "The capital of France is" --counterfactual "The capital of Japan is"
      icebear explain --chat "Where do ice bears live?" --span "the Arctic" --units sentence
    """
    if options.file:
        return _explain_task(options.file, options)
    attribution = _checked(options)
    if attribution.image and not attribution.alone and _explain_similarity(options):
        return None
    model, arguments = attribution.load_for_attribute(options.model, options.answer)
    if options.sources:
        return _explain_sources(options, model, arguments)
    from icebear.app.cli.tables.explanations import explanation_report, explanation_screen, units_table
    from icebear.explanation.sentences import chosen_sentence

    prompt = arguments["prompt"]
    exchanged = _what_if(options, model, prompt)
    chosen = exchanged.comparisons[0] if exchanged and exchanged.comparisons and not options.no_counterfactual else None
    answer_fields, about = ({}, []) if options.next_token or options.claim else _about_answer(prompt, exchanged)
    about += [f"{chosen_sentence(chosen.text, WAYS)}\n"] if chosen else []
    arguments |= exchanged.arguments(chosen) if exchanged else {}
    explanation = replace(_explained(options, model, arguments), what_if=exchanged)
    relevance = explanation.relevance
    write_page(options.html, explanation.to_html)
    write_page(options.png, lambda: relevance.image.png())  # type: ignore[union-attr]
    document = explanation.to_dict() | answer_fields
    units = icebear.units(relevance, options.units) if options.units else []
    has_tables = not explanation.stages and (options.units or not explanation.random_effects)
    report = explanation_report if has_tables else explanation_screen
    tables: list[Any] = [*about, report(explanation, units_table(units) if units else None)]
    if chosen:
        document["chosen_counterfactual"] = {**chosen.to_dict(), "text": chosen.text}
    if units:
        document["units"] = [{**vars(part), "relevance": value} for part, value in units]
    show(options.json, document, *tables, names=options.names)
    if options.claim:
        from icebear.claims.kinds.predictions import of_explanation

        claim(options.claim, model, lambda: of_explanation(model, explanation))
    if exchanged and not chosen and not options.json and is_terminal():
        _choose(options, model, arguments, exchanged)


def is_terminal() -> bool:
    """Return whether a person reads and types."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _choose(options: Options, model: icebear.Model, arguments: dict[str, Any], exchanged: WhatIf) -> None:
    """Explain the rows of the table that a person chooses, until none is."""
    from icebear.app.cli.tables.explanations import explanation_screen

    numbers = [str(number) for number in range(1, len(exchanged.shown) + 1)]
    question = f"Compare by a row (1 to {len(numbers)}, Enter for none)"
    while numbers and (answer := click.prompt(question, default="", show_default=False).strip()):
        if answer in numbers:
            row = exchanged.shown[int(answer) - 1]
            compared = _explained(options, model, {**arguments, **exchanged.arguments(row)})
            show(False, None, explanation_screen(compared), names=options.names)


def _only_named(options: Options, supported: str) -> bool:
    """Return whether the command line has only these options, and those of the model."""
    others = set(click.get_current_context().params) - {*supported.split(), *vars(options.model)}
    return not any(map(is_given, others))


def _has_image(prompt: Any) -> bool:
    return isinstance(prompt, Chat) and prompt.image is not None


def _is_alone(options: Options, model: icebear.Model) -> bool:
    """Return whether nothing but a text is explained, so that a comparison may be chosen for it."""
    from icebear.concepts.stages.stages import stage_sites

    chat = "chat system messages template_option"
    supported = f"prompt {chat} top store html json names claim paraphrase max_new_tokens next_token no_counterfactual"
    return _only_named(options, supported) and bool(stage_sites(model))


def _what_if(options: Options, model: icebear.Model, prompt: str | Chat) -> WhatIf | None:
    """Exchange the words of a text or chat that is explained alone, unless it is long."""
    from icebear.concepts.answers.what_if import exchange_words_if_short

    if not _is_alone(options, model) or _has_image(prompt):
        return None
    attribution = options.attribution
    with waiting("Exchanging words of the prompt"):
        next_token = _explains_next_token(options, model, prompt)
        exchanged = exchange_words_if_short(model, prompt, next_token, attribution.max_new_tokens)
    file = attribution.prompt.messages
    return replace(exchanged, file=file) if exchanged and file else exchanged


def _explains_next_token(options: Options, model: icebear.Model, prompt: str | Chat) -> bool:
    """Return whether the next token is explained: a claim is about no word of an answer."""
    from icebear.concepts.answers.what_if import is_message

    return options.next_token or (bool(options.claim) and (isinstance(prompt, Chat) or is_message(model, prompt)))


def _about_answer(prompt: str | Chat, exchanged: WhatIf | None) -> tuple[dict[str, Any], list[str]]:
    """Return what is said of the answer to a chat, or to a message that is given as a text: fields and sentences."""
    from icebear.explanation.sentences import answer_sentence, message_command, message_sentence

    if exchanged is None or exchanged.chat is None:
        return {}, []
    document = {"answer": exchanged.answer.text if exchanged.answer else ""}
    about = [f"{answer_sentence(exchanged, WORD_WAYS)}\n"]
    if isinstance(prompt, Chat):
        return document, about
    command = message_command(prompt)
    question = f"{message_sentence(prompt, '--chat')}\n  {command}\n"
    return {**document, "chat_command": command}, [question, *about]


def _explained(options: Options, model: icebear.Model, arguments: dict[str, Any]) -> icebear.Explanation:
    """Compute the relevance, and explain it."""
    from icebear.concepts.results.ranking import Ranking
    from icebear.explanation.explanation import CARDS, explain_relevance, relevance_of

    site = options.site or model.main_site
    relevance = relevance_of(model, site, **arguments)
    ranking = Ranking(options.top, site, position=options.position)
    has_page = bool(options.html or options.json)
    with store_if_any(options.store, model) as store, waiting("Measuring nodes and controls"):
        explanation = explain_relevance(
            model,
            relevance,
            ranking,
            store=store,
            cards=CARDS if has_page else 0,
            is_screen=not has_page and not options.claim,
        )
        return replace(explanation, transfers=_transfers(explanation, options.paraphrase))


def _transfers(
    explanation: icebear.Explanation, pairs: Sequence[tuple[str, str]]
) -> tuple[tuple[str, icebear.StageShares], ...]:
    """Measure the heads and neurons on other pairs. Raises `UsageError` without any."""
    stages = explanation.stages
    if pairs and (stages is None or not stages.heads):
        raise click.UsageError("--paraphrase needs heads that compute the answer; compare with --counterfactual.")
    return tuple((prompt, stages.transfer(prompt, other)) for prompt, other in pairs) if stages else ()


def _explain_sources(options: Options, model: icebear.Model, arguments: dict[str, Any]) -> None:
    """Measure what an answer hangs on; the breakdown of its relevance is in JSON, and on the screen with --details."""
    from icebear.app.cli.measured_sources import measured_sources
    from icebear.app.cli.tables.explanations import probabilities, screen
    from icebear.concepts.answers.source_sentences import source_lines

    answer, span = arguments["prompt"], options.attribution.span
    chosen = None if span == "all" else span
    checkpoint = arguments["checkpoint"]
    measured = measured_sources(model, answer, units=options.units or "sentence", span=chosen, checkpoint=checkpoint)
    write_page(options.html, measured.to_html)
    document, tables = measured.to_dict(), [probabilities(answer), "", screen(source_lines(measured))]
    if options.details or (options.json and answer.image is None):
        parts, reports = _breakdown(options, model, arguments)
        document, tables = {**parts, **document}, [*tables, *reports]
    show(options.json, document, *tables, names=options.names)
    if options.claim:
        from icebear.claims.kinds.sources import SourceClaim

        claim(options.claim, model, lambda: SourceClaim.of(measured, answer))


def _breakdown(options: Options, model: icebear.Model, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the relevance of tokens and neurons, and how much of an answer came from where, as a document and as
    tables."""
    from icebear.app.cli.tables.explanations import breakdown_report, explanation_report, matrix_report

    explanation = _explained(options, model, arguments)
    answer, checkpoint = arguments["prompt"], arguments["checkpoint"]
    compared = arguments["counterfactual"], checkpoint, arguments["contrast"]
    breakdown = icebear.source_breakdown(model, answer, arguments["span"], *compared)
    sentences = icebear.matrix(model, answer, checkpoint=checkpoint)
    tokens = zip(answer.ids, answer.token_strings, answer.probabilities, strict=True)
    rows = [{"id": id, "text": text, "probability": share} for id, text, share in tokens]
    document = {**explanation.to_dict(), "answer": answer.text, "ended": answer.ended, "answer_tokens": rows}
    document |= {"source_breakdown": breakdown.to_dict(), "sentences": sentences.to_dict()}
    return document, [explanation_report(explanation), breakdown_report(breakdown), matrix_report(sentences)]


def _explain_similarity(options: Options) -> bool:
    """Explain the similarity of a text and an image, if the model has a tower for each; return whether it has."""
    from icebear.concepts.similarity import TwoTowers, has_two_towers, similarity
    from icebear.models.loading.loading import device_of, dtype_of

    if not has_two_towers(options.model.model):
        return False
    prompt = options.attribution.prompt.prompt
    not_taken = map(is_given, ("device_map", "bits", "attention", "trust_remote_code", "config"))
    if prompt is None or any(not_taken) or not _only_named(options, "prompt image html png json names"):
        raise click.UsageError(
            f"{options.model.model} has a text tower and an image tower, whose similarity takes PROMPT, --image, "
            "--html, --png, --json, --device and --dtype; leave out the other options."
        )
    with waiting("Explaining the similarity"):
        device = device_of(options.model.device)
        towers = TwoTowers.load(options.model.model, dtype_of(options.model.dtype, device), device)
        result = similarity(towers, prompt, options.attribution.image)
    write_page(options.html, result.to_html)
    write_page(options.png, result.image.png)
    show(options.json, result.to_dict(), str(result), names=options.names)
    return True


def _explain_task(file: str, options: Options) -> None:
    """Explain what the pairs of prompts of a file share."""
    if not _only_named(options, "file target contrast counterfactual html json names claim"):
        raise click.UsageError(
            "--file can be combined only with --target, --contrast, one --counterfactual, --html, --json and --claim; "
            "leave out PROMPT and the other options."
        )
    from icebear.app.cli.tables.explanations import screen
    from icebear.concepts.stages.explained_task import check_count
    from icebear.concepts.stages.task_sentences import task_lines

    cases = _cases(file, options)
    check_count(len(cases), file)
    model = options.model.load()
    with bar("pairs") as move:
        task = icebear.explain_task(model, cases, on_progress=move)
    write_page(options.html, task.to_html)
    show(options.json, task.to_dict(), screen(task_lines(task)), names=options.names)
    if options.claim:
        from icebear.claims.kinds.predictions import TaskClaim

        claim(options.claim, model, lambda: TaskClaim.of(model, task))


def _cases(file: str, options: Options) -> list[Case]:
    """Read the pairs of a file. Raises `UsageError` for more counterfactuals than one for all of them."""
    from icebear.concepts.attribution.cases import read_cases

    attribution = options.attribution
    if attribution.prompt.prompt is not None or len(attribution.counterfactual) > 1:
        raise click.UsageError("--file replaces PROMPT; give at most one --counterfactual.")
    other = next(iter(attribution.counterfactual), None)
    values = {"target": attribution.target, "contrast": attribution.contrast, "counterfactual": other}
    return read_cases(file, needs_counterfactual=True, **values)


def _checked(options: Options) -> AttributionOptions:
    """Return what is explained. Raises `UsageError` where options do not go together."""
    attribution = options.attribution
    prompt, pairs = attribution.prompt, len(attribution.counterfactual)
    exactly_one({"a PROMPT": prompt.prompt, "--image": attribution.alone, "--messages": prompt.messages})
    if options.answer and not prompt.messages:
        raise click.UsageError("--answer is a message of a conversation; give --messages FILE.")
    if options.png and not attribution.image:
        raise click.UsageError("--png draws the relevance of an image; give --image.")
    if options.sources and attribution.alone:
        raise click.UsageError("--sources measures an answer to a text; give a PROMPT with --image.")
    if options.sources and options.units == "word":
        raise click.UsageError("--sources removes sentences, messages or documents; give one of these as --units.")
    if options.details and not options.sources:
        raise click.UsageError("--details shows more of --sources; add --sources.")
    if options.sources and not (options.details or options.json) and not _only_named(options, OF_SOURCES):
        raise click.UsageError("Without --details or --json, --sources takes no options of relevance; add --details.")
    if options.sources and pairs > 1:
        raise click.UsageError("--sources compares with one counterfactual prompt; give --counterfactual once.")
    if options.sources and pairs and attribution.contrast:
        raise click.UsageError("--sources takes --counterfactual or --contrast, not both.")
    has_answer = options.sources or options.answer
    return replace(attribution, span="all") if has_answer and attribution.span is None else attribution

"""`icebear explain`: why the model predicts what it predicts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.explained import Explained, position_of, recorded, usual_site
from icebear.app.cli.options import ModelOptions, exactly_one, option, record, shared, verb
from icebear.app.cli.output import print_json, stdout, write_page
from icebear.app.cli.progress import bar
from icebear.app.cli.stores import store_if_any
from icebear.extras import need

if TYPE_CHECKING:
    from icebear.concepts.attribution.matrix import Matrix
    from icebear.concepts.attribution.sources import Origins
    from icebear.concepts.circuits.graph import Graph
    from icebear.concepts.models.answer import Answer
    from icebear.concepts.models.model import Model


@record
class Options:
    explained: Explained
    site: str | None = shared(show_default="ffn")
    position: str | None
    top: int = shared(default=10)
    sources: bool = option(
        "Let the model answer, and show how much of the answer came from context, question and its own words.",
        False,
        is_flag=True,
    )
    suggest: bool = option("Suggest three prompts to compare with, as commands; some seconds.", False, is_flag=True)
    store: str
    html: str | None
    json: bool
    units: str | None = option(
        "Sum tokens to these.",
        type=click.Choice(["word", "sentence", "turn", "document"]),
        show_default="token",
        advanced=True,
    )
    nodes: int | None = shared(default=None, show_default="no circuit", advanced=True)
    png: str | None = shared(advanced=True)
    model: ModelOptions


@verb(Options)
def explain(options: Options) -> None:
    """Explain the prediction after PROMPT: the tokens and the neurons that contributed, with controls.

    With --counterfactual the difference to another prompt is explained, with --span words of the model's answer.
    --html writes the explanation as a page to mail, --png an image under its relevance.

    \b
    Example:
      icebear explain "The ice bear lives in the" --contrast " desert"
      icebear explain --chat "Where do ice bears live?" --span "the Arctic" --units sentence
    """
    from icebear.actmax.explanation import CARDS, controlled
    from icebear.app.cli.terminal import investigation, units_table
    from icebear.concepts.attribution.attribute import attribute
    from icebear.concepts.attribution.counterfactuals import suggest_counterfactuals
    from icebear.concepts.attribution.ranking import Ranking
    from icebear.concepts.attribution.units import units

    explained, position = _checked(options), position_of(options.position)
    model, arguments = explained.arguments(options.model)
    if options.nodes:
        graph = _circuit(model, arguments, options.nodes)
        relevance = graph.relevances[0]
    else:
        graph = None
        site = options.site or usual_site(model, arguments["method"])
        kept = recorded(site, options.top, None if explained.counterfactual else position or "last")
        relevance = attribute(model, **arguments, **kept)
    prompt, ranking = arguments["prompt"], Ranking(options.top, options.site or "ffn", position=position)
    with store_if_any(options.store, model) as store:
        cards = CARDS if options.html or options.json else 0
        explanation = controlled(model, prompt, relevance, ranking, store=store, graph=graph, cards=cards)
    sources = _sources(model, arguments) if options.sources else None
    if options.html:
        write_page(options.html, explanation.to_html())
    if options.png:
        write_page(options.png, relevance.image.png())  # type: ignore[union-attr]
    parts = units(relevance, options.units) if options.units else []
    suggestions = suggest_counterfactuals(model, explained.prompt.read()) if options.suggest else []
    if options.json:
        summed = {"units": [{**vars(part), "relevance": value} for part, value in parts]} if parts else {}
        suggested = {"suggestions": [vars(one) for one in suggestions]} if options.suggest else {}
        print_json({**explanation.to_dict(), **summed, **(sources.to_dict() if sources else {}), **suggested})
    else:
        stdout().print(investigation(explanation, units_table(parts) if parts else None))
        if sources:
            stdout().print(*sources.tables())
        for one in suggestions:
            command = shlex.join(["icebear", "explain", str(explained.prompt.prompt), "--counterfactual", one.text])
            click.echo(f"{command}  # {one.answer!r} {one.probability:.2f}")


def _checked(options: Options) -> Explained:
    """What is explained. Raises `UsageError` where options do not go together."""
    explained = options.explained
    prompt = explained.prompt
    exactly_one({"a PROMPT": prompt.prompt, "--image": explained.image, "--messages": prompt.messages})
    if options.png and not explained.image:
        raise click.UsageError("--png goes with --image.")
    if options.nodes and len(explained.counterfactual) != 1:
        raise click.UsageError("A circuit compares with one other prompt; give --counterfactual once.")
    if options.sources and len(explained.counterfactual) > 1:
        raise click.UsageError("--sources compares with one other prompt; give --counterfactual once.")
    if options.suggest and (explained.image or prompt.chat or prompt.system or prompt.messages):
        raise click.UsageError("--suggest is for a PROMPT that is no chat.")
    return replace(explained, span="all") if options.sources and explained.span is None else explained


def _circuit(model: Model, arguments: dict[str, Any], nodes: int) -> Graph:
    from icebear.concepts.circuits.circuit import circuit

    need("circuits")
    names = ("prompt", "target", "contrast", "counterfactual", "span")
    with bar("edges", 1) as move:
        return circuit(model, **{name: arguments[name] for name in names}, nodes=nodes, on_progress=move)


@dataclass(frozen=True)
class Sources:
    """Where an answer came from, and the sentences that each of its sentences rests on."""

    answer: Answer
    origins: Origins
    sentences: Matrix

    def to_dict(self) -> dict[str, Any]:
        tokens = zip(self.answer.ids, self.answer.token_strings, self.answer.probabilities, strict=True)
        return {
            "answer": self.answer.text,
            "ended": self.answer.ended,
            "answer_tokens": [{"id": id, "text": text, "probability": share} for id, text, share in tokens],
            "origins": self.origins.to_dict(),
            "sentences": self.sentences.to_dict(),
        }

    def tables(self) -> list[Any]:
        from icebear.app.cli.talking import matrix_table, origins_table, probabilities

        return [probabilities(self.answer), "", origins_table(self.origins), matrix_table(self.sentences)]


def _sources(model: Model, arguments: dict[str, Any]) -> Sources:
    from icebear.concepts.attribution.matrix import matrix
    from icebear.concepts.attribution.sources import origins

    answer, checkpoint = arguments["prompt"], arguments["checkpoint"]
    parts = origins(model, answer, arguments["span"], arguments["counterfactual"], checkpoint)
    return Sources(answer, parts, matrix(model, answer, checkpoint=checkpoint))

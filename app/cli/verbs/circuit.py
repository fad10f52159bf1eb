"""`icebear circuit`: the heads and neurons behind a difference between two prompts, and the edges between them."""

from __future__ import annotations

from typing import Any

import click

import icebear
from icebear.app.cli.options import ModelOptions, PromptOptions, answered, option, record, verb
from icebear.app.cli.output import claim, show, write_page
from icebear.app.cli.progress import bar, waiting
from icebear.app.cli.stores import STORE_IF_ANY, significant_labels, store_if_any
from icebear.errors import need
from icebear.models.text.chat import other_prompt
from icebear.points import Naming


@record
class Options:
    prompt: PromptOptions
    target: str | None
    contrast: str | None
    counterfactual: tuple[str, ...]
    span: str | None
    nodes: int | None = option(
        "Number of nodes (a node is a head or a neuron at a token) in the circuit.",
        type="count",
        show_default="the heads and neurons that explain shows",
    )
    no_heads: bool = option("Take only FFN neurons as nodes.")
    ablate: bool
    html: str | None
    png: str | None
    store: str = option(show_default=STORE_IF_ANY)
    json: bool
    names: Naming
    at: int | None
    max_new_tokens: int = option(advanced=True)
    claim: str | None
    model: ModelOptions


@verb(Options)
def circuit(options: Options) -> None:
    """Show how the heads and neurons that make the difference between two prompts affect each other.

    The prompts are PROMPT and --counterfactual.

    Example:
      icebear circuit "The capital of France is" --counterfactual "The capital of Japan is"
    """
    from icebear.app.cli.tables.cards import labels_table
    from icebear.app.cli.tables.nodes import circuit_report

    if len(options.counterfactual) != 1:
        raise click.UsageError(
            "A circuit needs one counterfactual prompt; give --counterfactual once, such as the same prompt with "
            "another name in it."
        )
    prompt = options.prompt.read()
    need("circuits")
    model = options.model.load()
    pair = _pair(model, prompt, options)
    how: dict[str, Any] = {"nodes": options.nodes, "heads": not options.no_heads}
    how["position"] = options.at
    with bar("edges") as move:
        graph = icebear.circuit(model, **pair, **how, on_progress=move)
    measured = None
    if options.ablate:
        with waiting("Measuring sufficiency and necessity"):
            hidden = graph.edge_check if not graph.edges else None
            measured = graph.ablation(), hidden or graph.faithfulness()
    signs = [(node.neuron, node.polarity) for node in graph.nodes]
    with store_if_any(options.store, model) as store:
        labels = significant_labels(store, signs)
    write_page(options.html, graph.to_html)
    write_page(options.png, graph.to_png)
    document = graph.to_dict()
    if labels:
        document["meanings"] = [label.to_dict() for label in labels]
    if measured:
        document |= {"ablation": vars(measured[0]), "faithfulness": vars(measured[1])}
    report = circuit_report(graph, measured, is_drawn=bool(options.png))
    show(options.json, document, report, *([labels_table(labels)] if labels else []), names=options.names)
    if options.claim:
        from icebear.claims.kinds.predictions import of_graph

        claim(options.claim, model, lambda: of_graph(model, graph, measured and measured[0]))


def _pair(model: icebear.Model, prompt: Any, options: Options) -> dict[str, Any]:
    other = other_prompt(prompt, options.counterfactual[0])
    if options.span:
        prompt = answered(model, prompt, options.max_new_tokens)
    span = None if options.span == "all" else options.span
    answers = {"target": options.target, "contrast": options.contrast}
    return {"prompt": prompt, "span": span, **answers, "counterfactual": other}

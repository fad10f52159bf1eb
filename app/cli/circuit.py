"""The verbs that draw how neurons make an answer together: circuit, story."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from icebear.app.cli.options import (
    CHAT,
    FILE,
    MODEL,
    conversation,
    known_of,
    likewise,
    load,
    options,
    print_json,
    stdout,
    store_if_any,
    taken,
    told_of,
    write_page,
)
from icebear.app.cli.progress import bar
from icebear.extras import need

if TYPE_CHECKING:
    from icebear.concepts.circuits.graph import Graph
    from icebear.concepts.models.model import Model


@click.command()
@click.argument("prompt", required=False)
@options("--target", "--contrast", "--counterfactual", "--file", *CHAT, "--span", "--max-new-tokens")
@options("--nodes")
@click.option("--faithfulness", type=float, help="Instead, the fewest nodes that carry such a share of the difference.")
@click.option("--heads", is_flag=True, help="Attention heads are nodes too.")
@options("--ablate", "--html", "--png")
@click.option("--neuronpedia", type=FILE, help="Write the graph's file for Neuronpedia and circuit-tracer.")
@options("--store", "--json", *MODEL)
def circuit(
    prompt: str | None,
    file: str | None,
    nodes: int,
    faithfulness: float | None,
    heads: bool,
    ablate: bool,
    html: str | None,
    png: str | None,
    neuronpedia: str | None,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """How the neurons make the difference between PROMPT and another prompt: which, and what they give each other.

    With --file one circuit of many pairs of prompts, all of one length; an object has a prompt, a counterfactual and,
    if wanted, a target and a contrast.

    \b
    Example:
      icebear circuit "The ice bear lives in the" --contrast " desert" --counterfactual "The wild camel lives in the"
      --nodes 20
    """
    from icebear.app.cli.terminal import circuit_tables, meanings

    asked = taken(given, ("--target", "--contrast", "--counterfactual", "--span", "--max-new-tokens"))
    asked["prompt"] = conversation(prompt, given)
    if (asked["prompt"] is None) is (file is None):
        raise click.UsageError("Give either a PROMPT, --messages or --file.")
    if file is None and len(asked["counterfactual"]) != 1:
        raise click.UsageError("A circuit compares with one other prompt; give --counterfactual once.")
    need("circuits")
    model = load(**given)
    with bar("edges", 1) as move:
        how = {"nodes": nodes, "faithfulness": faithfulness, "heads": heads, "on_progress": move}
        graph = _of_file(model, file, asked, how) if file else _of_prompt(model, asked, how)
    checked = _checked(graph) if ablate else {}
    fires = [(node.neuron, "-" if node.activation < (node.counterfactual or 0) else "+") for node in graph.nodes]
    with store_if_any(store_path, model) as store:
        known = known_of(store, fires)
    for path, content in (
        (html, graph.to_html),
        (png, graph.to_png),
        (neuronpedia, lambda: graph.to_neuronpedia(re.sub(r"[^A-Za-z0-9_.-]", "-", Path(neuronpedia or "").stem))),
    ):
        if path:
            write_page(path, content())
    if as_json:
        print_json({**graph.to_dict(), **told_of(known), **checked})
    else:
        stdout().print(circuit_tables(graph, **checked), *([meanings(known)] if known else []))


def _of_prompt(model: Model, asked: dict[str, Any], how: dict[str, Any]) -> Graph:
    from icebear.app.cli.explain import answered
    from icebear.concepts.circuits.circuit import circuit as run

    what = {"prompt": asked["prompt"]}
    if asked["span"]:
        what = answered(model, asked["prompt"], asked["span"], asked["max_new_tokens"])
    other = likewise(asked["prompt"], asked["counterfactual"][0])
    return run(model, target=asked["target"], contrast=asked["contrast"], counterfactual=other, **what, **how)


def _of_file(model: Model, file: str, asked: dict[str, Any], how: dict[str, Any]) -> Graph:
    from icebear.concepts.attribution.behaviour import read
    from icebear.concepts.circuits.circuit import circuit as run
    from icebear.errors import InputError

    cases = read(file)
    others: list[Any] = [case.counterfactual or (asked["counterfactual"] or (None,))[0] for case in cases]
    if None in others:
        raise InputError(f"A prompt of {file} has no counterfactual, and there is no --counterfactual; give one.")
    targets, contrasts = ([getattr(case, name) or asked[name] for case in cases] for name in ("target", "contrast"))
    return run(model, [case.prompt for case in cases], targets, contrasts, counterfactual=others, **how)


def _checked(graph: Graph) -> dict[str, Any]:
    """What was measured of this very graph."""
    return {
        "ablation": vars(graph.ablation()),
        "faithfulness": vars(graph.faithfulness()),
        "correlations": graph.correlations(),
    }


@click.command()
@click.argument("prompt", required=False)
@options("--target", "--contrast")
@options("--counterfactual", required=True)
@options(*CHAT)
@options("--nodes")
@options("--html", required=True)
@options("--store", "--json", *MODEL)
def story(
    prompt: str | None,
    target: str | None,
    contrast: str | None,
    counterfactual: tuple[str, ...],
    nodes: int,
    html: str,
    store_path: str,
    as_json: bool,
    **given: Any,
) -> None:
    """One page of how the answer to PROMPT comes about, to read and to mail: words, neurons, circuit, controls.

    What is said of neurons has beside it what as many others do. With a store there are cards as well.

    \b
    Example:
      icebear story "The ice bear lives in the" --counterfactual "The wild camel lives in the" --html story.html
    """
    from icebear.app.report.story import story as run

    asked = conversation(prompt, given)
    if asked is None:
        raise click.UsageError("Give either a PROMPT or --messages.")
    if len(counterfactual) > 1:
        raise click.UsageError("A story compares with one other prompt; give --counterfactual once.")
    need("circuits")
    model = load(**given)
    with store_if_any(store_path, model) as store, bar("edges", 1) as move:
        found = run(model, asked, likewise(asked, *counterfactual), target, contrast, nodes, store, move)
    write_page(html, found.to_html())
    if as_json:
        print_json(found.to_dict())


VERBS = (circuit, story)

"""`icebear demo`: why Paris, end to end, in a terminal: four screens, each with its control."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import icebear
from icebear.app.cli.options import record, verb
from icebear.app.cli.output import show, stdout
from icebear.app.cli.progress import waiting
from icebear.app.cli.streams import unfiltered
from icebear.errors import need

if TYPE_CHECKING:
    from rich.console import Console

PROMPT = "The capital of France is"
COUNTERFACTUAL = "The capital of Japan is"
WANTED = " Tokyo"
HEAD = "L23.head.4"
"""It moves the country to the last token."""
NEXT = f"""  icebear explain "Your own prompt"            compare it with a prompt that icebear chooses
  icebear circuit "{PROMPT}" --counterfactual "{COUNTERFACTUAL}" --html circuit.html
  icebear neuron L21.ffn.780                   show the sentences that activate a neuron
  icebear search "water"                       find neurons by words
  icebear steer "My friend lost" --edit "L21.ffn.780+5"
  icebear app                                  the same, with pictures
  icebear -h                                   list all commands"""


@record
class Options:
    json: bool


@verb(Options)
def demo(options: Options) -> None:
    """Explain why the model says Paris, and make it say Tokyo, in the terminal.

    Example:
      icebear demo
    """
    from icebear.app.cli.console import SafeConsole

    need("index")
    show(options.json, _run(SafeConsole(file=unfiltered(sys.stderr), highlight=False) if options.json else stdout()))


def _run(console: Console) -> dict[str, Any]:
    """Print each step on the console; return the results, JSON-ready."""
    from icebear.actmax.shipped.shipped_index import prepared_index
    from icebear.app.cli.tables.cards import card_report
    from icebear.app.cli.tables.explanations import explanation_screen
    from icebear.app.cli.tables.nodes import circuit_overview
    from icebear.app.cli.tables.steering import comparison_table, recipe_report
    from icebear.steering.comparison import compare
    from icebear.steering.outcome import outcome_of
    from icebear.steering.side_effects import HeldOutContexts

    model = icebear.load_model()
    console.rule("1. Why ' Paris', and not ' Tokyo'? A few heads and neurons at the last token")
    explanation = icebear.explain(model, PROMPT, contrast=WANTED, counterfactual=COUNTERFACTUAL)
    console.print(explanation_screen(explanation))

    console.rule("2. How do they work together?")
    graph = icebear.circuit(model, PROMPT, contrast=WANTED, counterfactual=COUNTERFACTUAL)
    console.print(circuit_overview(graph))

    console.rule(f"3. What does {HEAD} move? The sentences in which it writes most")
    ready = prepared_index(model.name)
    with nullcontext() if ready else waiting("Preparing the index that comes with icebear, once"):
        opened = icebear.shipped_store(model)
    with opened as store:
        card = icebear.describe(store, HEAD, model, k=4)
        console.print(card_report(card))

    console.rule(f"4. Is it causal? One edit that makes {WANTED!r} the next token")
    recipe = icebear.flip(model, PROMPT, WANTED, source=COUNTERFACTUAL)
    recipe = recipe.noting(**outcome_of(model, recipe, HeldOutContexts(model)).provenance())
    console.print(recipe_report(recipe))
    result = compare(model, PROMPT, recipe, 24)
    console.print(comparison_table(result))

    console.rule("Where to go next")
    console.print(NEXT, markup=False)
    return {
        "explanation": explanation.to_dict(),
        "circuit": graph.to_dict(),
        "card": card.to_dict(),
        "recipe": recipe.to_dict(),
        "steered": result.to_dict(),
    }

"""`icebear demo`: the ice bear, end to end, in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import icebear
from icebear.app.cli.options import record, verb
from icebear.app.cli.output import show, stdout
from icebear.app.cli.progress import annotating, indexing
from icebear.app.cli.streams import unfiltered
from icebear.app.example import COUNTERFACTUAL, NEURON, PROMPT, SOURCE, WANTED
from icebear.cache import cache_folder
from icebear.errors import need

if TYPE_CHECKING:
    from rich.console import Console

SUMMARIES = 300
"""Wikipedia summaries in the demo's index."""
NEXT = f"""  icebear circuit "{PROMPT}" --counterfactual "{COUNTERFACTUAL}" --html circuit.html
  icebear rank "Your own prompt"          rank the neurons behind another prediction
  icebear neuron L29.ffn.490              show what is known about a neuron
  icebear steer "{PROMPT}" --edit "L29.ffn.860*0"
  icebear flip "Your own prompt" --to " word"  find few edits that change the answer
  icebear search "water" --store {{store}}
  icebear -h                              list all commands"""


@record
class Options:
    json: bool


@verb(Options)
def demo(options: Options) -> None:
    """Run the ice bear example from explanation to steering, in the terminal.

    Example:
      icebear demo
    """
    from icebear.app.cli.console import SafeConsole

    need("index")
    show(options.json, _run(SafeConsole(file=unfiltered(sys.stderr), highlight=False) if options.json else stdout()))


def store_of(model: icebear.Model) -> Path:
    """The path of the demo's index of a model. `icebear app` uses it too, and builds it where it is missing."""
    from icebear.db.sqlite import VERSION

    return cache_folder() / f"demo-{Path(model.name).name}-{model.dtype_name}-{model.fingerprint[:6]}-v{VERSION}.db"


def _run(console: Console) -> dict[str, Any]:
    """Print each step on the console; return the results, JSON-ready."""
    from icebear.actmax.index.corpus import held_out
    from icebear.app.cli.tables.cards import card_report
    from icebear.app.cli.tables.explanations import explanation_screen
    from icebear.app.cli.tables.nodes import groups_table
    from icebear.app.cli.tables.steering import comparison_table, recipe_report
    from icebear.concepts.circuits.drawing import summary
    from icebear.steering.comparison import compare
    from icebear.steering.outcome import outcome_of
    from icebear.steering.side_effects import HeldOutContexts, side_effects

    model = icebear.load_model()
    console.rule(f"1. Why {WANTED!r} after a camel, and not after an ice bear?")
    explanation = icebear.explain(model, PROMPT, contrast=WANTED, counterfactual=COUNTERFACTUAL, with_circuit=True)
    console.print(explanation_screen(explanation))

    console.rule("2. How do these neurons work together?")
    circuit = explanation.circuit
    assert circuit is not None
    console.print(summary(circuit.graph), markup=False)
    console.print(groups_table(circuit.graph, circuit.without))

    console.rule(f"3. What activates {NEURON}? ({SUMMARIES} Wikipedia summaries)")
    corpus = icebear.read_corpus("wiki-summaries", limit=SUMMARIES)
    store_path = store_of(model)
    store_path.parent.mkdir(parents=True, exist_ok=True)
    indexing(model, corpus, str(store_path))
    with icebear.open_store(store_path) as store:
        annotating(model, store, [NEURON], 4)
        card = icebear.describe(store, NEURON, model, k=4)
        console.print(card_report(card))

    console.rule("4. Is it causal?")
    console.print(f"A small set of edits that makes {WANTED!r} the next token, as after {SOURCE!r}:")
    recipe = icebear.flip(model, PROMPT, WANTED, source=SOURCE)
    contexts = HeldOutContexts(model)
    effects = side_effects(model, recipe, perplexity_texts=held_out(), contexts=contexts)
    recipe = recipe.noting(**effects.provenance(), **outcome_of(model, recipe, contexts).provenance())
    console.print(recipe_report(recipe))
    result = compare(model, PROMPT, recipe, 24)
    console.print(comparison_table(result))

    console.rule("Where to go next")
    console.print(NEXT.format(store=store_path), markup=False)
    return {
        "explanation": explanation.to_dict(),
        "card": card.to_dict(),
        "recipe": recipe.to_dict(),
        "steered": result.to_dict(),
    }

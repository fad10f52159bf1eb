"""`icebear demo`: the ice bear, end to end, in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from icebear.actmax.card import describe
from icebear.actmax.explanation import explain
from icebear.app.cli.progress import annotating, indexing
from icebear.app.cli.terminal import (
    card,
    carried,
    groups_table,
    nodes_table,
    projection,
    recipe_table,
    side_by_side,
    token_relevance,
)
from icebear.cache import cache_folder
from icebear.concepts.circuits.drawing import summary
from icebear.concepts.corpus import held_out, read_corpus
from icebear.concepts.models.loading import load_model
from icebear.db.store import open_store
from icebear.records import Neuron
from icebear.steering.comparison import compare
from icebear.steering.flipping.search import flip
from icebear.steering.side_effects import side_effects

if TYPE_CHECKING:
    from rich.console import Console

    from icebear.concepts.models.model import Model

PROMPT, CONTRAST, SOURCE = "The ice bear lives in the", " desert", "The camel lives in the"
OTHER = "The wild camel lives in the"  # of as many tokens
NEURON, SUMMARIES = Neuron(29, "ffn", 860), 300


def store_of(model: Model) -> Path:
    """Where the demo's index of a model is; `icebear app` uses it too, and builds it where it is missing."""
    return cache_folder() / f"demo-{Path(model.name).name}-{model.dtype_name}-{model.fingerprint[:6]}.db"


def run(console: Console) -> dict[str, Any]:
    """Tells it on the console; what was found, JSON-ready."""
    model = load_model()
    console.rule("1. Why did the model say that?")
    console.print(token_relevance(explain(model, PROMPT, contrast=CONTRAST).relevance))

    console.rule("2. Which neurons made the difference to a camel, and what do they write?")
    explanation = explain(model, PROMPT, contrast=CONTRAST, counterfactual=OTHER, circuit_nodes=60)
    target = explanation.relevance.target_text
    console.print(nodes_table(explanation, f"FFN neurons for {target!r}, compared with {OTHER!r}"))
    console.print(carried(explanation.ablations))
    # The later the layer, the less stands between a neuron and the vocabulary.
    console.print(projection(max(explanation.projections, key=lambda result: result.neuron.layer)))

    console.rule("3. How do they make it together?")
    assert explanation.circuit is not None
    console.print(summary(explanation.circuit.graph), markup=False)
    console.print(groups_table(explanation.circuit.graph, explanation.circuit.without))

    console.rule(f"4. What drives {NEURON}? ({SUMMARIES} Wikipedia summaries)")
    corpus = read_corpus("wiki-summaries", limit=SUMMARIES)
    store_path = store_of(model)
    store_path.parent.mkdir(parents=True, exist_ok=True)
    indexing(model, corpus, str(store_path))
    with open_store(store_path) as store:
        annotating(model, store, [NEURON], 4)
        described = describe(store, NEURON, model, k=4)
        console.print(card(described))

    console.rule("5. Is it causal?")
    console.print(f"The fewest neurons found that make {CONTRAST!r} come next, as after {SOURCE!r}:")
    recipe = flip(model, PROMPT, CONTRAST, source=SOURCE)
    recipe = recipe.noting(**side_effects(model, recipe, held_out=held_out()).provenance())
    console.print(recipe_table(recipe))
    result = compare(model, PROMPT, recipe, 24)
    console.print(side_by_side(result))

    console.rule("Where to go next")
    console.print(
        f'  icebear circuit "{PROMPT}" --counterfactual "{OTHER}" --html circuit.html\n'
        '  icebear rank "Your own prompt"          the neurons behind another prediction\n'
        "  icebear neuron L29.ffn.490              what a neuron writes, both signs\n"
        f'  icebear steer "{PROMPT}" --edit "L29.ffn.860*0"\n'
        '  icebear flip "Your own prompt" --to " word"  the few neurons that would change it\n'
        f'  icebear search "water" --store {store_path}\n'
        "  icebear -h                              everything else"
    )
    return {
        "explanation": explanation.to_dict(),
        "card": described.to_dict(),
        "recipe": recipe.to_dict(),
        "steered": result.to_dict(),
    }

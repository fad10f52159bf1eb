"""The investigation that `icebear story` writes as a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from icebear.actmax.explanation import Explanation, controlled
from icebear.concepts.circuits.circuit import circuit

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model
    from icebear.concepts.models.prompts import PromptLike
    from icebear.db.store import Store


def story(
    model: Model,
    prompt: PromptLike,
    counterfactual: PromptLike,
    target: str | None = None,
    contrast: str | None = None,
    nodes: int = 60,
    store: Store | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """`icebear.explain` with a circuit, whose progress is shown. Raises `InputError`."""
    graph = circuit(
        model, prompt, target, contrast, counterfactual=counterfactual, nodes=nodes, on_progress=on_progress
    )
    return controlled(model, prompt, graph.relevances[0], store=store, graph=graph)

"""Plain and steered generation of one prompt, as data."""

from __future__ import annotations

from typing import Any

from concepts.models import Model
from steering.apply import Statistic, steer
from steering.recipe import Recipe


def compare(
    model: Model, prompt: str, edits: Recipe | list, max_new_tokens: int, statistic: Statistic | None = None
) -> dict[str, Any]:
    """The text and next-token probabilities without and with `edits`; JSON-ready."""

    def one() -> dict[str, Any]:
        text = model.generate(prompt, max_new_tokens)
        following = model.predict(prompt, 5)
        return {"first_token": following[0].text, "text": text, "next": [vars(token) for token in following]}

    plain = one()
    with steer(model, edits, statistic):
        steered = one()
    return {
        "model": {"name": model.name, "fingerprint": model.fingerprint},
        "prompt": prompt,
        "recipe": edits.name if isinstance(edits, Recipe) else None,
        "edits": [str(edit) for edit in edits],
        "plain": plain,
        "steered": steered,
    }

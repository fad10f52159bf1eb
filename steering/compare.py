"""Plain and steered generation of one prompt or chat, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import PromptLike
from icebear.concepts.models.provenance import provenance
from icebear.recipe import Recipe
from icebear.steering.apply import Statistic, steer
from icebear.steering.flipping.phrases import kept


def compare(
    model: Model,
    prompt: PromptLike,
    edits: Recipe | list,
    max_new_tokens: int,
    statistic: Statistic | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    on_token: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """The text and next-token probabilities without and with `edits`; JSON-ready.

    `next` has the five most probable tokens of each side, with their probabilities on both; on_token as in
    `Model.generate`, counting through both texts.
    """
    done = 0

    def counted(count: int) -> None:
        if on_token:
            on_token(done + count)

    def side(also: list[int]) -> dict[str, Any]:
        text = model.generate(prompt, max_new_tokens, temperature, seed, counted) if model.generates else None
        following = model.predict(prompt, 5, also)
        text = following[0].text if text is None else text  # what is predicted is all there is to see
        return {"first_token": following[0].text, "text": text, "next": [vars(token) for token in following]}

    plain = side([])
    done = max_new_tokens
    with steer(model, edits, statistic):
        steered = side([token["id"] for token in plain["next"]])
    plain["next"] = [vars(token) for token in model.predict(prompt, 5, [token["id"] for token in steered["next"]])]
    return {
        **provenance(model),
        "prompt": kept(prompt),
        "task": model.task.name,
        "recipe": edits.name if isinstance(edits, Recipe) else None,
        "edits": [str(edit) for edit in edits],
        "temperature": temperature,
        "seed": seed,
        "plain": plain,
        "steered": steered,
    }

"""`icebear evaluate flips`: how often, with how few neurons and at what price answers can be flipped."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icebear.concepts.evaluation import runner
from icebear.concepts.models.chat import Chat
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import PromptLike
from icebear.edits import Edit
from icebear.errors import IcebearError, InputError, RecipeError
from icebear.paths import read_text
from icebear.recipe import Recipe
from icebear.steering.apply import steer
from icebear.steering.flipping.phrases import asked_ids, comes, probability, wanted_ids
from icebear.steering.flipping.search import CHOOSERS, flip
from icebear.steering.side_effects import Neutral

REACHES = ("seen", "beyond")
"""Whether neurons stay inside what they were seen to be."""
MEDIANS = ("neurons", "after", "kl")
SPENT = (48, 96, 192, 288, 384, 480, 960)
"""Edited rows of the prompt after which flips are counted: 48 are a round."""


@dataclass(frozen=True)
class Pair:
    prompt: PromptLike
    to: str
    like: PromptLike | None = None


def read(path: str) -> list[Pair]:
    """A JSON list of objects with prompt, to and (if wanted) like; prompts are texts, or lists of a chat's messages.

    Raises `InputError`.
    """
    try:
        rows = json.loads(read_text(path))
        return [
            Pair(_prompt(row["prompt"]), str(row["to"]), _prompt(row["like"]) if row.get("like") is not None else None)
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} must be a JSON list of objects with prompt, to and like.") from None


def _prompt(given: Any) -> PromptLike:
    return list(Chat(given).messages) if isinstance(given, list) else str(given)


def run(
    model: Model,
    pairs: Sequence[Pair],
    folder: str | Path,
    max_neurons: int = 10,
    choosers: Sequence[str] = tuple(CHOOSERS),
    reaches: Sequence[str] = REACHES,
    on_progress: runner.OnProgress | None = None,
) -> list[dict[str, Any]]:
    """For each pair and reach: whether it flips, with how many neurons and at what price, with candidates found by
    relevance and by the controls of `icebear.steering.flipping.search.CHOOSERS`, which have the same search around
    them; recipes are kept in `folder` and checked as loaded from there.

    Interrupted, it goes on in its folder. Raises `InputError` where that holds others.
    """
    asked = {"pairs": [vars(pair) for pair in pairs], "max_neurons": max_neurons, "reaches": list(reaches)}
    settings = runner.facts(model, "flips", dict.fromkeys(choosers), **asked)
    neutral = Neutral(model)

    def measure(item: tuple[int, Pair]) -> dict[str, Any]:
        number, pair = item
        try:
            before = probability(model, [], pair.prompt, wanted_ids(model, pair.to, pair.prompt))
        except IcebearError as error:
            return {**vars(pair), "why": str(error), "runs": []}
        already = flips(model, pair, [])
        runs = [
            _run(model, pair, reach, choose, max_neurons, neutral, Path(folder) / f"{number:02d}")
            for reach in reaches
            for choose in choosers
            if not already
        ]
        return {**vars(pair), "before": before, "already": already, "runs": runs}

    return runner.run(folder, settings, list(enumerate(pairs)), measure, on_progress)


def _run(
    model: Model, pair: Pair, reach: str, choose: str, max_neurons: int, neutral: Neutral, path: Path
) -> dict[str, Any]:
    said = {"reach": reach, "chosen_by": choose}
    try:
        beyond = reach == "beyond"
        found = flip(model, pair.prompt, pair.to, pair.like, max_neurons, beyond=beyond, choose=choose)
    except IcebearError as error:
        return {**said, "flipped": False, "why": str(error)}
    kl = neutral.divergence(list(found))
    place = path.with_name(f"{path.name}-{reach}-{choose.replace(' ', '-')}.json")
    found.noting(price={"kl": kl}).save(place)
    recipe = Recipe.load(place)
    rounds = recipe.provenance["rounds"]
    after = probability(model, recipe, pair.prompt, wanted_ids(model, pair.to, pair.prompt))
    return {
        **said,
        "flipped": flips(model, pair, list(recipe)),
        "neurons": len(recipe),
        "after": after,
        "kl": kl,
        "rows": next((rows for rows, margin in rounds if margin > 0), rounds[-1][0]),
        "edits": [str(edit) for edit in recipe],
    }


def flips(model: Model, pair: Pair, edits: Sequence[Edit]) -> bool:
    return comes(model, edits, pair.prompt, wanted_ids(model, pair.to, pair.prompt))


def first_tokens(model: Model, recipe: Recipe) -> dict[str, Any]:
    """The first tokens after a flip's prompt with its edits, and whether it holds. Raises `RecipeError` for others."""
    told, phrase = recipe.provenance, asked_ids(model, recipe)
    away = told.get("away") is not None
    prompt: Any = told.get("prompt")
    top_k = told.get("top_k") if away else 1
    if not phrase or type(top_k) is not int or not 0 < top_k < model.answers:
        raise RecipeError(f"{recipe.name!r} was not made by flip, so there is nothing to check.")
    with steer(model, recipe):
        found = model.predict(prompt, top_k)
    holds = comes(model, recipe, prompt, phrase, top_k if away else None)
    return {"prompt": prompt, "holds": holds, "first": [vars(row) for row in found]}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, medians over what flipped, and flips by edited rows spent, for each reach and way of choosing."""
    asked = [line for line in lines if line["runs"]]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in asked:
        for row in line["runs"]:
            runs.setdefault((row["reach"], row["chosen_by"]), []).append(row)
    found: dict[str, dict[str, Any]] = {}
    for (reach, choose), rows in runs.items():
        done = [row for row in rows if row["flipped"]]
        medians = {f"median {key}": statistics.median(row[key] for row in done) if done else None for key in MEDIANS}
        spent = {str(most): sum(row["rows"] <= most for row in done) for most in SPENT}
        found.setdefault(reach, {})[choose] = {"flipped": len(done), **medians, "flipped by edited rows": spent}
    return {
        "pairs": len(asked),
        "left out, as the token was first already": sum(line.get("already", False) for line in lines),
        "left out, as it cannot be asked": sum("why" in line for line in lines),
        "reaches": found,
    }

"""`icebear evaluate flips`: how often, with how few neurons and at what price answers can be flipped."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from concepts.evaluation import runner
from concepts.models import Model
from db.errors import IcebearError, InputError, RecipeError
from db.records import Neuron
from steering.apply import steer
from steering.edits import Edit
from steering.flipping import flip, last_activations
from steering.price import Price, price
from steering.recipe import Recipe

MEDIANS = ("neurons", "before", "after", "rank before", "kl", "kl_everywhere", "perplexity", "perplexity_everywhere")


@dataclass(frozen=True)
class Pair:
    prompt: str
    to: str
    like: str | None = None


def read(path: str) -> list[Pair]:
    """A JSON list of objects with prompt, to and (if wanted) like. Raises `InputError`."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        return [
            Pair(str(row["prompt"]), str(row["to"]), str(row["like"]) if row.get("like") is not None else None)
            for row in rows
        ]
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} must be a JSON list of objects with prompt, to and like.") from None


def run(
    model: Model, pairs: Sequence[Pair], folder: str | Path, max_neurons: int = 10, held_out: Sequence[str] = (),
    on_progress: runner.OnProgress | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """For each pair: whether it flipped, with how many neurons, at what price, and whether controls of the same size
    flip it too; recipes are kept in `folder` and checked as loaded from there. held_out: as of `price`.

    Interrupted, it goes on in its folder. Raises `InputError` where that holds others.
    """
    asked = {"pairs": [vars(pair) for pair in pairs], "max_neurons": max_neurons, "held_out": list(held_out)}
    settings = runner.facts(model, "flips", {}, **asked)

    def measure(item: tuple[int, Pair]) -> dict[str, Any]:
        number, pair = item
        try:
            recipe = flip(model, pair.prompt, pair.to, pair.like, max_neurons)
            cost = price(model, recipe, held_out=held_out)
        except IcebearError as error:
            return {**vars(pair), "flipped": False, "why": str(error)}
        place = Path(folder) / f"{number:02d}.json"
        recipe.noting(price=cost.to_dict()).save(place)
        return {**vars(pair), **_line(model, pair, Recipe.load(place), cost, number)}

    return runner.run(folder, settings, list(enumerate(pairs)), measure, on_progress)


def _line(model: Model, pair: Pair, recipe: Recipe, cost: Price, number: int) -> dict[str, Any]:
    assert cost.new
    return {
        "flipped": flips(model, pair, list(recipe)),
        "already": not recipe,
        "neurons": len(recipe),
        "before": cost.new.before,
        "after": cost.new.after,
        "rank before": cost.new.rank_before,
        "kl": cost.kl,
        "kl_everywhere": cost.kl_everywhere,
        "perplexity": cost.perplexity,
        "perplexity_everywhere": cost.perplexity_everywhere,
        "random": flips(model, pair, random_control(model, recipe, seed=number)),
        "largest": flips(model, pair, largest_control(model, pair.prompt, recipe)),
        "edits": [str(edit) for edit in recipe],
    }


def flips(model: Model, pair: Pair, edits: Sequence[Edit]) -> bool:
    with steer(model, edits):
        return model.predict(pair.prompt, 1)[0].text == pair.to


def first_tokens(model: Model, recipe: Recipe) -> dict[str, Any]:
    """The first tokens after a flip's prompt with its edits, and whether it holds. Raises `RecipeError` for others."""
    told = recipe.provenance
    prompt, to, away, top_k = (told.get(key) for key in ("prompt", "to", "away", "top_k"))
    if away is None:
        top_k = 1
    known = isinstance(prompt, str) and isinstance(to if away is None else away, str)
    if not known or type(top_k) is not int or not 1 <= top_k < model.answers:
        raise RecipeError(f"{recipe.name!r} was not made by flip, so there is nothing to check.")
    with steer(model, recipe):
        found = model.predict(prompt, top_k)
    texts = [token.text for token in found]
    holds = to in texts if away is None else away not in texts
    return {"prompt": prompt, "holds": holds, "first": [vars(token) for token in found]}


def random_control(model: Model, recipe: Recipe, seed: int = 0) -> list[Edit]:
    """As many random neurons of the same layers, at the same strengths."""
    generator = random.Random(seed)
    width = model.width("ffn")
    return [replace(edit, neuron=replace(edit.neuron, index=generator.randrange(width))) for edit in recipe]


def largest_control(model: Model, prompt: str, recipe: Recipe) -> list[Edit]:
    """As many neurons as are most active at the last token, switched off."""
    now = last_activations(model, prompt).abs()
    places = [divmod(flat, now.shape[1]) for flat in now.flatten().topk(len(recipe)).indices.tolist()]
    return [Edit(Neuron(layer, "ffn", index), "set", 0.0, where="last") for layer, index in places]


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts and medians of `run`."""
    asked = [line for line in lines if not line.get("already")]
    done = [line for line in asked if line["flipped"]]

    def median(key: str) -> float | None:
        return statistics.median(line[key] for line in done) if done else None

    return {
        "pairs": len(asked),
        "flipped": len(done),
        "flipped by as many random neurons": sum(line.get("random", False) for line in asked),
        "flipped by switching off as many of the most active": sum(line.get("largest", False) for line in asked),
        **{f"median {key}": median(key) for key in MEDIANS},
        "left out, as the token was first already": len(lines) - len(asked),
    }

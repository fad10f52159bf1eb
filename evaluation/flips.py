"""Measure how often answers flip, with how few neurons and at what side effects."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

import torch

from icebear.edits import Edit
from icebear.errors import IcebearError, InputError
from icebear.evaluation.protocol import Evaluation, Line, Lines, Part, Setting
from icebear.models.model import Model
from icebear.models.objective import likelier_form
from icebear.models.text.chat import Chat
from icebear.models.text.prompts import PromptLike, prompt_line
from icebear.paths import read_text
from icebear.recipe import Recipe
from icebear.steering.flipping.flip import (
    Choice,
    FlipRequest,
    SearchState,
    flip_by,
)
from icebear.steering.flipping.last_token import Edits
from icebear.steering.flipping.phrases import flip_holds, phrase_probability, wanted_ids
from icebear.steering.side_effects import HeldOutContexts

METRICS = {"flipped": "share of the pairs that flip"}
MEDIANS = ("edits", "after", "off_target_kl")


def at_random(state: SearchState, edits: Edits, seed: int) -> Choice:
    """Score at random, in either direction, anew in each round."""
    drawn = zlib.crc32(repr((seed, sorted(edits.items()))).encode())  # the same on every machine
    generator = torch.Generator().manual_seed(drawn)
    limits = state.limits(torch.rand(state.now.shape, generator=generator) < 0.5)
    moves = (limits != state.activations(edits)).float()
    return moves * (1e-6 + torch.rand(state.now.shape, generator=generator)), limits


HEADS = "heads, then neurons"
"""The search of `flip`."""
NEURONS = "neurons"
RANDOM = "random candidates"
"""The search of `flip`, with random candidates, the same limits and the same budget."""
SEARCHES: dict[str, dict[str, Any]] = {
    HEADS: {},
    NEURONS: {"heads": False},
    RANDOM: {"ways": (partial(at_random, seed=0),)},
}


@dataclass(frozen=True)
class FlipPair:
    prompt: PromptLike
    to: str
    source: PromptLike | None = None


@dataclass(frozen=True)
class Flips(Evaluation):
    """Measure how often answers flip, with how few heads or neurons, with side effects and controls.

    --data is a JSON list of objects with prompt, to and source. The recipes are saved in --out as well.

    Example:
      icebear evaluate flips --data flips.json --out flips
    """

    name: ClassVar = "flips"
    data: Annotated[str, Setting("Your own file to evaluate on.", is_file=True, decides=False)]
    max_neurons: Annotated[int, Setting()] = 10

    def parts(self, model: Model) -> Iterator[Part]:
        pairs, contexts = read_flips(self.data), HeldOutContexts(model)
        yield Part(
            METRICS,
            pairs,
            lambda pair: try_flips(model, pair, self.max_neurons, contexts),
            methods={search: search for search in SEARCHES},
            settings={"pairs": [vars(pair) for pair in pairs]},
            listings=listings,
            write=write_recipes,
        )


def read_flips(path: str) -> list[FlipPair]:
    """Read a JSON list of objects with prompt, to and (if wanted) source. Raises `InputError`.

    Prompts are texts, or lists of a chat's messages.
    """
    try:
        rows = [(row["prompt"], str(row["to"]), row.get("source")) for row in json.loads(read_text(path))]
        return [FlipPair(_prompt(prompt), to, source and _prompt(source)) for prompt, to, source in rows]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} must be a JSON list of objects with prompt, to and source.") from None


def _prompt(prompt: Any) -> PromptLike:
    return list(Chat(prompt).messages) if isinstance(prompt, list) else str(prompt)


def try_flips(model: Model, pair: FlipPair, max_neurons: int, contexts: HeldOutContexts) -> Line:
    """Return whether a pair flips by each of `SEARCHES`, with how many neurons and at what off-target KL."""
    try:
        pair = replace(pair, to=likelier_form(model, pair.prompt, pair.to))
        before = phrase_probability(model, [], pair.prompt, wanted_ids(model, pair.to, pair.prompt))
    except IcebearError as error:
        return {**vars(pair), "why": str(error), "runs": [], "counts": False}
    already = flips(model, pair, [])
    searches = [] if already else SEARCHES
    runs = [{"search": search, **_try_flip(model, pair, search, max_neurons, contexts)} for search in searches]
    methods = {run["search"]: {"flipped": float(run["flipped"])} for run in runs}
    line = {**vars(pair), "before": before, "already": already, "runs": runs}
    return {**line, "counts": bool(runs), "methods": methods}


def _try_flip(model: Model, pair: FlipPair, search: str, max_neurons: int, contexts: HeldOutContexts) -> dict[str, Any]:
    request = FlipRequest(model, pair.prompt, pair.to, pair.source, max_neurons, **SEARCHES[search])
    try:
        recipe = flip_by(request)
    except IcebearError as error:
        return {"flipped": False, "why": str(error)}
    kl = contexts.off_target_kl(list(recipe))
    recipe = Recipe.from_json(recipe.noting(kl=kl).to_json())  # the recipe of a saved file is judged
    return {
        "flipped": flips(model, pair, recipe.neuron_edits()),
        "edits": len(recipe),
        "heads": sum(edit.source is not None for edit in recipe.neuron_edits()),
        "after": phrase_probability(model, recipe, pair.prompt, wanted_ids(model, pair.to, pair.prompt)),
        "off_target_kl": kl,
        "recipe": recipe.to_dict(),
    }


def flips(model: Model, pair: FlipPair, edits: Sequence[Edit]) -> bool:
    return flip_holds(model, edits, pair.prompt, wanted_ids(model, pair.to, pair.prompt))


def write_recipes(folder: Path, lines: Lines) -> None:
    for number, line in enumerate(lines):
        for run in line["runs"]:
            if "recipe" in run:
                name = f"{number:02d}-{run['search'].replace(', ', '-').replace(' ', '-')}.json"
                Recipe.from_dict(run["recipe"]).save(folder / name, overwrite=True)


def listings(lines: Lines) -> dict[str, list[dict[str, Any]]]:
    """Return the flips of each pair by the search of `flip`, medians over all flips, and counts of pairs."""
    flipped = [
        {
            "prompt": prompt_line(line["prompt"]),
            "to": line["to"],
            "search": run["search"],
            "flipped": run["flipped"],
            "heads": run.get("heads"),
            **{name: run.get(name) for name in MEDIANS},
            "before": line["before"],
        }
        for line in lines
        for run in line["runs"]
        if run["search"] in (HEADS, NEURONS)
    ]
    counts = {
        "pairs": sum(bool(line["runs"]) for line in lines),
        "left out, as the token was first already": sum(line.get("already", False) for line in lines),
        "left out, as it cannot be asked": sum("why" in line for line in lines),
    }
    return {"flips": flipped, "medians over flips": flip_medians(lines), "pairs": [counts]}


def flip_medians(lines: Lines) -> list[dict[str, Any]]:
    """Return a row for each search: how many pairs flip, how many of them by heads, and medians over flips."""
    rows = []
    for search in SEARCHES:
        done = [run for line in lines for run in line["runs"] if run["search"] == search and run["flipped"]]
        medians = {f"median {name}": median(run[name] for run in done) if done else None for name in MEDIANS}
        by_heads = sum(bool(run["heads"]) for run in done)
        rows.append({"search": search, "flipped": len(done), "by heads": by_heads, **medians})
    return rows

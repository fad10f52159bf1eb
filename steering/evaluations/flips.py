"""Evaluation: how often, with how few neurons and at what side effects answers can be flipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar

from icebear.concepts.evaluation.protocol import Evaluation, Line, Lines, Option, Part
from icebear.concepts.models.chat import Chat
from icebear.concepts.models.model import Model
from icebear.concepts.models.prompts import PromptLike
from icebear.edits import Edit
from icebear.errors import IcebearError, InputError, RecipeError
from icebear.paths import read_text
from icebear.recipe import Recipe
from icebear.steering.apply import steer
from icebear.steering.flipping.phrases import comes, in_a_line, probability, wanted_ids
from icebear.steering.flipping.record import FlipRecord
from icebear.steering.flipping.search import CHOOSERS, flip
from icebear.steering.side_effects import HeldOutContexts

REACHES = ("seen", "unbounded")
"""Whether neurons stay inside what they were seen to be."""
COLUMNS = {"flipped": "share of the pairs that flip"}
MEDIANS = ("neurons", "after", "kl")
SPENT = (48, 96, 192, 288, 384, 480, 960)
"""Edited rows of the prompt after which flips are counted: 48 are a round."""


@dataclass(frozen=True)
class FlipPair:
    prompt: PromptLike
    to: str
    source: PromptLike | None = None


@dataclass(frozen=True)
class Flips(Evaluation):
    """How often answers flip, inside the neurons' activation range and beyond, the side effects, and controls.

    --data is a JSON list of objects with prompt, to and source; the recipes are kept in --out as well.

    Example:
      icebear evaluate flips --data flips.json --out flips
    """

    name: ClassVar = "flips"
    data: Annotated[str, Option("A file of your own to evaluate on.", is_file=True, decides=False)]
    max_neurons: Annotated[int, Option()] = 10
    no_source: Annotated[bool, Option("Without the source prompts.", decides=False)] = False
    controls: Annotated[
        bool,
        Option("Candidates by gradient, distance, activation and chance too, with the same search.", decides=False),
    ] = True

    def parts(self, model: Model) -> Iterator[Part]:
        pairs = [replace(pair, source=None) if self.no_source else pair for pair in read(self.data)]
        choosers, neutral = list(CHOOSERS)[: None if self.controls else 1], HeldOutContexts(model)
        yield Part(
            COLUMNS,
            pairs,
            lambda pair: sample(model, pair, choosers, self.max_neurons, neutral),
            methods={f"{choose}, {reach}": choose for reach in REACHES for choose in choosers},
            settings={"pairs": [vars(pair) for pair in pairs], "reaches": list(REACHES)},
            listings=listings,
            write=write_recipes,
        )


def read(path: str) -> list[FlipPair]:
    """A JSON list of objects with prompt, to and (if wanted) source; prompts are texts, or lists of a chat's messages.

    Raises `InputError`.
    """
    try:
        rows = json.loads(read_text(path))
        return [
            FlipPair(
                _prompt(row["prompt"]), str(row["to"]), None if row.get("source") is None else _prompt(row["source"])
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path} must be a JSON list of objects with prompt, to and source.") from None


def _prompt(prompt: Any) -> PromptLike:
    return list(Chat(prompt).messages) if isinstance(prompt, list) else str(prompt)


def sample(model: Model, pair: FlipPair, choosers: Sequence[str], max_neurons: int, neutral: HeldOutContexts) -> Line:
    """Whether a pair flips, with how many neurons and at what off-target KL, with candidates by relevance and by the
    controls of `icebear.steering.flipping.search.CHOOSERS`, which have the same search around them."""
    try:
        before = probability(model, [], pair.prompt, wanted_ids(model, pair.to, pair.prompt))
    except IcebearError as error:
        return {**vars(pair), "why": str(error), "runs": [], "counts": False}
    already = flips(model, pair, [])
    runs = [
        {"reach": reach, "chosen_by": choose, **_run(model, pair, reach, choose, max_neurons, neutral)}
        for reach in REACHES
        for choose in choosers
        if not already
    ]
    methods = {f"{run['chosen_by']}, {run['reach']}": {"flipped": float(run["flipped"])} for run in runs}
    line = {**vars(pair), "before": before, "already": already, "runs": runs}
    return {**line, "counts": bool(runs), "methods": methods}


def _run(
    model: Model, pair: FlipPair, reach: str, choose: str, max_neurons: int, neutral: HeldOutContexts
) -> dict[str, Any]:
    try:
        unbounded = reach == "unbounded"
        recipe = flip(model, pair.prompt, pair.to, pair.source, max_neurons, unbounded=unbounded, choose=choose)
    except IcebearError as error:
        return {"flipped": False, "why": str(error)}
    kl = neutral.divergence(list(recipe))
    recipe = Recipe.from_json(recipe.noting(kl=kl).to_json())  # judged is what a file of it says
    record = FlipRecord.of(recipe)
    assert record is not None
    rounds = record.rounds
    return {
        "flipped": flips(model, pair, list(recipe)),
        "neurons": len(recipe),
        "after": probability(model, recipe, pair.prompt, wanted_ids(model, pair.to, pair.prompt)),
        "kl": kl,
        "rows": next((rows for rows, margin in rounds if margin > 0), rounds[-1][0]),
        "recipe": recipe.to_dict(),
    }


def flips(model: Model, pair: FlipPair, edits: Sequence[Edit]) -> bool:
    return comes(model, edits, pair.prompt, wanted_ids(model, pair.to, pair.prompt))


def first_tokens(model: Model, recipe: Recipe) -> dict[str, Any]:
    """The first tokens after a flip's prompt with its edits, and whether it holds. Raises `RecipeError` for others."""
    record = FlipRecord.of(recipe)
    if not record:
        raise RecipeError(f"{recipe.name!r} was not made by flip, so there is nothing to check.")
    record.check(model)
    with steer(model, recipe):
        first = model.predict(record.prompt, record.top_k or 1)
    holds = comes(model, recipe, record.prompt, record.phrase, record.top_k)
    return {"prompt": record.prompt, "holds": holds, "first": [vars(row) for row in first]}


def write_recipes(folder: Path, lines: Lines) -> None:
    for number, line in enumerate(lines):
        for run in line["runs"]:
            if "recipe" in run:
                name = f"{number:02d}-{run['reach']}-{run['chosen_by'].replace(' ', '-')}.json"
                Recipe.from_json(json.dumps(run["recipe"])).save(folder / name)


def listings(lines: Lines) -> dict[str, list[dict[str, Any]]]:
    """What candidates by relevance did to each pair; and medians over what flipped, and how many flipped after so many
    edited rows, for each reach and way of choosing candidates."""
    flipped = [
        {
            "prompt": in_a_line(line["prompt"]),
            "to": line["to"],
            "reach": run["reach"],
            "flipped": run["flipped"],
            **{name: run.get(name) for name in ("neurons", "after", "kl", "rows")},
            "before": line["before"],
        }
        for line in lines
        for run in line["runs"]
        if run["chosen_by"] == next(iter(CHOOSERS))
    ]
    return {"flips": flipped, "medians over what flipped": summary(lines), "pairs": [_counts(lines)]}


def _counts(lines: Lines) -> dict[str, int]:
    return {
        "pairs": sum(bool(line["runs"]) for line in lines),
        "left out, as the token was first already": sum(line.get("already", False) for line in lines),
        "left out, as it cannot be asked": sum("why" in line for line in lines),
    }


def summary(lines: Lines) -> list[dict[str, Any]]:
    """A row for each reach and way of choosing candidates."""
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for line in lines:
        for run in line["runs"]:
            runs.setdefault((run["reach"], run["chosen_by"]), []).append(run)
    rows = []
    for (reach, choose), tried in runs.items():
        done = [run for run in tried if run["flipped"]]
        medians = {f"median {name}": median(run[name] for run in done) if done else None for name in MEDIANS}
        spent = {f"within {most} rows": sum(run["rows"] <= most for run in done) for most in SPENT}
        rows.append({"reach": reach, "chosen_by": choose, "flipped": len(done), **medians, **spent})
    return rows

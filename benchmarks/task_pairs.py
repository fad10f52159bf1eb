"""Pairs of prompts that differ in what decides the answer: from templates, or from a file."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from pathlib import Path
from typing import Annotated

import torch

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.method import Method
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.evaluation.protocol import Setting
from icebear.models.model import Model
from icebear.models.objective import objective_of
from icebear.paths import read_text
from icebear.values import one_of

log = logging.getLogger("icebear")

Pairs = Annotated[int, Setting("Number of pairs of prompts for each task.", least=1)]
Tasks = Annotated[str, Setting("Separated by commas: simple, phrase, across-clause, capitals, ...", decides=False)]
MARGIN = 0.5
"""The least logit difference by which a model must be right on both prompts."""
LEXICON = json.loads(Path(__file__).with_name("task_pairs.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Pair:
    """A prompt and its answer, and the counterfactual prompt and its answer."""

    prompt: str
    counterfactual: str
    answer: str
    counterfactual_answer: str


def _agreement(frames: Sequence[str], nouns: Sequence[Sequence[str]]) -> list[Pair]:
    """Return pairs of a plural and a singular subject in each frame."""
    filled = product(frames, nouns)
    return [Pair(frame.format(plural), frame.format(noun), " are", " is") for frame, (noun, plural) in filled]


def _within_a_clause() -> list[Pair]:
    """Return pairs that differ in the subject of a relative clause."""
    pairs = []
    for number, (thing, (noun, nouns)) in enumerate(product(LEXICON["objects"], LEXICON["people"])):
        plural, singular = LEXICON["verbs"][number % len(LEXICON["verbs"])]
        prompt, other = (f"The {thing} that the {form}" for form in (nouns, noun))
        pairs.append(Pair(prompt, other, f" {plural}", f" {singular}"))
    return pairs


def _across_a_clause() -> list[Pair]:
    """Return pairs that have a relative clause between the subject and its verb."""
    pairs = []
    for subject, (noun, nouns), (plural, singular) in product(LEXICON["people"], LEXICON["people"], LEXICON["verbs"]):
        if subject[0] != noun:
            frames = [f"The {{}} that the {noun} {singular}", f"The {{}} that the {nouns} {plural}"]
            pairs += _agreement(frames, [subject])
    return pairs


def _indirect_object() -> list[Pair]:
    """Return pairs in which one of two people gives a thing to the other."""
    pairs = []
    for thing, (a, b) in product(LEXICON["gifts"], permutations(LEXICON["names"], 2)):
        start = f"When {a} and {b} went to the store,"
        pairs.append(Pair(f"{start} {b} gave {thing} to", f"{start} {a} gave {thing} to", f" {a}", f" {b}"))
    return pairs


def _greater_than() -> list[Pair]:
    """Return pairs about an end year with a larger third digit than the start year."""
    pairs = []
    for thing, century, late, early, last in product(LEXICON["events"], (16, 17, 18), (6, 7, 8), (1, 2, 3), (2, 5)):
        start, end = f"The {thing} lasted from the year {century}", f"{last} to the year {century}"
        pairs.append(Pair(f"{start}{late}{end}", f"{start}{early}{end}", str(late + 1), str(early + 1)))
    return pairs


def _looked_up(frame: str, known: Mapping[str, str], space: str = " ") -> list[Pair]:
    """Return pairs of words in a frame. space: what stands before an answer."""
    answers = {word: space + answer for word, answer in known.items()}
    return [Pair(frame.format(a), frame.format(b), answers[a], answers[b]) for a, b in permutations(known, 2)]


TASKS: dict[str, list[Pair]] = {
    "simple": _agreement(LEXICON["starts"], LEXICON["nouns"]),
    "phrase": _agreement(LEXICON["phrases"], LEXICON["nouns"]),
    "within-clause": _within_a_clause(),
    "across-clause": _across_a_clause(),
    "indirect-object": _indirect_object(),
    "greater-than": _greater_than(),
    "capitals": _looked_up("The capital of {} is", LEXICON["capitals"]),
    "opposites": _looked_up("The opposite of {} is", LEXICON["opposites"]),
    "pronouns": [
        Pair(f"The {woman} {deed}", f"The {man} {deed}", " she", " he")
        for woman, man, deed in product(LEXICON["women"], LEXICON["men"], LEXICON["deeds"])
    ],
}
MORE_TASKS = {
    name: [pair for frame in row["frames"] for pair in _looked_up(frame, row["known"], row["space"])]
    for name, row in LEXICON["more_tasks"].items()
}
"""Tasks of `stage_shares` besides `TASKS`."""


def reworded(task: str, pair: Pair) -> Pair | None:
    """Return the same pair in other words; None where there are none."""
    for words, other in LEXICON["rewordings"].get(task, ()):
        if words in pair.prompt:
            prompt, counterfactual = (text.replace(words, other) for text in (pair.prompt, pair.counterfactual))
            return replace(pair, prompt=prompt, counterfactual=counterfactual)
    return None


def named(names: str, what: str, known: Collection[str]) -> list[str]:
    """Return the names of a comma-separated list; ``all`` is every known one. Raises `UnknownName`."""
    wanted = list(known) if names == "all" else [name.strip() for name in names.split(",")]
    return [one_of(name, what, known) for name in wanted]


def pairs_of(names: str, tasks: Mapping[str, list[Pair]] = TASKS) -> dict[str, list[Pair]]:
    """Return the pairs of each task of a comma-separated list. Raises `UnknownName`."""
    return {name: tasks[name] for name in named(names, "task", tasks)}


def read_pairs(path: str) -> list[Pair]:
    """Read JSON lines with clean_prefix, patch_prefix, clean_answer and patch_answer. Raises `InputError`."""
    names = ("clean_prefix", "patch_prefix", "clean_answer", "patch_answer")
    try:
        rows = [json.loads(line) for line in read_text(path).splitlines() if line.strip()]
        pairs = [Pair(*(str(row[name]) for name in names)) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} must be JSON lines with {', '.join(names[:3])} and {names[3]}.") from None
    if not pairs:
        raise InputError(f"{path} has no pair of prompts; give at least one.")
    return pairs


def usable_by_task(
    model: Model,
    tasks: Mapping[str, Sequence[Pair]],
    count: int,
    seed: int,
    fits: Callable[[Model, Pair], bool] | None = None,
) -> Iterator[tuple[str, list[Pair], int]]:
    """Yield each task with its first `count` usable pairs, in a seeded order, and how many pairs were tried.

    A task without a usable pair is skipped with a warning. fits: whether a pair is usable, by default `is_usable`.
    """
    fits = fits or is_usable
    for task, pairs in tasks.items():
        order = list(pairs)
        random.Random(seed).shuffle(order)
        chosen: list[Pair] = []
        tried = 0
        while tried < len(order) and len(chosen) < count:
            if fits(model, order[tried]):
                chosen.append(order[tried])
            tried += 1
        if chosen:
            yield task, chosen, tried
        else:
            log.warning(
                f"{task}: none of {tried} pairs can be used: the model must be right on prompts of equal length."
            )


def answers(model: Model, pair: Pair) -> tuple[int, int]:
    """Return the first tokens of the answer and of the counterfactual prompt's answer."""
    answer, other = (model.continuation(text, pair.prompt)[0] for text in (pair.answer, pair.counterfactual_answer))
    return answer, other


def relevance_of(
    model: Model, pair: Pair, answer: tuple[int, int], site: str, method: Method | None = None
) -> Relevance:
    """Return the relevance of a site's neurons to a logit difference (target, contrast), with the counterfactual."""
    target, contrast = answer
    return attribute(
        model, pair.prompt, target, contrast, counterfactual=pair.counterfactual, method=method, sites=(site,)
    )


def is_usable(model: Model, pair: Pair) -> bool:
    """Return whether both prompts have equally many tokens, and the model is right on both by `MARGIN` logits."""
    ids = [model.token_ids(text) for text in (pair.prompt, pair.counterfactual)]
    answers = [model.continuation(text, pair.prompt)[:1] for text in (pair.answer, pair.counterfactual_answer)]
    if len(ids[0]) != len(ids[1]) or ids[0] == ids[1] or answers[0] == answers[1] or not all(answers):
        return False
    objective = objective_of(model, [pair.prompt, pair.counterfactual], answers[0][0], answers[1][0])
    with model.lock, torch.no_grad():
        _, (margin, other_margin) = objective.evaluate(model.logits(objective.batch, objective.all_positions))
    return bool(margin > MARGIN and other_margin < -MARGIN)

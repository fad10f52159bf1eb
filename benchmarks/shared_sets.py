"""What the pairs of a task share, for tasks by templates and for facts of a folder of relations, as a CSV table.

python -m benchmarks.shared_sets --out shared-sets [--relations FOLDER] [--model smollm2-135m]

FOLDER has the JSON files of relations with prompt_templates and samples (subject, object) of
https://github.com/evandez/relations (MIT). Each prompt is in one pair only. A pair counts where both prompts have
equally many tokens and the same last one, and the first word of the model is right after both.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks.stage_shares import is_aligned
from benchmarks.task_pairs import LEXICON, TASKS, Pair
from icebear.claims.kinds.predictions import TaskClaim
from icebear.concepts.stages.explained_task import LEAST_PAIRS, Task, explain_task
from icebear.models.loading.loading import load_model
from icebear.models.model import Model

NAMES = ("capitals", "across-clause", "pronouns", "indirect-object")
FACTS = ("landmark_in_country", "landmark_on_continent", "country_language")
SUBJECTS = 150
"""Subjects of a relation that are tried."""
COLUMNS = (
    "task (pairs),reached,heads,neurons,shared heads,shared neurons,share,95 %,lost without,random,heads alone,"
    "set of another task,failing"
).split(",")


@lru_cache(None)
def first_token(model: Model, prompt: str) -> int:
    return int(model.next_logits(prompt).argmax())


def is_right(model: Model, prompt: str, answer: str) -> bool:
    return first_token(model, prompt) == model.continuation(answer, prompt)[0]


def templates(model: Model, name: str) -> Iterator[Pair]:
    """Yield the pairs of a task by templates after which the model is right."""
    pairs = list(TASKS[name])
    random.Random(0).shuffle(pairs)
    for pair in pairs:
        prompts = ((pair.prompt, pair.answer), (pair.counterfactual, pair.counterfactual_answer))
        if is_aligned(model, pair) and all(is_right(model, *row) for row in prompts):
            yield pair


def greater_than(model: Model) -> Iterator[Pair]:
    """Yield pairs of start years; a digit is right if an end year with it is later than the start."""
    for event, century, late, early, last in (
        (event, century, late, early, last)
        for event in LEXICON["events"]
        for century in (16, 17, 18)
        for late, early in ((6, 1), (7, 2), (8, 3), (5, 1), (6, 2))
        for last in (2, 5)
    ):
        start, end = f"The {event} lasted from the year {century}", f"{last} to the year {century}"
        prompts = [f"{start}{digit}{end}" for digit in (late, early)]
        digits = [model.text(first_token(model, prompt)) for prompt in prompts]
        if digits[0] != digits[1] and all(
            digit.isdigit() and int(digit) >= least for digit, least in zip(digits, (late, early), strict=True)
        ):
            yield Pair(*prompts, *digits)


def facts(model: Model, path: Path) -> Iterator[Pair]:
    """Yield pairs of subjects of a relation whose objects differ in their first token."""
    relation = json.loads(path.read_text(encoding="utf-8"))
    samples = [sample for sample in relation["samples"] if isinstance(sample["object"], str)]
    random.Random(0).shuffle(samples)
    frame = relation["prompt_templates"][0]
    prompts = [(frame.format(row["subject"]), f" {row['object']}") for row in samples[:SUBJECTS]]
    known = [row for row in prompts if is_right(model, *row)]
    while known:
        prompt, answer = known.pop()
        for at, (other, other_answer) in enumerate(known):
            pair = Pair(prompt, other, answer, other_answer)
            if is_aligned(model, pair) and first_token(model, prompt) != first_token(model, other):
                known.pop(at)
                yield pair
                break


def disjoint(pairs: Iterable[Pair], most: int) -> list[dict[str, str]]:
    """Return the first pairs without a prompt of an earlier one, as `explain_task` reads them."""
    seen: set[str] = set()
    rows: list[dict[str, str]] = []
    for pair in pairs:
        prompts = {pair.prompt, pair.counterfactual}
        if not prompts & seen:
            seen |= prompts
            rows.append({"prompt": pair.prompt, "counterfactual": pair.counterfactual})
        if len(rows) == most:
            break
    return rows


def sources(model: Model, relations: Path | None) -> Iterator[tuple[str, Iterator[Pair]]]:
    yield from ((name, templates(model, name)) for name in NAMES)
    yield "greater-than", greater_than(model)
    for name in FACTS if relations else ():
        yield name.replace("_", "-"), facts(model, relations / f"factual__{name}.json")


def row_of(model: Model, name: str, task: Task, other: Task) -> list[object]:
    """Return a row of the table. other: the task whose shared set is measured on this one's pairs."""
    ((claim, _),) = TaskClaim.of(model, task)
    sets = (task.heads, (*other.heads, *other.neurons))
    heads, from_other = (replace(claim, nodes=tuple(nodes)).measured(model).value for nodes in sets)
    sizes = [median(len(getattr(pair, kind)) for pair in task.compared) for kind in ("heads", "neurons")]
    shares = [f"{share:z.2f}" for share in (task.without, task.random, heads, from_other)]
    reached = sum(pair.reached for pair in task.compared)
    shared = (len(task.heads), len(task.neurons), f"{task.share:z.2f}", f"{task.low:.2f} to {task.high:.2f}")
    failing = f"{len(task.failing)} of {len(task.measured)}"
    return [f"{name} ({len(task.compared)})", reached, *(f"{size:g}" for size in sizes), *shared, *shares, failing]


def written(path: Path, rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--relations", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--least", type=int, default=8, help="tasks with fewer pairs are left out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, tasks = load_model(options.model), dict[str, Task]()
    for name, pairs in sources(model, options.relations):
        path = options.out / f"{name}.json"
        if not path.exists():
            rows = disjoint(pairs, options.pairs)
            print(f"{name}: {len(rows)} pairs", flush=True)
            if len(rows) < max(options.least, LEAST_PAIRS):
                continue
            explain_task(model, rows).save(path)
        tasks[name] = Task.load(path)
        print(tasks[name], "\n", flush=True)
    order = list(tasks)
    others = {name: tasks[order[at % len(order)]] for name, at in zip(order, count(1))}
    written(options.out / "shared-sets.csv", [row_of(model, name, tasks[name], others[name]) for name in order])


if __name__ == "__main__":
    main()

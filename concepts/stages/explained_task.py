"""`explain_task`: which heads and neurons the stages of many pairs share, and whether these carry other pairs.

1. The stages of each pair choose its own heads and FFN neurons of the last token, and whole parts of earlier tokens.
2. A seed divides the pairs into two halves. Pairs of the same two prompts are in one half.
3. The shared set: the parts in the sets of most pairs of one half, as many as the median set there has.
4. On each pair of the other half: what the shared set gives alone with the pair's own whole parts, what is lost without
   it, and what random sets give, as in `Stages.transfer`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median_high
from typing import Any

import torch
from markupsafe import Markup

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.attribution.cases import Case, case_of
from icebear.concepts.attribution.request import prompt_requests
from icebear.concepts.stages import task_sentences
from icebear.concepts.stages.patched_pair import PatchedPair
from icebear.concepts.stages.stage_measurements import SearchedSet, StageMeasurement
from icebear.concepts.stages.stage_records import SMALL
from icebear.concepts.stages.stages import stage_sites, why_no_stages
from icebear.concepts.stages.task_records import TaskPair, TaskRecord, parts_of
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import Objective
from icebear.models.text.prompts import prompt_json
from icebear.paths import write_file
from icebear.records import Neuron, Ranked
from icebear.render import page, render
from icebear.steps import OnProgress, counting, unwatched
from icebear.values import seed_of, shown, typed

BOOTSTRAP_RESAMPLES = 2000
"""The number of bootstrap resamples."""
LEAST_PAIRS = 4
"""Two pairs choose the shared set, and two measure it."""
UNEQUAL = {"cut": "the prompts have unequal numbers of tokens", "last token": "the prompts end with different tokens"}
"""Why a pair of another kind of stages is left out."""


@dataclass(frozen=True, repr=False)
class Task(TaskRecord):
    """What the stages of many pairs of prompts share. (The task of a model, `Model.task`, is another thing.)"""

    def __str__(self) -> str:
        return "\n".join(map(str, task_sentences.task_lines(self)))

    def _repr_html_(self) -> str:
        return self._fragment()

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a self-contained HTML page. path: also write it to this file."""
        title = task_sentences.title(self)
        html = page(title, Markup("<h1>{}</h1>{}").format(title, self._fragment()))
        if path is not None:
            write_file(path, html)
        return html

    def _fragment(self) -> Markup:
        return render("icebear.concepts/task.html", task=self, text=task_sentences)


@dataclass(frozen=True)
class _Searched:
    """A pair, with its own set; without any for a pair that is left out."""

    pair: TaskPair
    objective: Objective | None = None
    chosen: SearchedSet | None = None


@typed
def explain_task(
    model: Model,
    pairs: Sequence[Mapping[str, Any] | Case],
    seed: int = 0,
    on_progress: OnProgress = unwatched,
) -> Task:
    """Show which heads and FFN neurons the stages of many pairs of prompts share, and whether these carry other pairs.

    The set that is shared is chosen on one half of the pairs and measured on the other half, beside random sets.

    Parameters
    ----------
    model : Model
    pairs : list of dict
        At least four, each with a prompt and a counterfactual, and optionally target and contrast: see `stages`.
    seed : int
        It divides the pairs into halves, and draws the random sets.
    on_progress : callable
        Called with the number of finished steps, and of all steps.

    Returns
    -------
    Task
        Its shares are parts of the difference between two prompts, 1 for all of it. Pairs whose stages show no share
        are left out, see `TaskPair.left_out`.

    Raises
    ------
    InputError
        For a pair that cannot be read, for fewer than four pairs that count, or if the model has no stages.

    References
    ----------
    Circuits that are judged on other prompts than those that chose them: Wang et al. 2022, arXiv 2211.00593; Mueller et
    al. 2025 (MIB), arXiv 2504.13151.
    """
    seed, cases = seed_of(seed), _cases_of(pairs)
    _check_pairs(model, cases)
    advance = counting(on_progress, len(cases) + len(cases) // 2)
    rows: dict[int, _Searched] = {}
    order = sorted(range(len(cases)), key=lambda row: repr(cases[row]))  # so that the order in the file does not matter
    for row in order:
        rows[row] = _search(model, cases[row])
        advance(1)
    choosing, measuring = ([order[at] for at in half] for half in halves([rows[row].pair for row in order], seed))
    chosen = choose_shared_set([rows[row].chosen for row in choosing])  # type: ignore[misc]
    parts = parts_of([rows[row].pair for row in order], chosen)
    shared = [part.neuron for part in parts if part.shared]  # in the order of the record: random sets depend on it
    measured = []
    for row in measuring:
        pair = _with_shares(model, rows[row], shared, seed)
        rows[row] = replace(rows[row], pair=pair)
        measured.append(pair)
        advance(1)
    advance(2 * len(cases))  # to the end: pairs that are left out were counted as steps
    shares, without, drawn = ([getattr(pair, name) for pair in measured] for name in ("share", "without", "random"))
    low, high = bootstrap_interval(shares, seed)
    every = tuple(rows[row].pair for row in range(len(cases)))
    return Task(
        pairs=every,
        parts=parts,
        share=fmean(shares),
        low=low,
        high=high,
        without=fmean(without),
        random=fmean(drawn),
        seed=seed,
        made_with=model.made_with,
    )


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the bounds of the 95 % bootstrap interval of a mean."""
    every, generator = torch.tensor(values, dtype=torch.float64), torch.Generator().manual_seed(seed)
    draws = torch.randint(len(values), (BOOTSTRAP_RESAMPLES, len(values)), generator=generator)
    low, high = every[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _cases_of(pairs: Sequence[Mapping[str, Any] | Case]) -> list[Case]:
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise InputError(f"pairs must be a list of prompts with their counterfactuals, not {shown(pairs)}.")
    check_count(len(pairs), "The task")
    rows = (vars(pair) if isinstance(pair, Case) else pair for pair in pairs)
    return [case_of(row, f"pair {number}", needs_counterfactual=True) for number, row in enumerate(rows, 1)]


def _check_pairs(model: Model, cases: Sequence[Case]) -> None:
    """Raise `InputError`, with the number of the pair, for one that the model cannot read."""
    if not stage_sites(model):
        raise InputError(f"{model.name} has no attention heads, or scans beside them, so its answers have no stages.")
    for number, case in enumerate(cases, 1):
        try:
            prompt_requests(model, case.prompt, case.target, case.contrast, None, case.counterfactual, None, None)
        except InputError as error:
            raise InputError(f"Pair {number}, {shown(case.prompt)}, cannot be explained. {error}") from None


def check_count(count: int, where: str) -> None:
    """Raise `InputError` for fewer pairs than a task needs. where: what has them."""
    if count < LEAST_PAIRS:
        raise InputError(
            f"{where} has {count} pairs of prompts, but a task needs at least {LEAST_PAIRS}: one half chooses the set "
            "that the other half measures; add pairs."
        )


def _search(model: Model, case: Case) -> _Searched:
    """Return the heads and neurons of the stages of a pair, or why it is left out."""
    how: dict[str, Any] = {"counterfactual": case.counterfactual, "sites": stage_sites(model)}
    try:
        relevance = attribute(model, case.prompt, case.target, case.contrast, **how)
        if reason := why_no_stages(model, relevance):
            raise InputError(reason)
    except InputError as error:  # such as one answer to both prompts
        texts = (prompt_json(case.prompt), prompt_json(case.counterfactual))
        return _Searched(TaskPair(*texts, left_out=str(error).partition("\n")[0].rstrip(".")))
    assert relevance.counterfactual is not None
    assert relevance.target is not None
    request = relevance.run.request  # its prompts end with what target and contrast share
    prompts = (prompt_json(request.prompt), prompt_json(request.counterfactuals[0]))
    objective = relevance.counterfactual.pairs[0]
    patched = PatchedPair(model, objective)
    measured, (number_x, number_c) = StageMeasurement(model, [patched]), patched.ends
    pair = TaskPair(*prompts, relevance.target, relevance.contrast, difference=number_x - number_c)
    if measured.kind in UNEQUAL:
        return _Searched(replace(pair, left_out=UNEQUAL[measured.kind]))
    if abs(number_x - number_c) < SMALL:
        return _Searched(replace(pair, left_out=f"the difference is less than {SMALL:g} logit"))
    if relevance.predictions[0].id != relevance.target.id:
        return _Searched(replace(pair, left_out="the target is not the likeliest token"))
    chosen = measured.search(relevance)
    if not chosen.heads:
        return _Searched(replace(pair, left_out="no head of the last token has a positive relevance"))
    heads, neurons = (tuple(node.neuron for node in nodes) for nodes in (chosen.heads, chosen.neurons))
    parts = tuple(f"{part}:{where}" for part, where in sorted(chosen.whole_kinds))
    pair = replace(pair, reached=chosen.reached, heads=heads, neurons=neurons, whole_parts=parts)
    return _Searched(pair, objective, chosen)


def halves(pairs: Sequence[TaskPair], seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the pairs that choose the shared set, and of those that measure it. Raises `InputError` if
    too few count."""
    prompts = [frozenset((repr(pair.prompt), repr(pair.counterfactual))) for pair in pairs]
    counted = [number for number, pair in enumerate(pairs) if not pair.left_out]
    distinct = sorted({prompts[number] for number in counted}, key=sorted)
    if len(distinct) < LEAST_PAIRS:
        reasons = Counter(pair.left_out for pair in pairs if pair.left_out).most_common(1)
        why = f"; left out: {reasons[0][1]} pairs ({reasons[0][0]})" if reasons else ""
        raise InputError(
            f"A task needs {LEAST_PAIRS} different pairs of prompts that can be compared, and {len(distinct)} of these "
            f"{len(pairs)} can{why}."
        )
    random.Random(seed).shuffle(distinct)
    first_half = set(distinct[: len(distinct) // 2])
    choosing = [number for number in counted if prompts[number] in first_half]
    return choosing, [number for number in counted if prompts[number] not in first_half]


def choose_shared_set(sets: Sequence[SearchedSet]) -> list[Neuron]:
    """Return the heads and the neurons that most sets have, as many of each as the median set (of two middle ones, the
    larger). Ties go to the larger sum of relevance."""
    shared: list[Neuron] = []
    for rows in ([each.heads for each in sets], [each.neurons for each in sets]):
        nodes: list[Ranked] = [node for row in rows for node in row]
        counts, sums = Counter(node.neuron for node in nodes), Counter[Neuron]()
        for node in nodes:
            sums[node.neuron] += node.relevance  # type: ignore[assignment]
        order = sorted(counts, key=lambda neuron: (-counts[neuron], -sums[neuron], neuron))
        shared += order[: median_high(map(len, rows))]
    return shared


def _with_shares(model: Model, searched: _Searched, shared: Sequence[Neuron], seed: int) -> TaskPair:
    """Measure the shared set on a pair."""
    assert searched.objective is not None
    assert searched.chosen is not None
    measured = StageMeasurement(model, [PatchedPair(model, searched.objective)])
    share, without, drawn = measured.set_shares(shared, searched.chosen.whole_kinds, seed)
    return replace(searched.pair, share=share, without=without, random=drawn)

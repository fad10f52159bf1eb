"""What a task says: the lines of a screen, which its page shows too, and what is said of a single pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from icebear.concepts.stages.stage_records import ENOUGH, OVERSHOOT
from icebear.concepts.stages.stage_sentences import kinds_text, percent, set_text
from icebear.concepts.stages.task_records import FAILING_SHARE, is_head
from icebear.lines import Line

if TYPE_CHECKING:
    from icebear.concepts.stages.task_records import TaskPart, TaskRecord

LISTED_PARTS = 10
"""The number of heads, and of neurons, that are listed, those in most pairs."""
PAGE_PARTS = 30
"""The same number on a page."""
LISTED_PAIRS = 5
"""The number of pairs that are listed where the shared set fails, those with the smallest share."""
INDENT = 14
"""The columns of a kind of parts."""


def title(task: TaskRecord) -> str:
    return f"What do {len(task.compared)} pairs of prompts share?"


def example(task: TaskRecord) -> str:
    """Name the first pair that counts."""
    pair = task.compared[0]
    against = f", not {pair.contrast.text!r}" if pair.contrast else ""
    return f"First pair: {pair.text}" + (f" ({pair.target.text!r}{against})" if pair.target else "")


def left_out(task: TaskRecord) -> list[str]:
    """Say how many pairs do not count, a sentence for each reason."""
    reasons = Counter(pair.left_out for pair in task.pairs if pair.left_out)
    return [f"Left out: {count} of {len(task.pairs)} pairs ({reason})." for reason, count in reasons.items()]


def own_sets(task: TaskRecord) -> str:
    """Say for how many pairs stages reach their share, and with how many parts."""
    reached = [pair for pair in task.compared if pair.reached]
    text = (
        f"In {len(reached)} of {len(task.compared)} pairs, a set of heads and FFN neurons at the last token gives "
        f"{100 * ENOUGH:g} to {percent(OVERSHOOT)} of the difference between the two prompts while every other head "
        "and neuron is held at its value in the counterfactual prompt"
    )
    if not reached:
        return f"{text}."
    heads, neurons = (_quartiles([len(getattr(pair, name)) for pair in reached]) for name in ("heads", "neurons"))
    return f"{text}: {heads} heads and {neurons} FFN neurons (median [quartiles])."


def _quartiles(counts: Sequence[int]) -> str:
    middle, low, high = np.quantile(counts, (0.5, 0.25, 0.75)).tolist()
    return f"{middle:g} [{low:.3g}, {high:.3g}]"


def parts_title(task: TaskRecord) -> str:
    return f"Heads and neurons by how many of the {len(task.compared)} pairs they are chosen for (* shared)"


def parts_by_kind(task: TaskRecord) -> list[tuple[str, list[TaskPart]]]:
    """Return the kinds of parts, each with those in most pairs first."""
    heads = [part for part in task.parts if is_head(part.neuron)]
    neurons = [part for part in task.parts if not is_head(part.neuron)]
    return [(name, parts) for name, parts in (("heads", heads), ("FFN neurons", neurons)) if parts]


def _listed(parts: Sequence[TaskPart]) -> str:
    groups = [
        f"in {count}: {', '.join(str(part.neuron) + '*' * part.shared for part in group)}"
        for count, group in groupby(parts[:LISTED_PARTS], lambda part: part.pairs)
    ]
    more = len(parts) - LISTED_PARTS
    return "; ".join(groups) + (f"; and {more:,} others" if more > 0 else "")


def shared_set_text(task: TaskRecord) -> str:
    """Say how the shared set was chosen, what it gives on other pairs, and the control."""
    measured = len(task.measured)
    choosing = len(task.compared) - measured
    interval = f"95% interval over pairs: {percent(task.low)} to {percent(task.high)}"
    over = ", which overshoots" if task.share > OVERSHOOT else ""
    several = len(task.heads) + len(task.neurons) > 1
    only, values = (
        ("these alone give", "these take their counterfactual values")
        if several
        else ("this alone gives", "this takes its counterfactual value")
    )
    return (
        f"{choosing} of the pairs choose {set_text(task)} (*): those in most of their sets, as many as the median "
        f"set has. On the other {measured} pairs, {only} {percent(task.share)} of the difference{over} "
        f"[{interval}; as many random {kinds_text(task)}: {percent(task.random)}]. The reverse: when only "
        f"{values}, {percent(task.without)} is lost."
    )


def failures(task: TaskRecord) -> tuple[str, list[tuple[str, str]]]:
    """Say on how many pairs the shared set fails, and list them: the share, and the pair."""
    failing = sorted(task.failing, key=lambda pair: pair.share or 0)
    count = f"{len(failing)} of these {len(task.measured)} pairs"
    text = f"The shared set gives less than {percent(FAILING_SHARE)} on {count}" + (":" if failing else ".")
    return text, [(f"{pair.share:z.1%}", pair.text) for pair in failing]


def task_lines(task: TaskRecord) -> list[Line]:
    """Return the lines of a screen."""
    text, failing = failures(task)
    parts = [Line(f"  {name:<{INDENT - 2}}{_listed(row)}", indent=INDENT) for name, row in parts_by_kind(task)]
    shown = [Line(f"{share:>6}  {pair}", wraps=False) for share, pair in failing[:LISTED_PAIRS]]
    more = len(failing) - len(shown)
    return [
        Line(title(task), "bold"),
        Line(example(task)),
        *(Line(reason, "yellow") for reason in left_out(task)),
        Line(""),
        Line(own_sets(task)),
        Line(parts_title(task)),
        *parts,
        Line(""),
        Line(shared_set_text(task)),
        Line(text),
        *shown,
        *([Line(f"        and {more} others")] if more else []),
    ]

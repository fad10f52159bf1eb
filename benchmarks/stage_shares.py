"""What the heads and neurons of stages carry: alone, on other prompts, and beside other parts of equal number.

python -m benchmarks.stage_shares --tasks capitals,pronouns --samples 2 --out stages
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import median
from typing import Any, ClassVar

import torch

from benchmarks import task_pairs
from benchmarks.task_pairs import Pair, Pairs, Tasks, answers, relevance_of, reworded
from icebear.app.cli.verbs.evaluate import command
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.nodes.controls import nodes_of, recovered_shares
from icebear.concepts.results.result import Relevance
from icebear.concepts.stages.patched_pair import PatchedPair
from icebear.concepts.stages.stage_measurements import RANDOM_DRAWS
from icebear.concepts.stages.stage_parts import ExplainedTokenNodes, Recomputed, Shares
from icebear.concepts.stages.stage_records import SMALL
from icebear.concepts.stages.stages import Stages, stage_sites, stages_of
from icebear.errors import InputError
from icebear.evaluation.baselines import methods_of
from icebear.evaluation.protocol import DataFile, Evaluation, Line, Lines, Part, Seed, Table
from icebear.models.model import Model
from icebear.records import Neuron

TASKS = task_pairs.TASKS | task_pairs.MORE_TASKS
OPENINGS = ("I read this in a book. ", "Listen: ")
FFN_NODES = 100
COMPARED_HEADS = 4
"""The largest number of heads for which rankings are compared: greedy search tries every head for each of them."""
RANDOM_MODELS = 3
RANDOM_PAIRS = 10
"""Pairs on which each model with random weights is searched."""
SHARE = {"share": "median [quartiles] over pairs of the share of the difference between the two prompts"}
OF_STAGES = {
    "alone": "the heads, neurons and whole parts of the stages, everything else held",
    "lost without": "the share that is lost when only the heads and neurons are held",
    "heads": "the heads and whole parts, without the neurons",
    "last token": "everything at the last token, and the whole parts",
    "random": f"as many random heads and neurons, the median of {RANDOM_DRAWS} sets",
    "most changed": "the chosen neurons, and as many other heads: those that change most between the prompts",
}
TRANSFERS = {
    **{f"opening {number}": f'the same parts after "{opening}"' for number, opening in enumerate(OPENINGS, 1)},
    "reworded": "the same parts in other words",
    "same task": "the same parts on another pair of the task",
    "other task": "the same parts on a pair of another task",
}
RANKINGS = {
    "relevance": f"heads by relevance, at most {COMPARED_HEADS}: with the neurons and whole parts, as in alone",
    "greedy": "as many heads, each the one that brings the share nearest to 1",
    "gxi@midpoint": "as many heads by attribution patching at the midpoint of the two prompts",
    "gxi@prompt": "as many heads by attribution patching at the prompt",
    "patching": "as many heads by activation patching, one head at a time",
    "change": "as many heads by the change of what they write",
}
FFN_LISTS = {
    "FFN, as many": "as many FFN neurons at any token as there are heads and neurons, all other FFN neurons held",
    "FFN, 100": "the 100 most relevant FFN neurons at any token, all other FFN neurons held",
}
UNEQUAL = {
    "longer": "another search, with the first opening before the counterfactual prompt alone: heads and neurons",
    "longer, random": "as many random heads and neurons there",
}
LISTED = ("alone", "lost without", "random", *TRANSFERS)
"""The rows whose medians are listed for each task."""
MEANINGS = {**OF_STAGES, **TRANSFERS, **RANKINGS, **FFN_LISTS, **UNEQUAL}


@dataclass(frozen=True)
class Sample:
    """A pair, another one of its task, and one of another task; with the number of a model with random weights."""

    task: str
    pair: Pair
    same: Pair | None
    other: Pair | None
    seed: int | None = None


@dataclass(frozen=True)
class StagesHold(Evaluation):
    """Measure the share of the difference between two prompts that the parts of stages give.

    The heads and neurons that `icebear explain` finds are measured alone, left out, after other openings, and on other
    pairs; beside them are random parts, heads by other rankings, and FFN neurons. Models of the same shape with random
    weights show what the search finds without knowledge.

    Example:
      python -m benchmarks.stage_shares --tasks capitals,pronouns --samples 2 --out stages
    """

    name: ClassVar = "stages"
    tasks: Tasks = "all"
    data: DataFile = None
    samples: Pairs = 20
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        task_pairs.pairs_of(self.tasks, TASKS)

    def parts(self, model: Model) -> Iterator[Part]:
        tasks = {"data": task_pairs.read_pairs(self.data)} if self.data else task_pairs.pairs_of(self.tasks, TASKS)
        notes = []
        pairs: list[tuple[str, Pair]] = []
        for task, usable, tried in task_pairs.usable_by_task(model, tasks, self.samples, self.seed, is_answered):
            notes.append(f"{task}: {len(usable)} of {tried} pairs have equal lengths and last tokens, and both answers")
            pairs += [(task, pair) for pair in usable]
        if not pairs:
            raise InputError(f"{model.name} answers no pair of these tasks; choose other --tasks.")
        random.Random(self.seed).shuffle(pairs)
        samples = [Sample(task, pair, *_others(pairs, number)) for number, (task, pair) in enumerate(pairs)]
        parts = partial(Part, SHARE, settings={"tasks": self.tasks}, tables=_tables, listings=_listings)
        about = [f"{name}: {meaning}" for name, meaning in MEANINGS.items()]
        yield parts(samples, partial(measured, model), "pairs", notes=lambda _: [*notes, *about])
        random_models = lru_cache(1)(partial(with_random_weights, model))
        drawn = [replace(sample, seed=seed) for seed in range(RANDOM_MODELS) for sample in samples[:RANDOM_PAIRS]]
        yield parts(drawn, partial(searched, random_models), "random-weights")


def is_answered(model: Model, pair: Pair) -> bool:
    """Return whether each prompt has its answer as the likeliest token and the difference is large enough, and the
    prompts have equally many tokens and the same last one, also after the openings."""
    if not all(is_aligned(model, after(opening, pair)) for opening in ("", *OPENINGS)):
        return False
    answer, other = answers(model, pair)
    logits, logits_c = (model.next_logits(text) for text in (pair.prompt, pair.counterfactual))
    difference = (logits - logits_c)[answer] - (logits - logits_c)[other]
    return (answer, other) == (int(logits.argmax()), int(logits_c.argmax())) and difference.item() >= SMALL


def is_aligned(model: Model, pair: Pair) -> bool:
    """Return whether two prompts that differ have equally many tokens and the same last one."""
    ids, ids_c = (model.token_ids(text) for text in (pair.prompt, pair.counterfactual))
    return ids != ids_c and len(ids) == len(ids_c) and ids[-1] == ids_c[-1]


def after(opening: str, pair: Pair) -> Pair:
    return replace(pair, prompt=opening + pair.prompt, counterfactual=opening + pair.counterfactual)


def _others(pairs: Sequence[tuple[str, Pair]], number: int) -> tuple[Pair | None, Pair | None]:
    """Return the next pair of the same task that shares no prompt, and the next one of another task, if there are."""
    (task, pair), behind = pairs[number], [*pairs[number + 1 :], *pairs[:number]]
    prompts = {pair.prompt, pair.counterfactual}
    same = (other for name, other in behind if name == task and not prompts & {other.prompt, other.counterfactual})
    return next(same, None), next((other for name, other in behind if name != task), None)


def measured(model: Model, sample: Sample) -> Line:
    """Return the share of each of `MEANINGS` on a pair; JSON-ready."""
    relevance, explained = _stages(model, sample.pair)
    shares = {**of_stages(explained), **transfers(model, explained, sample), **unequal(model, sample.pair)}
    if explained.heads:
        shares |= {**rankings(model, sample.pair, explained), **ffn_nodes(model, relevance, explained)}
    return _line(sample, explained, shares)


def searched(random_models: Any, sample: Sample) -> Line:
    """Return the shares of the stages of a model with random weights, in the words of the sample alone.

    random_models: seed -> the model.
    """
    model = random_models(sample.seed)
    _, explained = _stages(model, sample.pair)
    same_words = replace(sample, same=None, other=None)
    return _line(sample, explained, {**of_stages(explained), **transfers(model, explained, same_words)})


def with_random_weights(model: Model, seed: int) -> Model:
    """Return a model of the same shape with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = type(model.net)(model.net.config)
    return Model(net.to(model.device, model.dtype).eval(), model.tokenizer, f"random weights {seed}")


def _stages(model: Model, pair: Pair) -> tuple[Relevance, Stages]:
    options: dict[str, Any] = {"counterfactual": pair.counterfactual, "sites": stage_sites(model)}
    relevance = attribute(model, pair.prompt, *answers(model, pair), **options)
    return relevance, stages_of(model, relevance)


def _line(sample: Sample, explained: Stages, shares: Mapping[str, float | None]) -> Line:
    return {
        "task": sample.task,
        **vars(sample.pair),
        "seed": sample.seed,
        "difference": explained.difference,
        "reached": explained.reached,
        "heads": len(explained.heads),
        "neurons": len(explained.neurons),
        "whole": [f"{part.kind} {part.where}" for part in explained.whole],
        "left_out": [f"{row.part.kind} {row.part.where} {row.change:+.2f}" for row in explained.left_out],
        "counts": bool(explained.heads),
        "methods": {name: {"share": share} for name, share in shares.items() if share is not None},
    }


def of_stages(explained: Stages) -> dict[str, float | None]:
    shares = (
        explained.alone,
        explained.without,
        explained.moved,
        explained.everything,
        explained.random,
        explained.most_changed,
    )
    return dict(zip(OF_STAGES, shares, strict=True))


def transfers(model: Model, explained: Stages, sample: Sample) -> dict[str, float | None]:
    """Return *alone* of the same parts after other openings, in other words, and on other pairs, with their answers."""
    longer = [after(opening, sample.pair) for opening in OPENINGS]
    pairs = (*longer, reworded(sample.task, sample.pair), sample.same, sample.other)
    return {
        name: explained.transfer(pair.prompt, pair.counterfactual, *answers(model, pair)).alone
        for name, pair in zip(TRANSFERS, pairs, strict=True)
        if pair and explained.heads and is_aligned(model, pair)
    }


def unequal(model: Model, pair: Pair) -> dict[str, float | None]:
    """Return what the stages of prompts of unequal lengths give."""
    longer = after(OPENINGS[0], pair).counterfactual
    _, explained = _stages(model, replace(pair, counterfactual=longer))
    return dict(zip(UNEQUAL, (explained.alone, explained.random), strict=True))


def rankings(model: Model, prompts: Pair, explained: Stages) -> dict[str, float]:
    """Return *alone* of as many heads by each of `RANKINGS`, with the neurons and whole parts of the stages."""
    pair = PatchedPair(model, explained.pairs[0])
    token_nodes, shares = ExplainedTokenNodes(model, pair.passes.stack_of(pair.position)), Shares([pair])
    whole_kinds = frozenset((part.kind, part.where) for part in explained.whole)
    neurons, k = [node.neuron for node in explained.neurons], min(len(explained.heads), COMPARED_HEADS)

    def alone(sets: Sequence[Sequence[Neuron]]) -> list[float]:
        return shares.of([Recomputed(whole_kinds, token_nodes.masks([*heads, *neurons])) for heads in sets])

    every, greedy = token_nodes.heads(), list[Neuron]()
    for _ in range(k):
        sets = [[*greedy, head] for head in every if head not in greedy]
        greedy = min(zip(alone(sets), sets, strict=True), key=lambda row: abs(1 - row[0]))[1]
    remaining = shares.of([token_nodes.without([head]) for head in every])
    chosen = {
        "relevance": [node.neuron for node in explained.heads[:k]],
        "greedy": greedy,
        "patching": [head for _, head in sorted(zip(remaining, every, strict=True))[:k]],
        "change": token_nodes.most_changed([pair], [], k),
    }
    for name, method in methods_of("gxi@midpoint,gxi@prompt").items():
        if token_nodes.head_sites == ["attn"]:  # a list of heads has none of cross-attention
            ranked = relevance_of(model, prompts, answers(model, prompts), "attn", method).top(k, "head")
            chosen[name] = [node.neuron for node in ranked]
    return dict(zip(chosen, alone([*chosen.values()]), strict=True))


def ffn_nodes(model: Model, relevance: Relevance, explained: Stages) -> dict[str, float]:
    """Return the sufficiency of the most relevant FFN nodes, as `ablation` measures it in models of one stack."""
    if len(model.stacks) > 1:
        return {}
    ranked = relevance.top(FFN_NODES, "ffn", position="all")
    counts = (len(explained.heads) + len(explained.neurons), FFN_NODES)
    sufficiency, _ = recovered_shares(
        nodes_of(model, relevance), [relevance.mask(ranked[:count], "ffn") for count in counts]
    )
    return dict(zip(FFN_LISTS, sufficiency, strict=True))


def _tables(lines: Lines) -> dict[str, Table]:
    """Return one table, of the rows that all pairs have."""
    counted = [line for line in lines if line["counts"]]
    rows = [name for name in MEANINGS if all(name in line["methods"] for line in counted)]
    return {"": Table(SHARE, [{**line, "methods": {name: line["methods"][name] for name in rows}} for line in counted])}


def _listings(lines: Lines) -> dict[str, list[dict[str, Any]]]:
    """Return a row for each task, or model with random weights, and one for all pairs."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["task"] if line["seed"] is None else f"random weights {line['seed']}", []).append(line)
    return {"medians": [_row(name, rows) for name, rows in [*groups.items(), ("all", [*lines])]]}


def _row(name: str, lines: Lines) -> dict[str, Any]:
    counts = {part: median(line[part] for line in lines) for part in ("heads", "neurons")}
    shares = {row: [line["methods"][row]["share"] for line in lines if row in line["methods"]] for row in LISTED}
    medians = {row: f"{median(values):.2f}" if values else "" for row, values in shares.items()}
    return {"task": name, "pairs": len(lines), "reached": sum(line["reached"] for line in lines), **counts, **medians}


if __name__ == "__main__":
    command(StagesHold)()

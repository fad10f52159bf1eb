"""Whether `find_concept` finds the neurons that compute a variable, on models whose mechanism is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from icebear.evaluation.protocol import Lines
from icebear.evaluation.truth.programs.compiler import Compiled
from icebear.evaluation.truth.programs.program import PROGRAM, Feature, Program, Unit
from icebear.steering.concept.finding import find_concept
from icebear.steering.concept.reading import neurons_of, read

LayerIndex = tuple[int, int]
"""Layer and index of an FFN neuron."""
TEXTS = 64
"""Prompts of each kind, with the variable and without it."""
DRAWN_PROMPTS = 4096
"""Prompts that are drawn; so many of them are different that there are enough of both kinds."""
METRICS = {
    "first": "share where the first neuron computes the variable, higher is better",
    "share": "of as many neurons as find_concept chooses, the share that computes the variable, higher is better",
}


@dataclass(frozen=True)
class Variable:
    """What is true of some prompts of a program, and which neurons compute it."""

    about: str
    holds: Callable[[Sequence[str]], bool]
    computes: Callable[[Unit], bool]


def writes(feature: Feature) -> Callable[[Unit], bool]:
    return lambda unit: feature in unit.write


def counts(block: str, number: int) -> Callable[[Unit], bool]:
    """The two neurons of the step from a number to the next."""
    return lambda unit: {(block, number - 1), (block, number)} == set(unit.write)


def reads(*features: Feature) -> Callable[[Unit], bool]:
    return lambda unit: set(features) <= set(unit.read)


def most(prompt: Sequence[str]) -> int:
    """Return how often the most frequent word is there."""
    return max(prompt.count(word) for word in prompt)


def is_violated(prompt: Sequence[str]) -> bool:
    return any(prompt[:end].count(")") > prompt[:end].count("(") for end in range(len(prompt)))


def makes_a_carry(prompt: Sequence[str]) -> bool:
    return any(int(x) + int(y) > 2 for x, y in zip(prompt[1:5], prompt[5:], strict=True))


VARIABLES = {
    "previous": Variable("an a is before another word", lambda p: "a" in p[:-1], reads(("before", 1))),
    "induction": Variable("an a is before another word", lambda p: "a" in p[:-1], reads(("before", 1))),
    "reverse": Variable("there are four words", lambda p: p.index("END") == 5, reads(("end", 5))),
    "conditional": Variable("the first two words are equal", lambda p: p[1] == p[2], writes(("pointer", 3))),
    "hops": Variable("an a is the key of a pair", lambda p: "a" in p[1:7:2], reads(("before", 1))),
    "histogram": Variable("a word is there four times", lambda p: most(p) >= 4, counts("count", 4)),
    "sort": Variable("the third word is b", lambda p: p[3] == "b", reads(("token", 2), ("position", 3))),
    "parity": Variable("there are four ones", lambda p: p.count("1") >= 4, counts("count", 4)),
    "brackets": Variable("a bracket is closed that was not opened", is_violated, writes(("negative", 0))),
    "addition": Variable("two digits make a carry", makes_a_carry, writes(("makes", 0))),
}


def measured(program: Program, compiled: Compiled, seed: int) -> dict[str, Any]:
    """Return `COLUMNS` by method, the number of neurons that `find_concept` chooses, and of those that compute the
    variable; JSON-ready. A decoy that is redundant computes it too."""
    variable = VARIABLES[program.name]
    texts = texts_of(program, variable, seed)
    concept = find_concept(compiled.model, *texts, name=variable.about, sites=("ffn",), seed=seed)
    chosen = [(part.neuron.layer, part.neuron.index) for part in concept.parts]
    kinds = (PROGRAM, "redundant")
    true = {neuron for neuron, unit in compiled.neurons.items() if unit.kind in kinds and variable.computes(unit)}
    by_difference = [neuron for neuron in differing(compiled, texts) if neuron in compiled.neurons][: len(chosen)]
    share = len(true) / len(compiled.neurons)
    methods = {
        "find_concept": numbers(chosen, true),
        "size of the activation difference": numbers(by_difference, true),
        "random": {"first": share, "share": share},
    }
    facts = {"variable": variable.about, "chosen": len(chosen), "true": len(true), "auroc": concept.provenance["auroc"]}
    return {"methods": methods, **facts}


def texts_of(program: Program, variable: Variable, seed: int) -> tuple[list[str], list[str]]:
    """Return different prompts with the variable and without it."""
    random = Random(f"{program.name} {seed}")
    prompts = dict.fromkeys(tuple(program.sample(random)) for _ in range(DRAWN_PROMPTS))
    kinds = [[" ".join(prompt) for prompt in prompts if variable.holds(prompt) is holds] for holds in (True, False)]
    return kinds[0][:TEXTS], kinds[1][:TEXTS]


def differing(compiled: Compiled, texts: tuple[list[str], list[str]]) -> list[LayerIndex]:
    """Return neurons by the size of the difference of their mean activations, the largest first."""
    means = [read(compiled.model, prompts, neurons_of(compiled.model, ("ffn",))) for prompts in texts]
    sizes = np.abs(means[0].means.mean(0) - means[1].means.mean(0))
    neurons = [means[0].neurons[column] for column in np.argsort(-sizes, kind="stable")]
    return [(neuron.layer, neuron.index) for neuron in neurons]


def numbers(chosen: Sequence[LayerIndex], true: set[LayerIndex]) -> dict[str, float]:
    return {"first": float(chosen[0] in true), "share": sum(neuron in true for neuron in chosen) / len(chosen)}


def by_model(lines: Lines) -> list[dict[str, Any]]:
    """Return a row for each model: its variable, and how well `find_concept` finds its neurons."""
    names = ("program", "variant", "variable", "true", "chosen", "auroc")
    return [{**{name: line[name] for name in names}, **line["methods"]["find_concept"]} for line in lines]

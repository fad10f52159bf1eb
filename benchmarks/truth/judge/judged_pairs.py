"""Pairs of prompts of a program with different answers at a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.truth.programs.program import BOS, END, PAD, Program
from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.method import Method
from icebear.concepts.results.result import Relevance
from icebear.models.model import Model


@dataclass(frozen=True)
class Pair:
    """Two prompts of equal length as token ids, and their answers at a token: the target and the contrast."""

    prompt: tuple[int, ...]
    counterfactual: tuple[int, ...]
    position: int
    target: int
    contrast: int | None
    """None where the output is a single number."""

    def relevance(self, model: Model, method: Method, compares: bool = True) -> Relevance:
        """Return the relevance of FFN neurons and heads to the logit difference of both answers."""
        other: dict[str, Any] = {"counterfactual": self.counterfactual} if compares else {}
        sites = [site for site in ("ffn", "attn") if site in model.sites]
        return attribute(
            model, self.prompt, self.target, self.contrast, method=method, sites=sites, position=self.position, **other
        )


def pairs_of(program: Program, seed: int = 0) -> Iterator[Pair]:
    """Yield pairs without end: in turn prompts that differ in one token, and independent prompts."""
    random = Random(f"{program.name} {seed}")
    while True:
        yield drawn_pair(program, random, one_changed)
        yield drawn_pair(program, random, lambda program, random, prompt: program.sample(random))


def one_changed(program: Program, random: Random, prompt: Sequence[str]) -> list[str]:
    """Return the prompt with another word in a place."""
    special = {BOS, END, PAD}
    changed = list(prompt)
    position = random.choice([position for position, word in enumerate(prompt) if word not in special])
    changed[position] = random.choice([word for word in program.words if word not in {*special, changed[position]}])
    return changed


def drawn_pair(program: Program, random: Random, change: Any) -> Pair:
    while True:
        prompt = program.sample(random)
        other = change(program, random, prompt)
        answers = list(zip(program.answers(prompt), program.answers(other), strict=True))
        differing = [at for at, (a, b) in enumerate(answers) if a and b and a != b]
        if differing:
            position = random.choice(differing)
            target, contrast = (program.outputs.index(word or "") for word in answers[position])
            ids, other_ids = (tuple(program.words.index(word) for word in words) for words in (prompt, other))
            return Pair(ids, other_ids, position, target, contrast)

"""Pairs of prompts with different answers at a token: of a program, or of a file for a model of the user."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from icebear.concepts.attribution.attribute import attribute
from icebear.concepts.methods.method import Method
from icebear.concepts.results.result import Relevance
from icebear.errors import InputError
from icebear.evaluation.truth.programs.program import BOS, END, PAD, Program
from icebear.models.model import Model
from icebear.paths import read_text


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
    place = random.choice([place for place, word in enumerate(prompt) if word not in special])
    changed[place] = random.choice([word for word in program.words if word not in {*special, changed[place]}])
    return changed


def drawn_pair(program: Program, random: Random, change: Any) -> Pair:
    while True:
        prompt = program.sample(random)
        other = change(program, random, prompt)
        answers = list(zip(program.answers(prompt), program.answers(other), strict=True))
        places = [at for at, (a, b) in enumerate(answers) if a and b and a != b]
        if places:
            position = random.choice(places)
            target, contrast = (program.outputs.index(word or "") for word in answers[position])
            own, there = (tuple(program.words.index(word) for word in words) for words in (prompt, other))
            return Pair(own, there, position, target, contrast)


def read_pairs(model: Model, path: str) -> list[Pair]:
    """Read JSON lines with a prompt and a counterfactual and, optionally, a position, a target and a contrast.

    A prompt is a text, or a list of tokens or their numbers; a target is an output or its number. By default the
    position is the last one, and target and contrast are the model's answers there. Raises `InputError`.
    """
    pairs = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            if line.strip():
                pairs.append(pair_of(model, json.loads(line)))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise InputError(
                f"Line {number} of {path} is not a pair of prompts ({error}); give a JSON object with prompt and "
                "counterfactual, which have tokens of the model and equal length."
            ) from None
    if not pairs:
        raise InputError(f"{path} has no pair of prompts; give at least one.")
    return pairs


def pair_of(model: Model, entry: Mapping[str, Any]) -> Pair:
    own, there = (ids_of(model, entry[name]) for name in ("prompt", "counterfactual"))
    if len(own) != len(there):
        raise ValueError(f"{len(own)} and {len(there)} tokens")
    position = range(len(own))[entry.get("position", -1)]
    with torch.no_grad(), model.lock:
        rows = model.net(torch.tensor([own, there], device=model.device)).logits[:, position]
    answers = rows.argmax(-1).tolist()
    labels = {text: n for n, text in model.labels.items()} if model.labels else getattr(model.tokenizer, "ids", {})
    named = [entry.get(name, answer) for name, answer in zip(("target", "contrast"), answers, strict=True)]
    target, contrast = (labels[one] if isinstance(one, str) else one for one in named)
    if rows.shape[-1] == 1:  # a single number has no contrast
        return Pair(own, there, position, 0, None)
    if target == contrast:
        raise ValueError("both prompts have the same answer")
    return Pair(own, there, position, target, contrast)


def ids_of(model: Model, prompt: str | Sequence[str | int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(model.token_ids(prompt))
    return tuple(model.tokenizer.ids[one] if isinstance(one, str) else int(one) for one in prompt)

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
    ids, other_ids = (ids_of(model, entry[name]) for name in ("prompt", "counterfactual"))
    if len(ids) != len(other_ids):
        raise ValueError(f"{len(ids)} and {len(other_ids)} tokens")
    position = range(len(ids))[entry.get("position", -1)]
    with torch.no_grad(), model.lock:
        rows = model.net(torch.tensor([ids, other_ids], device=model.device)).logits[:, position]
    answers = rows.argmax(-1).tolist()
    labels = {text: n for n, text in model.labels.items()} if model.labels else getattr(model.tokenizer, "ids", {})
    named = [entry.get(name, answer) for name, answer in zip(("target", "contrast"), answers, strict=True)]
    target, contrast = (labels[name] if isinstance(name, str) else name for name in named)
    if rows.shape[-1] == 1:  # a single number has no contrast
        return Pair(ids, other_ids, position, 0, None)
    if target == contrast:
        raise ValueError("both prompts have the same answer")
    return Pair(ids, other_ids, position, target, contrast)


def ids_of(model: Model, prompt: str | Sequence[str | int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(model.token_ids(prompt))
    return tuple(model.tokenizer.ids[word] if isinstance(word, str) else int(word) for word in prompt)

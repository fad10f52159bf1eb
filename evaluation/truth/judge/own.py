"""Pairs of prompts for a model of the user, from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from icebear.errors import InputError
from icebear.evaluation.truth.judge.pairs import Pair
from icebear.models.model import Model
from icebear.paths import read_text


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

"""What the scripts of this folder share: data of others in ../shared/data, and first words of a model."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from icebear.evaluation.protocol import Setting
from icebear.models.model import Model
from icebear.models.objective import objective_of

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Data of others (README.md beside this file names its sources); a test without it is skipped."""
PROMPTS_PER_PASS = 16
T = TypeVar("T")
Samples = Annotated[int, Setting("Number of prompts; a folder goes on with more.", least=1, decides=False)]


def read(name: str) -> Any:
    """Return the content of a JSON file, or the rows of JSON lines."""
    text = (DATA / name).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # lines, whatever the name ends in
        return [json.loads(line) for line in text.splitlines() if line]


def first_tokens(model: Model, prompts: Sequence[str]) -> list[int]:
    """Return the most probable next token of each prompt."""
    tokens: list[int] = []
    for start in range(0, len(prompts), PROMPTS_PER_PASS):
        objective = objective_of(model, prompts[start : start + PROMPTS_PER_PASS]).resolved(model)
        tokens += [target[0] for target in objective.targets if target]
    return tokens


def answer_token(model: Model, prompt: str, answer: str) -> int:
    """Return the first token of an answer, with its leading space, after a prompt."""
    return model.continuation(f" {answer}", prompt)[0]


def are_right(model: Model, prompts: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Return for each prompt whether the most probable next token is the first one of its answer; not where that is a
    space alone, as of numbers."""
    tokens = first_tokens(model, prompts)
    rows = zip(tokens, prompts, answers, strict=True)
    return [token == answer_token(model, prompt, answer) and model.text(token) != " " for token, prompt, answer in rows]


def is_right(model: Model, prompt: str, answer: str) -> bool:
    return are_right(model, [prompt], [answer]) == [True]


def shuffled(rows: Sequence[T], seed: int) -> list[T]:
    return random.Random(seed).sample(list(rows), len(rows))

"""A phrase after a prompt: its tokens, their logits under edits, and whether a flip holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from icebear.edits import Edit
from icebear.errors import InputError
from icebear.models.model import Model
from icebear.models.objective import phrase_ids
from icebear.models.text.prompts import PromptLike
from icebear.recipe import Recipe
from icebear.steering.apply import steer


def wanted_ids(model: Model, wanted: str | int, prompt: PromptLike) -> tuple[int, ...]:
    """Return the tokens of a wanted or suppressed answer. Raises `InputError` for an empty one."""
    if model.labels:
        return (model.answer_id(wanted),)
    phrase = wanted if isinstance(wanted, str) else (wanted,)
    ids = phrase_ids(model, phrase, prompt) if not isinstance(wanted, str) or wanted.strip() else ()
    if not ids:
        raise InputError("The wanted answer is empty; name a token or a phrase.")
    return ids


def phrase_logits(model: Model, edits: Recipe | Sequence[Edit], prompt: PromptLike, phrase: Sequence[int]) -> Tensor:
    """(S, V) logits of the next token after a prompt, and after each token of the phrase but the last, under edits."""
    read = model.ids(prompt)
    with steer(model, edits, prompt_tokens=len(read)):
        return model.continuation_logits(read, phrase)


def flip_holds(
    model: Model,
    edits: Recipe | Sequence[Edit],
    prompt: PromptLike,
    phrase: Sequence[int],
    top_k: int | None = None,
) -> bool:
    """Return whether the greedy continuation under edits begins with a phrase; with `top_k`, whether one of its tokens,
    each after the ones before it, is not among the `top_k` most probable ones."""
    return holds(phrase_logits(model, edits, prompt, phrase)[None], phrase, top_k)[0]


def holds(logits: Tensor, phrase: Sequence[int], top_k: int | None = None) -> list[bool]:
    """Return for each of N rows of logits (N, S, V) what `flip_holds` does for a model."""
    best = logits.topk(top_k or 1).indices  # (N, S, K)
    tokens = torch.tensor(phrase, device=logits.device)
    inside = (best == tokens[:, None]).any(-1).all(-1)  # (N,)
    return (~inside if top_k else inside).tolist()


def phrase_probability(
    model: Model, edits: Recipe | Sequence[Edit], prompt: PromptLike, phrase: Sequence[int]
) -> float:
    """Return the probability of a phrase: the product over its tokens."""
    logs = phrase_logits(model, edits, prompt, phrase).log_softmax(-1)
    return logs[range(len(phrase)), list(phrase)].sum().exp().item()

"""A phrase that shall be written, or not, and the prompt before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from icebear.concepts.models.model import Model
from icebear.concepts.models.objective import phrase_ids
from icebear.concepts.models.prompts import Prompt, PromptLike
from icebear.edits import Edit
from icebear.errors import InputError
from icebear.recipe import Recipe
from icebear.steering.apply import steer


def wanted_ids(model: Model, wanted: str | int, prompt: PromptLike) -> tuple[int, ...]:
    """Return the tokens that shall come, or be suppressed. Raises `InputError` for none."""
    ids = phrase_ids(model, wanted, prompt) if not isinstance(wanted, str) or wanted.strip() else ()
    if not ids:
        raise InputError("What shall come next is empty; name a token or a phrase.")
    return ids


def phrase_logits(model: Model, edits: Recipe | Sequence[Edit], prompt: PromptLike, phrase: Sequence[int]) -> Tensor:
    """(S, V) logits of the next token behind a prompt, and behind each token of the phrase but the last, with edits."""
    read = model.ids(prompt)
    with steer(model, edits, prompt_tokens=len(read)):
        return model.following(read, phrase)


def flip_holds(
    model: Model,
    edits: Recipe | Sequence[Edit],
    prompt: PromptLike,
    phrase: Sequence[int],
    out_of: int | None = None,
) -> bool:
    """Whether what greedy decoding writes with edits begins with a phrase; with `out_of` k, whether one of its tokens,
    each behind those before it, is not among the first k."""
    first = phrase_logits(model, edits, prompt, phrase).topk(out_of or 1).indices.tolist()
    inside = [token in ids for token, ids in zip(phrase, first, strict=True)]
    return not all(inside) if out_of else all(inside)


def phrase_probability(
    model: Model, edits: Recipe | Sequence[Edit], prompt: PromptLike, phrase: Sequence[int]
) -> float:
    """Of a phrase: the product over its tokens."""
    logs = phrase_logits(model, edits, prompt, phrase).log_softmax(-1)
    return logs[range(len(phrase)), list(phrase)].sum().exp().item()


def prompt_line(prompt: PromptLike) -> str:
    """A prompt in a line: of a chat what the user said last."""
    parts = Prompt.of(prompt)
    if parts.messages:
        return str(next((one["content"] for one in reversed(parts.messages) if one["role"] == "user"), "a chat"))
    return parts.text if parts.text is not None else "token ids"


def prompt_json(prompt: PromptLike) -> Any:
    """A prompt as JSON has it; `Prompt.of` reads it back."""
    parts = Prompt.of(prompt)
    if parts.messages:
        return [dict(message) for message in parts.messages]
    return parts.text if parts.text is not None else list(parts.ids or ())

"""Prompts of every kind, and the text of token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from icebear.concepts.models.answer import Answer
from icebear.concepts.models.chat import Chat
from icebear.errors import InputError

if TYPE_CHECKING:
    import numpy
    import PIL.Image
    from torch import Tensor

PromptLike: TypeAlias = (
    "Prompt | str | Path | Sequence[int] | Chat | Sequence[Mapping[str, Any]] | Answer | Tensor | numpy.ndarray | "
    "PIL.Image.Image"
)
"""A text, token ids (a list, an array, a tensor), a `Chat` or its messages (a list of dicts with role and content), or
an `Answer` with its prompt; for an image classifier the path of an image, an image, or its pixels."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: exactly one of these is set."""

    text: str | None = None
    """A text, or for an image classifier the path of an image."""
    ids: tuple[int, ...] | None = None
    """Token ids, including special tokens."""
    tokens: Sequence[str | int] | None = None
    """The texts or ids of single tokens, as results show them; no special tokens are added."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The messages of a chat."""
    image: Any = None
    """An image, or pixels (C, H, W)."""

    @classmethod
    def of(cls, prompt: Any) -> Prompt:
        """Return a `PromptLike` as a prompt. Raises `InputError` for anything else."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, (str, Path)):
            return cls(text=str(prompt))
        if isinstance(prompt, Chat):
            return cls(messages=prompt.messages)
        if isinstance(prompt, Answer):
            return cls(ids=tuple(prompt.before(len(prompt.ids))))
        if hasattr(prompt, "convert") or getattr(prompt, "ndim", 0) == 3:
            return cls(image=prompt)
        if isinstance(prompt, (list, tuple)) and prompt and all(isinstance(part, Mapping) for part in prompt):
            return cls(messages=tuple(prompt))
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        flat = isinstance(values, Sequence) and not isinstance(values, bytes)
        if not flat or not all(isinstance(part, Integral) for part in values):
            raise InputError(
                "A prompt is a text, a flat list of token ids or a list of chat messages, not this "
                f"{type(prompt).__name__}."
            )
        return cls(ids=tuple(map(int, values)))


def prompt_line(prompt: PromptLike) -> str:
    """Return a prompt in one line; for a chat, the last message of the user."""
    parts = Prompt.of(prompt)
    if parts.messages:
        return str(next((one["content"] for one in reversed(parts.messages) if one["role"] == "user"), "a chat"))
    return parts.text if parts.text is not None else "token ids"


def prompt_json(prompt: PromptLike) -> Any:
    """Return a prompt JSON-ready; `Prompt.of` reads it."""
    parts = Prompt.of(prompt)
    if parts.messages:
        return [dict(message) for message in parts.messages]
    return parts.text if parts.text is not None else list(parts.ids or ())


Prompts: TypeAlias = "list[PromptLike] | tuple[PromptLike, ...]"
"""Several prompts."""


def prompts_of(prompt: PromptLike | Prompts) -> tuple[list[Prompt], bool]:
    """Return one or several prompts as a list, and whether it was one."""
    if not isinstance(prompt, (list, tuple)):
        return [Prompt.of(prompt)], True
    if not prompt:
        raise InputError("There is no prompt; give at least one.")
    single = isinstance(prompt[0], (Integral, Mapping))  # token ids, or the messages of a chat
    return ([Prompt.of(prompt)] if single else [Prompt.of(part) for part in prompt]), single


def joined(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text of each token if some are parts of a character, which is the text of its last token."""
    texts = [""] * len(ids)
    known = begun = 0  # tokens before `begun` have their text; those from `known` on are decoded as context
    for place in range(len(ids)):
        ends = (ids[start : place + 1] for start in range(place, max(begun, place - 3) - 1, -1))
        if place + 1 < len(ids) and all(decode(end).endswith("\ufffd") for end in ends):
            continue  # a character is four tokens at most, and none is complete here
        texts[place] = decode(ids[known : place + 1])[len(decode(ids[known:begun])) :]
        known, begun = begun, place + 1
    return texts

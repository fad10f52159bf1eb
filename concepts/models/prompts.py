"""What may be given as a prompt, checked, and how token ids read as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

from icebear.errors import InputError

Prompt = Any
"""A text, or the token ids themselves (a list, an array, a tensor); for an image classifier the path of an image, an
image, or its pixels."""


def prompts_of(given: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts of a list of them, or the one that is given; and whether it is one."""
    if not isinstance(given, (list, tuple)):
        return [given], True
    if not given:
        raise InputError("There is no prompt; give at least one.")
    single = isinstance(given[0], (Integral, dict))  # token ids, or the messages of a chat
    return ([given] if single else list(given)), single


def readable(text: str) -> str:
    """The text itself. Raises `InputError` for one that a tokenizer cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Character {error.start} of the text is a stray byte; give the text in UTF-8.") from None
    return text


def numbers(prompt: Prompt) -> list[int]:
    """Token ids, whatever holds them. Raises `InputError` for anything else."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    parts = values if isinstance(values, Sequence) and not isinstance(values, bytes) else [values]
    if any(isinstance(part, dict) for part in parts):
        raise InputError(
            "Chat messages are not read yet; make token ids of them first, with "
            "tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)."
        )
    if parts is not values or not all(isinstance(part, Integral) for part in parts):
        raise InputError(f"A prompt is a text or a flat list of token ids, which this {type(prompt).__name__} is not.")
    return [int(part) for part in parts]


def joined(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token where some are parts of a character, which is whole in its last one."""
    found = [""] * len(ids)
    known = begun = 0  # the tokens before `begun` have their text; those from `known` on are decoded as its context
    for place in range(len(ids)):
        ends = (ids[start : place + 1] for start in range(place, max(begun, place - 3) - 1, -1))
        if place + 1 < len(ids) and all(decode(end).endswith("\ufffd") for end in ends):
            continue  # a character is four tokens at most, and none is complete here
        found[place] = decode(ids[known : place + 1])[len(decode(ids[known:begun])) :]
        known, begun = begun, place + 1
    return found

"""Prompts of every kind, batches of prompts, and the text of token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from icebear.concepts.models.answer import Answer
from icebear.concepts.models.chat import Chat
from icebear.errors import InputError

if TYPE_CHECKING:
    import numpy
    import PIL.Image

    from icebear.concepts.models.model import Model

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
    tokens: Sequence[str] | None = None
    """The texts of single tokens, as results show them; no special tokens are added."""
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


@dataclass(frozen=True)
class Batch:
    """Prompts as token ids, padded on the right (or left, for generation)."""

    ids: Tensor  # (B, T)
    mask: Tensor  # (B, T), 1 where there is a token
    lengths: tuple[int, ...]
    decoder: Batch | None = None
    """The input of an encoder-decoder's decoder."""
    pixels: Tensor | None = None  # (B, C, H, W), of images; each token is a patch then

    @property
    def spans(self) -> tuple[slice, slice]:
        """The columns of the encoder (or only) stack and of the decoder, if all tokens are in one row."""
        end = self.ids.shape[1]
        return slice(0, end), slice(end, end + (self.decoder.ids.shape[1] if self.decoder else 0))

    def span_of(self, model: Model, layer: int) -> slice:
        """Return the columns that a layer reads."""
        return self.spans[model.stack_of(layer) if self.decoder else 0]

    def columns(self, row: int) -> list[int]:
        """Return the columns of this row's tokens, without padding."""
        written = self.decoder.lengths[row] if self.decoder else 0
        start = self.spans[1].start
        return [*range(self.lengths[row]), *range(start, start + written)]

    def row_ids(self, row: int) -> tuple[int, ...]:
        decoder = self.decoder.row_ids(row) if self.decoder else ()
        return (*self.ids[row, : self.lengths[row]].tolist(), *decoder)

    def rows(self, order: Sequence[int]) -> Batch:
        """Return these rows, in this order, padded to the longest of them."""
        lengths = tuple(self.lengths[row] for row in order)
        ids, mask = (x[list(order), : max(lengths)] for x in (self.ids, self.mask))
        pixels = None if self.pixels is None else self.pixels[list(order)]
        return Batch(ids, mask, lengths, self.decoder.rows(order) if self.decoder else None, pixels)


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

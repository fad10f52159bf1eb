"""Prompts of every kind, what is explained of one, and the text of token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from icebear.errors import InputError
from icebear.models.text.answer import Answer
from icebear.models.text.chat import Chat

if TYPE_CHECKING:
    import numpy
    import PIL.Image
    from torch import Tensor


PromptLike: TypeAlias = (
    "Prompt | str | Path | tuple[str, str] | Sequence[int] | Chat | Sequence[Mapping[str, Any]] | Answer | Tensor | "
    "numpy.ndarray | PIL.Image.Image"
)
"""A text, a pair of texts (a tuple), token ids (a list, an array, a tensor), a `Chat` or its messages (a list of dicts
with role and content), or an `Answer` with its prompt; for an image classifier the path of an image, an image, or its
pixels."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: one of these is set, or a text, ids or a chat and the image that it is about; once it was read, also
    its ids."""

    text: str | None = None
    """A text, or for an image classifier the path of an image."""
    pair: str | None = None
    """The second text of a pair, after `text`: a premise and its hypothesis, a question and a passage."""
    ids: tuple[int, ...] | None = None
    """Token ids, including special tokens."""
    tokens: Sequence[str | int] | None = None
    """The texts or ids of single tokens, as results show them; no special tokens are added."""
    chat: Chat | None = None
    image: Any = None
    """An image, or pixels (C, H, W); in a prompt also a path, and once it was read a `PromptImage`."""
    about: str = ""
    """In words, an image that another one is compared with."""

    @classmethod
    def of(cls, prompt: Any) -> Prompt:
        """Return a `PromptLike` as a prompt. Raises `InputError` for anything else."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, (str, Path)):
            return cls(text=str(prompt))
        if isinstance(prompt, Chat):
            return cls(chat=prompt, image=prompt.image)
        if is_pair(prompt):
            return cls(text=prompt[0], pair=prompt[1])
        if isinstance(prompt, Answer):
            return cls(ids=tuple(prompt.before(len(prompt.ids))))
        if hasattr(prompt, "convert") or getattr(prompt, "ndim", 0) == 3:
            return cls(image=prompt)
        if isinstance(prompt, (list, tuple)) and prompt and all(isinstance(part, Mapping) for part in prompt):
            return cls.of(Chat(prompt))
        if isinstance(prompt, Mapping) and prompt.keys() & {"pair", "messages"}:
            return cls._of_json(prompt)
        return cls(ids=_flat(prompt))

    @classmethod
    def _of_json(cls, prompt: Mapping[str, Any]) -> Prompt:
        """Return what `prompt_json` wrote as an object."""
        if "pair" in prompt and is_pair(tuple(prompt["pair"])):
            return cls(text=prompt["pair"][0], pair=prompt["pair"][1])
        return cls.of(Chat(prompt.get("messages", ()), prompt.get("template")))


def _flat(prompt: Any) -> tuple[int, ...]:
    """Return token ids in a list, an array or a tensor, also as a tokenizer returns one prompt (1, T). Raises
    `InputError`."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if getattr(prompt, "ndim", 0) == 2 and len(values) == 1:
        values = values[0]
    flat = isinstance(values, Sequence) and not isinstance(values, bytes)
    if not flat or not all(isinstance(part, Integral) for part in values):
        raise InputError(
            "A prompt is a text, a pair of texts (a tuple), a flat list of token ids or a list of chat messages, not "
            f"this {type(prompt).__name__}."
        )
    return tuple(map(int, values))


def is_pair(prompt: Any) -> bool:
    """Return whether this is a pair of texts. A list of two texts is two prompts."""
    return isinstance(prompt, tuple) and len(prompt) == 2 and all(isinstance(text, str) for text in prompt)


def prompt_line(prompt: PromptLike) -> str:
    """Return a prompt in one line; for a chat, the last message of the user."""
    parts = Prompt.of(prompt)
    if parts.chat:
        texts = (message["content"] for message in reversed(parts.chat.messages) if message["role"] == "user")
        return str(next(texts, "a chat"))
    return " ".join(filter(None, (parts.text, parts.pair))) if parts.text is not None else "token ids"


def prompt_json(prompt: PromptLike) -> Any:
    """Return a prompt JSON-ready; `Prompt.of` reads it."""
    parts = Prompt.of(prompt)
    if parts.chat:
        return parts.chat.to_data()
    if parts.pair is not None:
        return {"pair": [parts.text, parts.pair]}
    return parts.text if parts.text is not None else list(parts.ids or ())


Prompts: TypeAlias = "list[PromptLike] | tuple[PromptLike, ...]"
"""Several prompts."""


def prompts_of(prompt: PromptLike | Prompts) -> tuple[list[Prompt], bool]:
    """Return one or several prompts as a list, and whether it was one."""
    if not isinstance(prompt, (list, tuple)) or is_pair(prompt):
        return [Prompt.of(prompt)], True
    if not prompt:
        raise InputError("There is no prompt; give at least one.")
    is_single = isinstance(prompt[0], (Integral, Mapping))  # token ids, or the messages of a chat
    return ([Prompt.of(prompt)] if is_single else [Prompt.of(part) for part in prompt]), is_single


def joined(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text of each token if some are parts of a character, which is the text of its last token."""
    texts = [""] * len(ids)
    known = begun = 0  # tokens before `begun` have their text; those from `known` on are decoded as context
    for position in range(len(ids)):
        ends = (ids[start : position + 1] for start in range(position, max(begun, position - 3) - 1, -1))
        if position + 1 < len(ids) and all(decode(end).endswith("\ufffd") for end in ends):
            continue  # a character is four tokens at most, and none is complete here
        texts[position] = decode(ids[known : position + 1])[len(decode(ids[known:begun])) :]
        known, begun = begun, position + 1
    return texts


ObjectiveKind = Literal["logit", "log-odds", "centered-logit", "mean-centered-logit"]
"""The number that is explained, a sum over the tokens of an answer: ``logit``; ``log-odds``, the logit minus the mean
of all other logits weighted by probability (it has the gradient of the log-odds); ``centered-logit``, the logit minus
the mean over the vocabulary; ``mean-centered-logit``, the mean of that, to compare answers of different lengths."""


@dataclass(frozen=True)
class PromptRequest:
    """What is explained of one prompt, in token ids: it is made once (`prompt_request`), and passed whole."""

    prompt: Prompt
    answer: tuple[int, ...] | None = None
    """The tokens, or the label, that are explained; None for the most probable ones."""
    contrast: int | None = None
    is_phrase: bool = False
    """Whether the answer is a whole continuation, not a token."""
    contrast_phrase: tuple[int, ...] | None = None
    """The phrase that a phrase is explained against."""
    before: Prompt | None = None
    """What precedes the answer, see `ModelTask.before`."""
    position: int | None = None
    """The token whose output is explained."""
    counterfactuals: tuple[Prompt, ...] = ()
    kind: ObjectiveKind = "logit"
    answer_start: int | None = None
    """The position of the first token of the model's own answer."""

    @property
    def is_open(self) -> bool:
        """Whether the target or the contrast of a comparison is the model's own answer."""
        return not self.is_phrase and (self.answer is None or self.contrast is None)


def special_note(model: Any, prompt: PromptLike) -> str:
    """Return a sentence about special tokens that the tokenizer adds to a text and that change what is asked: at its
    beginning a second time, or at its end; empty if there are none."""
    read = Prompt.of(prompt)
    if read.text is None or read.ids is not None or not (model.task.is_causal and model.reads_any_text):
        return ""
    before, after = _added(model)
    text, notes = read.text.strip(), []
    if before and (again := next((piece for piece in before if text.startswith(piece)), None)):
        notes.append(
            f"The prompt begins with {again} twice, because the tokenizer adds it; leave it out of the text, or pass "
            "messages with --chat."
        )
    if after and text.endswith(after[0]):
        notes.append(f"The prompt ends in {after[0]} twice, because the tokenizer adds it; leave it out of the text.")
    elif after:
        notes.append(
            f"The tokenizer adds {''.join(after)} at the end, so that the prediction is what follows it; give token "
            "ids without it, or change the tokenizer (add_eos_token=False)."
        )
    return " ".join(notes)


def _added(model: Any) -> tuple[list[str], list[str]]:
    """Return the texts of the special tokens that the tokenizer adds before and after a text."""
    bare, ids = model.tokens_of("a"), model.token_ids("a")
    start = next((at for at in range(len(ids)) if ids[at : at + len(bare)] == bare), None)
    if not bare or start is None:
        return [], []
    parts = ids[:start], ids[start + len(bare) :]
    before, after = ([model.text(token) for token in part if token in model.special_ids()] for part in parts)
    return before, after

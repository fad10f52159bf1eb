"""The answer of a model to a prompt, token by token."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from typing import Any

from icebear.errors import InputError
from icebear.models.text.chat import Chat
from icebear.models.text.reader import Reader
from icebear.models.text.written import Written, written
from icebear.records import InNotebooks
from icebear.values import several, shown

Span = tuple[int, int] | str
"""Tokens [start, stop) of an answer, or a phrase of it; ``3:5`` means tokens unless it is a phrase."""


@dataclass(frozen=True, repr=False)
class Answer(InNotebooks):
    """The answer of a model to a prompt or a chat."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """The token ids, without the token that ends the answer."""
    token_strings: tuple[str, ...]
    probabilities: tuple[float, ...]
    """The probability of each token after the tokens before it, at temperature 1."""
    ended: bool
    """Whether the model ended the answer; else it reached the maximum number of tokens."""
    question: Chat | None = None
    """The chat that is answered."""
    model: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    """The name and fingerprint of the model; None for an answer that was not generated."""
    calls: tuple[int, ...] = ()
    """The character at which each call of a tool begins, in a recorded answer."""
    dropped: str = ""
    """The reasoning of a recorded answer that the template does not write."""
    image: Any = field(default=None, compare=False, repr=False)
    """The image that the prompt is about, as the model reads it."""

    @cached_property
    def text(self) -> str:
        return "".join(self.token_strings)

    @property
    def chat(self) -> Chat:
        """The chat with this answer; continue it with `Chat.then`. Raises `InputError` for a plain prompt."""
        if self.question is None:
            raise InputError("This answer to a plain prompt has no chat to continue; pass a Chat to model.answer.")
        *before, last = self.question.messages
        if last["role"] != "assistant":
            return self.question.then("assistant", self.text, self.ids)
        if not last["content"] and last.get("tool_calls"):
            raise InputError("The last assistant message has calls of tools and no text; pass a text as its content.")
        ids = {"ids": [*last["ids"], *self.ids]} if "ids" in last else {}
        return self.question.of([*before, {"role": "assistant", "content": last["content"] + self.text, **ids}])

    def check(self, model: Reader) -> None:
        """Raise `InputError` if this is the answer of another model."""
        if self.model is not None:
            model.check_made(self.model, "The answer")

    def token_range(self, span: Span | None = None) -> tuple[int, int]:
        """Return the tokens [i, j) of a span, or all for None. Raises `InputError` if there are none."""
        count = len(self.ids)
        if isinstance(span, str):
            named = read_span(span)
            if isinstance(named, str) or span.strip() in self.text:
                return self._phrase(span)
            span = named
        bounds = [0, count] if span is None else several(span)
        if len(bounds) != 2 or not all(isinstance(bound, Integral) for bound in bounds):
            raise InputError(
                f"{shown(span)} is not a span; give a phrase of the answer, or the range of its tokens, such as 0:3."
            )
        start, stop = map(int, bounds)
        if not 0 <= start < stop <= count:
            raise InputError(f"The answer has no tokens {start}:{stop}; give a range of tokens inside 0:{count}.")
        return start, stop

    def _phrase(self, phrase: str) -> tuple[int, int]:
        words = phrase.strip()
        match = re.search(rf"(?<!\w){re.escape(words)}(?!\w)", self.text)  # else inside of words
        at = (match.start() if match else self.text.find(words)) if words else -1
        if at < 0:
            raise InputError(
                f"{phrase!r} is not in the answer {self.text!r}; give one of its phrases, or a range of tokens, such "
                "as 0:3."
            )
        return self.tokens_at(at, at + len(words))

    def tokens_at(self, at: int, stop: int) -> tuple[int, int]:
        """Return the tokens [i, j) that have the characters [at, stop) of the text."""
        ends = list(accumulate(map(len, self.token_strings)))
        start = bisect_right(ends, at)
        while start and not self.token_strings[start - 1]:  # the first bytes of a character
            start -= 1
        return start, 1 + bisect_left(ends, stop)

    def before(self, index: int) -> list[int]:
        """Return all token ids before one token of the answer."""
        return [*self.prompt_ids, *self.ids[:index]]


def read_span(text: str) -> Span:
    """Read ``3:5`` or ``3-5`` as tokens, anything else as a phrase."""
    numbers = re.fullmatch(r"([0-9]{1,6})[:-]([0-9]{1,6})", text.strip())
    return (int(numbers[1]), int(numbers[2])) if numbers else text


def message_ids(model: Reader, chat: Chat, turn: int) -> list[int]:
    """Return the tokens of a message that a model wrote; a message without ids is tokenized."""
    message = chat.messages[turn]
    content, ids = message["content"], message.get("ids")
    if _is_recorded(message):
        return model.tokens_of(written(model, chat, turn).text)
    if not isinstance(content, str) or not content:
        raise InputError(f"Message {turn} of the chat has no text; give it some.")
    if not ids:
        return model.tokens_of(content)
    if "".join(model.pieces(model.ids(ids))) != content:
        raise InputError(f"The token ids of message {turn} do not match its text; give ids of {model.name}.")
    return ids


def _is_recorded(message: Mapping[str, Any]) -> bool:
    """Return whether more than its content was written, and it has no ids."""
    return not message.get("ids") and bool(message.get("tool_calls") or message.get("reasoning_content"))


def nth_answer(model: Reader, chat: Chat, number: int) -> Answer:
    """Return the assistant's n-th message, from 1, as an answer. Raises `InputError` if there is none."""
    turns = [turn for turn, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if not 1 <= number <= len(turns):
        count = "1 answer" if len(turns) == 1 else f"{len(turns)} answers"
        raise InputError(f"The conversation has {count} of the assistant, so there is no answer {number}.")
    return answer_of(model, chat, turns[number - 1])


def answer_of(model: Reader, chat: Chat, turn: int, prompt: Any = None) -> Answer:
    """Return a message of a saved chat as an answer, with the probability of each token. Raises `InputError`.

    prompt: the messages before it with their image; by default the image is read from its path.
    """
    if not 0 < turn < len(chat.messages) or chat.messages[turn]["role"] != "assistant":
        raise InputError(
            f"Message {turn} of the chat is not an answer; choose one that the model wrote after a message."
        )
    question = chat.of(chat.messages[:turn])
    recorded = written(model, chat, turn) if _is_recorded(chat.messages[turn]) else Written("")
    ids = model.tokens_of(recorded.text) if recorded.text else message_ids(model, chat, turn)
    batch = model.encode([question if prompt is None else prompt])
    read, image = batch.row_ids(0), batch.images and batch.images[0]
    model.ids([*read, *ids])  # refused where it is too long
    probabilities = model.continuation_logits(read, ids, image).softmax(-1)[range(len(ids)), ids].tolist()
    about = (True, question, None, *recorded[1:])
    return Answer(read, tuple(ids), model.pieces(ids), tuple(probabilities), *about, image=image)

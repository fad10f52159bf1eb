"""What a model said to a prompt, token by token."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING

from icebear.concepts.models.chat import Chat
from icebear.errors import InputError
from icebear.values import several, shown

if TYPE_CHECKING:
    from icebear.concepts.models.model import Model

Span = tuple[int, int] | str
"""Tokens of an answer, half open, or a phrase of it; ``3:5`` are tokens where it is no phrase."""


@dataclass(frozen=True)
class Answer:
    """What a model said to a prompt."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    """Its tokens, without the one that ended it."""
    token_strings: tuple[str, ...]
    probabilities: tuple[float, ...]
    """Of each token, when it was its turn, at temperature 1."""
    ended: bool
    """Whether the model ended it, and not the number of tokens."""
    asked: Chat | None = None
    """The chat that it answers."""

    @cached_property
    def text(self) -> str:
        return "".join(self.token_strings)

    @property
    def chat(self) -> Chat:
        """The conversation with this answer; `Chat.then` goes on with it. Raises `InputError` behind a plain prompt."""
        if self.asked is None:
            raise InputError("This answers a plain prompt, not a chat; ask with a Chat to go on.")
        *before, last = self.asked.messages
        if last["role"] != "assistant":
            return self.asked.then("assistant", self.text, self.ids)
        if not isinstance(last["content"], str):
            raise InputError("An answer that was begun in parts does not go on; give its beginning as one text.")
        ids = {"ids": [*last["ids"], *self.ids]} if "ids" in last else {}
        return Chat([*before, {"role": "assistant", "content": last["content"] + self.text, **ids}])

    def places(self, span: Span | None = None) -> tuple[int, int]:
        """The tokens (i, j), half open, of a span; of None all. Raises `InputError` where there are none."""
        count = len(self.ids)
        if isinstance(span, str):
            named = read_span(span)
            if isinstance(named, str) or span.strip() in self.text:
                return self._phrase(span)
            span = named
        places = [0, count] if span is None else several(span)
        if len(places) != 2 or not all(isinstance(place, Integral) for place in places):
            raise InputError(f"{shown(span)} is not a span; give a phrase of the answer or two places of its tokens.")
        start, stop = map(int, places)
        if not 0 <= start < stop <= count:
            raise InputError(f"The answer has tokens 0 to {count} (half open), so there is no span {start} to {stop}.")
        return start, stop

    def _phrase(self, phrase: str) -> tuple[int, int]:
        words = phrase.strip()
        whole = re.search(rf"(?<!\w){re.escape(words)}(?!\w)", self.text)  # else inside of words
        at = (whole.start() if whole else self.text.find(words)) if words else -1
        if at < 0:
            raise InputError(f"{phrase!r} is no part of the answer {self.text!r}; name one of its phrases, or tokens.")
        ends = list(accumulate(map(len, self.token_strings)))
        first = bisect_right(ends, at)
        while first and not self.token_strings[first - 1]:  # the first bytes of a character
            first -= 1
        return first, 1 + bisect_left(ends, at + len(words))

    def before(self, place: int) -> list[int]:
        """All that was read when a token was its turn."""
        return [*self.prompt_ids, *self.ids[:place]]


def read_span(text: str) -> Span:
    """``3:5`` or ``3-5`` as tokens, anything else as a phrase."""
    numbers = re.fullmatch(r"([0-9]{1,6})[:-]([0-9]{1,6})", text.strip())
    return (int(numbers[1]), int(numbers[2])) if numbers else text


def message_ids(model: Model, chat: Chat, turn: int) -> list[int]:
    """The tokens of a message that the model wrote. A message without ids is tokenized. Raises `InputError`."""
    content, ids = chat.messages[turn]["content"], chat.messages[turn].get("ids")
    if not isinstance(content, str) or not content:
        raise InputError(f"Message {turn} of the chat has no text; give it some.")
    if not ids:
        return model.tokens_of(content)
    if "".join(model.pieces(model.ids(ids))) != content:
        raise InputError(f"The tokens of message {turn} are another text; were they written by {model.name}?")
    return ids


def answer_of(model: Model, chat: Chat, turn: int) -> Answer:
    """A message of a saved chat as an answer, with the probability of each token. Raises `InputError`."""
    if not 0 < turn < len(chat.messages) or chat.messages[turn]["role"] != "assistant":
        raise InputError(f"Message {turn} of the chat is no answer; name one that the model wrote behind another one.")
    question = Chat(chat.messages[:turn])
    read, ids = model.ids(question), message_ids(model, chat, turn)
    model.ids([*read, *ids])  # refused where it is too long
    probabilities = model.following(read, ids).softmax(-1)[range(len(ids)), ids].tolist()
    return Answer(tuple(read), tuple(ids), model.pieces(ids), tuple(probabilities), True, question)

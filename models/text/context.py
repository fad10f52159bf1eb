"""The sources in a conversation or a text: its sentences, messages or documents, which can be removed from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from icebear.models.text.chat import Chat
from icebear.models.text.splitting import bounds_of, removed

QUESTION = ("?", "\uff1f", "\u061f")
"""How a question ends."""
OPENS = (*QUESTION, ":")
"""How the beginning of a message ends that asks something about the rest of it."""
TEXTS = ("reasoning_content", "content")
"""The texts of a message, in the order in which a model writes them."""
IMAGE = "image"
REQUEST_PARTS = 3
"""A question is the end of a message if at most two sentences follow it, such as "Answer in one word."."""


@dataclass(frozen=True)
class ContextSource:
    """A part of a message that can be removed: characters [start, stop) of a text, or a call of a tool."""

    role: str
    """Of the message; ``prompt`` for a part of a plain text."""
    message: int
    """The message's index."""
    text: str
    start: int
    stop: int
    of: str | int = "content"
    """What of its message: ``content``, ``reasoning_content``, `IMAGE`, or the number of a call of a tool."""


@dataclass(frozen=True)
class Context:
    """A conversation or a text with its sources."""

    prompt: Chat | str
    sources: tuple[ContextSource, ...]
    request: tuple[ContextSource, ...]
    """What the user asks last: never a control. It is among the sources where messages, such as outputs of tools,
    follow it; else it stays in place, because the answer is about it."""

    @classmethod
    def of(cls, prompt: Chat | str, by: str = "sentence", has_image: bool = False) -> Context:
        """Split a conversation or a text into sources. by: ``sentence``, ``message`` or ``document``. has_image:
        whether it is about an image, which is a source too."""
        messages = prompt.messages if isinstance(prompt, Chat) else [{"role": "prompt", "content": prompt}]
        sources = [source for number, message in enumerate(messages) for source in _sources(number, message, by)]
        last = max((source.message for source in sources if source.role in ("user", "prompt")), default=-1)
        of_last = [source for source in sources if source.message == last]
        request = _request(of_last, len(sources) + has_image, by)
        stays = by != "message" and last == len(messages) - 1
        image = [_image(prompt)] if has_image else []
        return cls(prompt, (*image, *(x for x in sources if not (stays and x in request))), tuple(request))

    @property
    def question(self) -> tuple[ContextSource, ...]:
        """What the user asks, where it stays."""
        return tuple(part for part in self.request if part not in self.sources)

    def without(self, sources: Collection[ContextSource]) -> Chat | str:
        """Return the conversation or the text without some sources, of which an image is none that could be cut out. A
        message that has lost its text stays, empty."""
        sources = [source for source in sources if source.of != IMAGE]
        if not isinstance(self.prompt, Chat):
            return removed(self.prompt, [(source.start, source.stop) for source in sources])
        messages = list(self.prompt.messages)
        for number in {source.message for source in sources}:
            messages[number] = _cut(messages[number], [source for source in sources if source.message == number])
        return self.prompt.of(messages)


def _request(parts: Sequence[ContextSource], count: int, by: str) -> Sequence[ContextSource]:
    """Return what the user's last message asks: its end from the last question on, or a question or heading at its
    beginning, or its last part. count: the number of all sources, of which something has to be left."""
    if not parts or (count < 2 and by != "message"):
        return ()
    end = range(max(0, len(parts) - (REQUEST_PARTS if by == "sentence" else 1)), len(parts))
    questions = [number for number in end if parts[number].text.rstrip().endswith(QUESTION)]
    if questions:
        ending = parts[questions[-1] :]
        return ending if len(ending) < count else ending[:1]
    opens = parts[0].text.rstrip().endswith(OPENS)
    return parts[:1] if opens and len(parts) > 1 and not parts[-1].text.rstrip().endswith(OPENS) else parts[-1:]


def _image(prompt: Chat | str) -> ContextSource:
    turn = prompt.image_turn or 0 if isinstance(prompt, Chat) else 0
    role = prompt.messages[turn]["role"] if isinstance(prompt, Chat) else "prompt"
    return ContextSource(role, turn, "the image", 0, 0, IMAGE)


def _sources(number: int, message: dict[str, Any], by: str) -> Iterator[ContextSource]:
    role = message["role"]
    for field in TEXTS:
        text = message.get(field) or ""
        for start, stop in bounds_of(text, by):
            yield ContextSource(role, number, text[start:stop], start, stop, field)
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield ContextSource(role, number, call_text(call), 0, 0, index)


def _cut(message: dict[str, Any], sources: Sequence[ContextSource]) -> dict[str, Any]:
    """Return a message without some of its sources, and without token ids, which are of its whole text."""
    cut = {key: value for key, value in message.items() if key not in ("ids", "tool_calls")}
    gone = {source.of for source in sources}
    for field in [field for field in TEXTS if field in gone]:
        cut[field] = removed(message[field], [(x.start, x.stop) for x in sources if x.of == field])
    calls = [call for index, call in enumerate(message.get("tool_calls") or ()) if index not in gone]
    return {**cut, "tool_calls": calls} if calls else cut


def call_text(call: Any) -> str:
    """Return a call of a tool as ``name(arguments)``."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name', 'call')}({written})"

"""The sources in a conversation or a text: its sentences, messages or documents, which can be removed from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from icebear.models.text.chat import Chat
from icebear.models.text.splitting import bounds_of, removed

ASKS = ("?", "\uff1f", "\u061f", ":")
"""How a question, or what asks for an answer, ends."""


@dataclass(frozen=True)
class ContextSource:
    """A part of a message that can be removed: characters [start, stop) of its text, or a call of a tool."""

    role: str
    """Of the message; ``prompt`` for a part of a plain text."""
    message: int
    """The message's index."""
    text: str
    start: int
    stop: int
    call: int | None = None
    """The number of the call of a tool in its message; None for a part of the text."""


@dataclass(frozen=True)
class Context:
    """A conversation or a text with its sources."""

    prompt: Chat | str
    sources: tuple[ContextSource, ...]
    question: ContextSource | None
    """What the last message of the user asks at its end: it stays, because the answer is about it."""

    @classmethod
    def of(cls, prompt: Chat | str, by: str = "sentence") -> Context:
        """Split a conversation or a text into sources. by: ``sentence``, ``message`` or ``document``."""
        messages = prompt.messages if isinstance(prompt, Chat) else [{"role": "prompt", "content": prompt}]
        sources = [source for number, message in enumerate(messages) for source in _sources(number, message, by)]
        last = sources[-1] if len(sources) > 1 else None
        asks = last and last.role in ("user", "prompt") and last.text.rstrip().endswith(ASKS)
        is_question = asks and by != "message" and last.message == len(messages) - 1  # type: ignore[union-attr]
        return cls(prompt, tuple(sources[:-1] if is_question else sources), last if is_question else None)

    def without(self, sources: Collection[ContextSource]) -> Chat | str:
        """Return the conversation or the text without some sources. A message that has lost its text stays, empty."""
        if not isinstance(self.prompt, Chat):
            return removed(self.prompt, [(source.start, source.stop) for source in sources])
        messages = list(self.prompt.messages)
        for number in {source.message for source in sources}:
            messages[number] = _cut(messages[number], [source for source in sources if source.message == number])
        return self.prompt.of(messages)


def _sources(number: int, message: dict[str, Any], by: str) -> Iterator[ContextSource]:
    role, content = message["role"], message["content"] or ""
    for start, stop in bounds_of(content, by):
        yield ContextSource(role, number, content[start:stop], start, stop)
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield ContextSource(role, number, call_text(call), 0, 0, index)


def _cut(message: dict[str, Any], sources: Sequence[ContextSource]) -> dict[str, Any]:
    """Return a message without some of its sources, and without token ids, which are of its whole text."""
    cut = {key: value for key, value in message.items() if key not in ("ids", "tool_calls")}
    cut["content"] = removed(message["content"] or "", [(x.start, x.stop) for x in sources if x.call is None])
    gone = {source.call for source in sources}
    calls = [call for index, call in enumerate(message.get("tool_calls") or ()) if index not in gone]
    return {**cut, "tool_calls": calls} if calls else cut


def thoughts_beside(chat: Chat) -> Iterator[tuple[ContextSource, Chat]]:
    """Yield the reasoning that stands beside the text of a message, and the conversation without it."""
    for number, message in enumerate(chat.messages):
        if text := message.get("reasoning_content"):
            rest = {key: value for key, value in message.items() if key != "reasoning_content"}
            source = ContextSource(message["role"], number, str(text), 0, 0)
            yield source, chat.of([*chat.messages[:number], rest, *chat.messages[number + 1 :]])


def call_text(call: Any) -> str:
    """Return a call of a tool as ``name(arguments)``."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name', 'call')}({written})"
